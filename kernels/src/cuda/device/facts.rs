//! What there is on a machine.

use std::path::PathBuf;

use super::{
    CudaError, Uuid,
    raw::{Context, driver, facts::Handle, matrix},
};
use crate::cuda::settings::Settings;

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number in this process.
    pub ordinal: u32,
    /// Its identity.
    pub uuid: Uuid,
    /// Its name, as its maker writes it.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes that are free, of all processes'; `None` where it could not be opened to be asked.
    pub free_bytes: Option<u64>,
    /// Compute capability, major and minor part.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory of a block.
    pub shared_bytes_max: u32,
    /// Ordinals of the devices whose memory its kernels can use.
    pub peers: Vec<u32>,
    /// Its address on the PCI bus.
    pub pci: String,
}

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryFacts {
    /// Its name.
    pub name: &'static str,
    /// The file it was loaded from.
    pub file: PathBuf,
    /// Its version, as people write it.
    pub version: String,
}

/// All devices of this machine. Opens each for a moment, to ask for its free memory.
pub fn devices(settings: &Settings) -> Result<Vec<DeviceFacts>, CudaError> {
    driver::start(settings)?;
    let handles = Handle::all()?;
    let mut found = Vec::with_capacity(handles.len());
    for &handle in &handles {
        let memory = Context::retain(handle).and_then(|context| context.memory());
        if let Err(error) = &memory {
            tracing::debug!(%error, "a device does not tell its free memory");
        }
        found.push(DeviceFacts { free_bytes: memory.ok().map(|(free, _)| free), ..facts(handle, &handles)? });
    }
    Ok(found)
}

/// The driver and cuBLASLt, or what is wrong with each.
pub fn libraries(settings: &Settings) -> [Result<LibraryFacts, String>; 2] {
    [driver::start(settings).map_err(|error| error.to_string()), matrix::find(settings)]
}

/// What a device says without being opened.
pub(super) fn facts(handle: Handle, all: &[Handle]) -> Result<DeviceFacts, CudaError> {
    let mut peers = Vec::new();
    for &other in all {
        if other.ordinal != handle.ordinal && handle.reaches(other)? {
            peers.push(other.ordinal);
        }
    }
    Ok(DeviceFacts {
        ordinal: handle.ordinal,
        uuid: handle.uuid()?,
        name: handle.name()?,
        memory_bytes: handle.memory_bytes()?,
        free_bytes: None,
        capability: handle.capability()?,
        multiprocessors: handle.multiprocessors()?,
        shared_bytes_max: handle.shared_bytes_max()?,
        peers,
        pci: handle.pci()?,
    })
}
