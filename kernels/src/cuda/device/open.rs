//! Opening a device.

use std::sync::{Arc, Mutex};

use super::{
    CudaDevice, CudaError, DeviceFacts, Selector, Uuid, facts,
    kernels::Kernels,
    matrix::MatrixLibrary,
    raw::{Context, Stream, driver, facts::Handle, matrix},
    staging::Staging,
};
use crate::cuda::{arch::Arch, cubins::Cubins, settings::Settings};

impl CudaDevice {
    /// Opens a device, with cubins of its own. Where there is no CUDA this fails at once and says what is missing.
    pub fn open(selector: &Selector, settings: &Settings) -> Result<Arc<CudaDevice>, CudaError> {
        CudaDevice::open_with(selector, settings, &Arc::new(Cubins::new(settings.clone())))
    }

    /// Opens a device that shares its compiler and cubins with others.
    pub fn open_with(
        selector: &Selector,
        settings: &Settings,
        cubins: &Arc<Cubins>,
    ) -> Result<Arc<CudaDevice>, CudaError> {
        driver::start(settings)?;
        let handles = Handle::all()?;
        let handle = select(selector, &handles)?;
        let facts = facts::facts(handle, &handles)?;
        let arch = arch(&facts)?;
        let context = Context::retain(handle)?;
        let matrices = match matrix::find(settings) {
            Ok(found) => MatrixLibrary::new(&context, found).map_err(|error| error.to_string()),
            Err(reason) => Err(reason),
        };
        if let Err(reason) = &matrices {
            tracing::info!(device = context.label(), reason, "many rows are multiplied by our own kernels");
        }
        let device = CudaDevice {
            facts,
            compute: Stream::new(&context)?,
            copy: Stream::new(&context)?,
            recording: Mutex::new(Stream::new(&context)?),
            kernels: Kernels::new(cubins.clone(), arch),
            uploads: Mutex::new(Staging::new(&context)?),
            downloads: Mutex::new(Staging::new(&context)?),
            matrices,
            arenas: Mutex::default(),
            context,
        };
        Ok(Arc::new(device))
    }

    /// Lets kernels here use memory of another device that this process has open. Nothing happens where it is this one.
    pub fn reach(&self, peer: Uuid) -> Result<(), CudaError> {
        if self.facts.uuid == peer {
            return Ok(());
        }
        let other = Context::retain(known(peer)?)?;
        self.context.enable_peer(&other)
    }

    /// Whether kernels here can use what another process shares of a peer's memory, or why not. Opens nothing.
    pub fn check_reaches(&self, peer: Uuid) -> Result<(), CudaError> {
        if self.facts.uuid == peer {
            return Ok(());
        }
        let other = known(peer)?;
        match self.context.reaches(other)? {
            true => Ok(()),
            false => Err(CudaError::NoDevice {
                wanted: format!("cuda:{}", other.ordinal),
                reason: format!("kernels of cuda:{} cannot use its memory", self.facts.ordinal),
            }),
        }
    }
}

/// The device of that identity, as this process numbers it.
fn known(wanted: Uuid) -> Result<Handle, CudaError> {
    for handle in Handle::all()? {
        if handle.uuid()? == wanted {
            return Ok(handle);
        }
    }
    let reason = "a peer computes on it, and it is not among the devices of this process".to_owned();
    Err(CudaError::NoDevice { wanted: wanted.to_string(), reason })
}

/// What its kernels are compiled for.
fn arch(facts: &DeviceFacts) -> Result<Arch, CudaError> {
    let (major, minor) = facts.capability;
    Arch::of_device(major, minor).map_err(|error| CudaError::TooOld {
        ordinal: facts.ordinal,
        name: facts.name.clone(),
        reason: error.to_string(),
    })
}

/// The one device that is meant.
fn select(selector: &Selector, handles: &[Handle]) -> Result<Handle, CudaError> {
    let mut known = Vec::with_capacity(handles.len());
    for &handle in handles {
        known.push((handle, handle.uuid()?));
    }
    let mut meant = known.iter().filter(|(handle, uuid)| selector.matches(handle.ordinal, *uuid));
    let reason = match (meant.next(), meant.next()) {
        (Some((handle, _)), None) => return Ok(*handle),
        (Some(_), Some(_)) => "several begin so",
        (None, _) => "it is not there",
    };
    let listed: Vec<String> =
        known.iter().map(|(handle, uuid)| format!("cuda:{} ({uuid})", handle.ordinal)).collect();
    let listed = if listed.is_empty() { "none".to_owned() } else { listed.join(", ") };
    let wanted = selector.to_string();
    Err(CudaError::NoDevice {
        wanted,
        reason: format!("{reason}; the devices of this process are: {listed}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_older_than_the_kernels_is_refused_by_name() {
        let facts = |capability| DeviceFacts {
            ordinal: 1,
            uuid: Uuid([0; 16]),
            name: "Quadro RTX 6000".into(),
            memory_bytes: 0,
            capability,
            multiprocessors: 72,
            shared_bytes_max: 64 << 10,
            peers: Vec::new(),
            pci: String::new(),
        };
        assert_eq!(arch(&facts((9, 0))).unwrap().to_string(), "sm_90a");
        let error = arch(&facts((7, 5))).unwrap_err().to_string();
        assert!(
            error.starts_with("cuda:1 (Quadro RTX 6000): a GPU of compute capability 7.5 is too old"),
            "{error}"
        );
    }
}
