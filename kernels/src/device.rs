//! Where buffers live and operations run.

use std::sync::Arc;

pub use crate::simd::{Isa, UnknownIsa};
use crate::{KernelError, team::Team};

/// A device. Cheap to clone; clones share the device's threads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// Host processors.
    Cpu(Arc<CpuDevice>),
}

/// A team of host threads and the instruction set they use.
#[derive(Debug)]
pub struct CpuDevice {
    team: Team,
    isa: Isa,
}

impl Device {
    /// `threads` host threads (the caller's is one of them) with the best instruction set of this machine.
    pub fn cpu(threads: usize) -> Result<Device, KernelError> {
        Device::cpu_with(threads, Isa::detect())
    }

    /// `threads` host threads with a chosen instruction set; refused when the machine lacks it.
    pub fn cpu_with(threads: usize, isa: Isa) -> Result<Device, KernelError> {
        if !isa.is_available() {
            return Err(KernelError::Unsupported {
                operation: "device",
                reason: format!("this processor has no {isa}; it has {}", Isa::detect()),
            });
        }
        Ok(Device::Cpu(Arc::new(CpuDevice { team: Team::new(threads)?, isa })))
    }
}

impl CpuDevice {
    /// The threads.
    pub(crate) fn team(&self) -> &Team {
        &self.team
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in the team.
    pub fn threads(&self) -> usize {
        self.team.size()
    }
}
