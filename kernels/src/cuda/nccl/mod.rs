//! NCCL: sums and exchanges among devices of several processes, where the ranks' own kernels cannot or need not do it.
//!
//! A thin binding of our own: about a dozen functions, found by `dlopen` under the name `libnccl.so.2` where
//! `search` looks. `sys` has what `nccl.h` declares, `library` calls it, and on top
//! is an owner:
//!
//! | part | what it is |
//! |---|---|
//! | [`Nccl`] | the library |
//! | [`UniqueId`] | what rank 0 makes and every rank is told, over a way of its own |
//! | [`NcclCommunicator`] | one rank among others: sums, gathers and broadcasts on its device's streams |
//!
//! Communicators are made so that no call of NCCL blocks: every wait here asks again and again, has a limit, and ends
//! when the communicator is aborted, which any thread may do. A sum has no fixed order of ranks: the same group gives
//! the same bits again, another number of ranks or elements may not. Where bits must not depend on that, the sums are
//! those of [`all_reduce`](crate::all_reduce).
//!
//! Absent on purpose: carrying the id from rank to rank, and knowing who has come; both are the control plane's.

mod communicator;
mod error;
mod find;
mod library;
mod sys;
#[cfg(test)]
mod tests;

pub use communicator::{Grouped, NcclCommunicator, NcclElement};
pub use error::NcclError;
pub use find::facts;
pub use library::{Nccl, UniqueId};
