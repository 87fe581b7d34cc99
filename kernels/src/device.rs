//! Where buffers live and operations run.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

pub use crate::simd::{Isa, UnknownIsa};
use crate::{KernelError, cuda::device::CudaDevice, team::Team};

/// A device. Cheap to clone; clones share the device's threads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// Host processors.
    Cpu(Arc<CpuDevice>),
    /// A GPU. Operations on it are those of each operation's `cuda` module, which take the device as a
    /// [`Launcher`](crate::cuda::Launcher), and its memory comes from an [`ArenaPlan`](crate::cuda::device::ArenaPlan).
    Cuda(Arc<CudaDevice>),
}

/// A team of host threads and the instruction set they use.
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
                reason: format!(
                    "this machine or its system does not offer {isa}; it offers {}",
                    Isa::detect()
                ),
            });
        }
        Ok(Device::Cpu(Arc::new(CpuDevice { team: Team::new(threads)?, isa })))
    }

    /// What `job` makes of each row of `values`, `width` long, in order; host threads share the rows. A panic of `job`
    /// is the caller's.
    pub fn map_rows<R: Send>(
        &self,
        values: &mut [f32],
        width: usize,
        job: impl Fn(usize, &mut [f32]) -> R + Sync,
    ) -> Vec<R> {
        let mut made: Vec<Option<R>> = values.chunks_exact(width.max(1)).map(|_| None).collect();
        let Device::Cpu(cpu) = self else {
            let rows = values.chunks_exact_mut(width.max(1)).enumerate();
            return rows.map(|(row, values)| job(row, values)).collect();
        };
        let mut parts: Vec<Mutex<(&mut [f32], &mut Option<R>)>> =
            values.chunks_exact_mut(width.max(1)).zip(&mut made).map(Mutex::new).collect();
        let parts = &mut parts[..];
        cpu.team.for_each(parts.len(), |row| {
            // Each is locked once.
            let mut part = parts[row].lock().unwrap_or_else(PoisonError::into_inner);
            let (values, made) = &mut *part;
            **made = Some(job(row, values));
        });
        made.into_iter().flatten().collect()
    }

    /// The host processors, for an operation or a buffer that exists on no other device.
    pub(crate) fn require_cpu(&self, operation: &'static str) -> Result<&Arc<CpuDevice>, KernelError> {
        match self {
            Device::Cpu(cpu) => Ok(cpu),
            Device::Cuda(cuda) => {
                let ordinal = cuda.facts().ordinal;
                let reason = format!("this is the CPU's; cuda:{ordinal} has its own in the module `cuda`");
                Err(KernelError::Unsupported { operation, reason })
            }
        }
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

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice").field("threads", &self.threads()).field("isa", &self.isa).finish()
    }
}
