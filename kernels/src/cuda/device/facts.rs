//! What there is on a machine.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    CudaError, Uuid,
    raw::{Context, driver, facts::Handle, matrix, nvml::Nvml},
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

/// From one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFacts {
    /// Ordinal of the device whose kernels would read.
    pub from: u32,
    /// Ordinal of the device whose memory they would read.
    pub to: u32,
    /// Whether they can.
    pub reaches: bool,
    /// Whether atomic operations work over the link, as they do over NVLink and seldom over PCI.
    pub atomics: bool,
}

/// What NVML, the library for watching over cards, adds to the driver's own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagementFacts {
    /// The driver's own version, such as 570.86.15.
    pub driver_version: String,
    /// Whether NVLink is between two devices, by their places in the list asked about; without the pairs of which that
    /// is not told.
    pub nvlinks: BTreeMap<(usize, usize), bool>,
}

/// All devices of this machine. None is opened: that takes hundreds of megabytes of a card, which may be another's.
pub fn devices(settings: &Settings) -> Result<Vec<DeviceFacts>, CudaError> {
    driver::start(settings)?;
    let handles = Handle::all()?;
    handles.iter().map(|&handle| facts(handle, &handles)).collect()
}

/// Bytes of a device's memory that no process has taken. Opens the device for a moment, since only then it tells.
pub fn free_bytes(settings: &Settings, ordinal: u32) -> Result<u64, CudaError> {
    driver::start(settings)?;
    let (free, _) = Context::retain(Handle::of(ordinal)?)?.memory()?;
    Ok(free)
}

/// The driver and cuBLASLt, or what is wrong with each.
pub fn libraries(settings: &Settings) -> [Result<LibraryFacts, String>; 2] {
    [driver::start(settings).map_err(|error| error.to_string()), matrix::find(settings)]
}

/// All pairs of different devices. Nothing is opened.
pub fn links(settings: &Settings) -> Result<Vec<LinkFacts>, CudaError> {
    driver::start(settings)?;
    let handles = Handle::all()?;
    let mut found = Vec::new();
    for &from in &handles {
        for &to in handles.iter().filter(|to| to.ordinal != from.ordinal) {
            let (reaches, atomics) = (from.reaches(to)?, from.has_atomics_on(to)?);
            found.push(LinkFacts { from: from.ordinal, to: to.ordinal, reaches, atomics });
        }
    }
    Ok(found)
}

/// What NVML says of the driver and of these devices, or why it says nothing. Nothing else here needs it.
pub fn management(settings: &Settings, devices: &[Uuid]) -> Result<ManagementFacts, String> {
    let nvml = Nvml::start(settings)?;
    let handles: Vec<_> = devices.iter().map(|uuid| nvml.device(*uuid)).collect();
    let mut nvlinks = BTreeMap::new();
    for (from, one) in handles.iter().enumerate() {
        for (to, other) in handles.iter().enumerate().filter(|&(to, _)| to != from) {
            let told = one.zip(*other).and_then(|(one, other)| nvml.has_nvlink(one, other));
            nvlinks.extend(told.map(|told| ((from, to), told)));
        }
    }
    Ok(ManagementFacts { driver_version: nvml.driver_version()?, nvlinks })
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
        capability: handle.capability()?,
        multiprocessors: handle.multiprocessors()?,
        shared_bytes_max: handle.shared_bytes_max()?,
        peers,
        pci: handle.pci()?,
    })
}
