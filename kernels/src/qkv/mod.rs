//! From the output of the query, key and value linear to what attention reads, in one pass.
//!
//! Per row and head of `x`: add the bias (where there is one); normalise query and key heads over their width (where
//! there are weights), `round(round(head / sqrt(mean(head²) + eps)) · weight)` as in [`rms_norm`](crate::rms_norm);
//! turn query and key heads by the row's angles as in [`rope`](crate::rope); round to BF16. Queries go to a matrix,
//! keys and values to the slot of the row. On CUDA only: the CPU runs the operations it is made of.
//!
//! | argument | shape |
//! |---|---|
//! | `x` | `[rows][query heads + 2 · KV heads][head_dim]`, f32: queries, keys, values |
//! | `bias` | as a row of `x`, or none |
//! | `norms` | `[head_dim]` for queries and for keys, or none |
//! | `cos`, `sin` | `[rows][rotary_dim / 2]`, f32; dimensions from `rotary_dim` on are not turned |
//! | `slots` | `[rows]`: `page · block_size + offset`; a slot beyond the pool appends nothing |
//! | `queries` | `[rows][query heads][padded_dim]`, BF16 |
//! | `pages` | `[pages][KV heads][2: keys, values][block_size][padded_dim]`, BF16 |
//!
//! `padded_dim` is `head_dim` rounded up to 16; the padding is zero. A batch that is padded to the size of a recorded
//! graph gives its padding rows the slot `u32::MAX`. Others are checked on the host, by
//! [`check_slots`](cuda::check_slots), when the step is prepared: their values are on the device by the time of a
//! launch, which may be a replay.

pub mod cuda;
mod reference;

pub use reference::{QkvHeads, QkvReference};
