//! What the kernels ask of the system, behind safe functions: memory on huge pages, the number of cores.

mod memory;
mod shared;

pub use memory::Region;
pub(crate) use shared::SharedMut;

/// Cores this process may run on; 1 if the system does not say.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
