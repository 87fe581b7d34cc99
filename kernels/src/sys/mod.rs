//! System calls behind safe functions: memory on huge pages, thread placement.

mod memory;
mod shared;

pub use memory::Region;
pub(crate) use shared::SharedMut;

/// Cores this process may run on; 1 if the system does not say.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
