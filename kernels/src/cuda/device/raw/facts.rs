//! What the driver says of a device, without a context on it.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice_P2PAttribute as Link, CUdevice_attribute as Attribute};

use super::check;
use crate::cuda::device::{CudaError, Uuid};

/// Longest name and PCI address.
const TEXT_BYTES: usize = 256;

/// A device of this process, by its number. The driver is started.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda::device) struct Handle {
    pub(super) device: sys::CUdevice,
    pub(in crate::cuda::device) ordinal: u32,
}

impl Handle {
    /// All of them.
    pub(in crate::cuda::device) fn all() -> Result<Vec<Handle>, CudaError> {
        let mut count: c_int = 0;
        // SAFETY: room for the number.
        let code = unsafe { sys::cuDeviceGetCount(&mut count) };
        check("the driver", "count devices", "cuDeviceGetCount", code)?;
        (0..u32::try_from(count).unwrap_or(0)).map(Handle::new).collect()
    }

    /// That of a number.
    pub(in crate::cuda::device) fn of(ordinal: u32) -> Result<Handle, CudaError> {
        let found = Handle::all()?.into_iter().find(|handle| handle.ordinal == ordinal);
        found.ok_or_else(|| CudaError::NoDevice {
            wanted: format!("cuda:{ordinal}"),
            reason: "it is not among the devices of this process".to_owned(),
        })
    }

    fn new(ordinal: u32) -> Result<Handle, CudaError> {
        let mut device = 0;
        // SAFETY: room for the number; below the count.
        let code = unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) };
        check(&format!("cuda:{ordinal}"), "find the device", "cuDeviceGet", code)?;
        Ok(Handle { device, ordinal })
    }

    pub(in crate::cuda::device) fn name(self) -> Result<String, CudaError> {
        let mut text = [0 as c_char; TEXT_BYTES];
        // SAFETY: room for as many bytes as said.
        let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), TEXT_BYTES as c_int, self.device) };
        self.check("tell its name", "cuDeviceGetName", code)?;
        Ok(string(text))
    }

    pub(in crate::cuda::device) fn pci(self) -> Result<String, CudaError> {
        let mut text = [0 as c_char; TEXT_BYTES];
        // SAFETY: room for as many bytes as said.
        let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), TEXT_BYTES as c_int, self.device) };
        self.check("tell its PCI address", "cuDeviceGetPCIBusId", code)?;
        Ok(string(text))
    }

    pub(in crate::cuda::device) fn uuid(self) -> Result<Uuid, CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: room for the identity.
        let code = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.device) };
        self.check("tell its UUID", "cuDeviceGetUuid", code)?;
        Ok(Uuid(uuid.bytes.map(|byte| byte as u8)))
    }

    pub(in crate::cuda::device) fn memory_bytes(self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: room for the number.
        let code = unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.device) };
        self.check("tell its memory", "cuDeviceTotalMem", code)?;
        Ok(bytes as u64)
    }

    pub(in crate::cuda::device) fn capability(self) -> Result<(u32, u32), CudaError> {
        Ok((
            self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    pub(in crate::cuda::device) fn multiprocessors(self) -> Result<u32, CudaError> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Most shared memory of a block, for kernels that ask for it.
    pub(in crate::cuda::device) fn shared_bytes_max(self) -> Result<u32, CudaError> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Whether kernels here may be given memory of `other`.
    pub(in crate::cuda::device) fn reaches(self, other: Handle) -> Result<bool, CudaError> {
        let mut reaches: c_int = 0;
        // SAFETY: room for the number; both are devices.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, self.device, other.device) };
        self.check("tell its peers", "cuDeviceCanAccessPeer", code)?;
        Ok(reaches != 0)
    }

    /// Whether its driver gives descriptors of its memory, which other processes can map.
    pub(super) fn shares_memory(self) -> Result<bool, CudaError> {
        let maps = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        let exports = Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        Ok(self.attribute(maps)? != 0 && self.attribute(exports)? != 0)
    }

    /// Whether atomic operations here work on memory of `other`.
    pub(in crate::cuda::device) fn has_atomics_on(self, other: Handle) -> Result<bool, CudaError> {
        let mut value: c_int = 0;
        let attribute = Link::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: room for the number; both are devices.
        let code = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, self.device, other.device) };
        self.check("tell its links", "cuDeviceGetP2PAttribute", code)?;
        Ok(value != 0)
    }

    fn attribute(self, attribute: Attribute) -> Result<u32, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: room for the number.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        self.check("tell what it can do", "cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn check(self, doing: &str, function: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
        check(&format!("cuda:{}", self.ordinal), doing, function, code)
    }
}

/// Up to the first NUL.
fn string(mut text: [c_char; TEXT_BYTES]) -> String {
    text[TEXT_BYTES - 1] = 0;
    // SAFETY: ends in a NUL.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}
