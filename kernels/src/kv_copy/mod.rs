//! Whole pages copied over others, in all layers: what copy-on-write of a shared block asks for.
//!
//! `pool` is `[layers][blocks][page_elements]`; each pair `(from, to)` copies page `from` of every layer over page
//! `to`. The pairs happen at once, so a page that is written is neither read nor written by another pair:
//! [`check_copies`](cuda::check_copies) refuses others on the host. On CUDA only: the CPU's store copies within its
//! memory.

pub mod cuda;
mod reference;

pub use reference::kv_copy as kv_copy_reference;
