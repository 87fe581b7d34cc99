//! What the kernels ask of the system, behind safe functions: memory on huge pages, the number of cores,
//! permission to use AMX.

mod memory;
mod shared;
mod tile_permission;

pub use memory::Region;
pub(crate) use shared::SharedMut;
#[cfg(target_arch = "x86_64")]
pub(crate) use tile_permission::request_tile_data;

/// Cores this process may run on; 1 if the system does not say.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
