//! Sums and exchanges among devices that read each other's memory.
//!
//! Each rank of a group has a buffer that all ranks can read, and an area for flags that all can write. A call on every
//! rank, with the same shapes and in the same order, gives every rank the same bits: sums run from rank 0 to the last,
//! as on the CPU, whatever the number of ranks, the length, and the way in which the sum was computed.
//!
//! | operation | result |
//! |---|---|
//! | all-reduce | `out[i] = ((b0[i] + b1[i]) + b2[i]) + ...`, f32, `bp` being rank `p`'s buffer |
//! | with RMS norm | `residual += sum`, then `out` as [`rms_norm`](crate::rms_norm) has it |
//! | all-gather | `out[row] = b0[row] ‖ b1[row] ‖ ...`, `[rows, sum of widths]`; widths may differ and may be zero |
//!
//! Buffers hold their part densely from their first element on; what they hold afterwards is not specified. Whether a
//! call is to use [one read or two](cuda::prefers_one_shot) depends on bytes and ranks alone, so all ranks agree.
//!
//! Between processes and on CPUs, ranks exchange through other means: this is the way between GPUs of one machine.

pub mod cuda;
mod reference;

pub use reference::{all_gather as all_gather_reference, all_reduce as all_reduce_reference};
