//! A CUDA driver that runs on the CPU: what Consort does on GPUs is done on it in tests, by the same code.
//!
//! The build script makes shared libraries (`libcuda.so.1` and, over it, cuBLASLt and NCCL; a compiler that knows the
//! kernels already) and [`folder`] tells where they are. Whoever loads CUDA from there gets devices with memory of
//! their own, streams that run later than one thinks, graphs, and errors on demand. `cpp/` holds them; what the
//! environment may ask for is in `cpp/settings.h`:
//!
//! | `CONSORT_SOFTWARE_DRIVER_` | what | default |
//! |---|---|---|
//! | `DEVICES` | their number | 1 |
//! | `MEMORY` | bytes of each | 1 GiB |
//! | `ORDER` | when work runs: `lazy`, only when somebody waits for it; `eager`; `random:SEED` | lazy |
//! | `LAG_MS` | when it runs although nobody waits for it | 20 |
//! | `GRAPH_MS` | least time that each replay of a graph takes on its device | 0 |
//! | `CAPABILITY` | compute capability, as 90 | 90 |
//! | `PEERS` | 0: no device can use another's memory | 1 |
//! | `FAULTS` | `cuLaunchKernel:7=700,cuMemAlloc_v2:2=2`: the n-th call fails so; see below | |
//! | `NCCL_LOSS` | result that NCCL tells of a peer whose process has ended; 0: it waits for it for ever | 0 |
//! | `SHARES` | 0: no memory can be shared with other processes | 1 |
//! | `TRACE` | 1: tell on stderr what runs | 0 |
//! | `STRICT` | 0: violations are counted only, instead of ending the process | 1 |
//! | `REPORT` | file for the [`Report`] at the process's end; `%p` is the process's number | |
//!
//! Instead of an error, a call may have `=hang`, so that what it enqueues never ends, `=stay`, so that it does not
//! return, or `=die`: the process is killed there. For NCCL, `ncclAllReduce@1:3` (and so on) is the third that rank 1
//! executes, where each replay of a graph counts, and its errors show when somebody asks the communicator;
//! `ncclCommInitRankConfig@1:1` is the first attempt of rank 1 to join, which with `=hang` is not complete for ever,
//! and with `=stay` does not even return; with `=7` (in progress) the others are ready, and it never is.
//!
//! A *violation* is a mistake that a real device might not notice: two pieces of work that touch the same bytes without
//! an order between them, memory freed while it is in use, a kernel given a pointer to freed memory, a write beyond
//! the end, a cubin whose parameters are not the kernel's. What a kernel touches is recorded to the byte, so buffers
//! in one arena are told apart.
//!
//! Not found: what the host reads or writes without waiting (in lazy order it sees that data is not there yet), and
//! conflicts among grids that exchange flags, after their last flag, and a missing order between two threads of the
//! host, which count as one: what one of them waited for is in order before all that any of them enqueues later. Not
//! offered: managed memory, memory pools,
//! clusters, allocations and graphs within a captured graph, default streams of threads. No result was ever compared
//! with a real driver's.

mod child;
mod report;

use std::path::Path;

pub use child::{in_child, in_child_reported};
pub use report::{DeviceReport, Report, ReportError};

/// Where the libraries are.
pub fn folder() -> &'static Path {
    Path::new(concat!(env!("OUT_DIR"), "/lib"))
}
