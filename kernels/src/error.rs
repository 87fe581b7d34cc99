//! What a kernel may refuse.

use crate::cuda::{device::CudaError, nccl::NcclError};

/// Why an operation or an allocation did not happen.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum KernelError {
    /// A view has another length than the operation's shapes ask for.
    #[error("{operation}: {argument} holds {got} elements, {expected} expected")]
    Length {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: &'static str,
        /// Elements it holds.
        got: usize,
        /// Elements the shapes ask for.
        expected: usize,
    },
    /// An index points outside what it indexes.
    #[error("{operation}: {what} {got} is outside 0..{limit}")]
    OutOfRange {
        /// Operation.
        operation: &'static str,
        /// What was indexed.
        what: &'static str,
        /// The index.
        got: usize,
        /// First index that does not exist.
        limit: usize,
    },
    /// A shape that no kernel supports.
    #[error("{operation}: {reason}")]
    Unsupported {
        /// Operation.
        operation: &'static str,
        /// What is not supported, and what is.
        reason: String,
    },
    /// Memory could not be had.
    #[error("could not allocate {bytes} bytes for {what}: {reason}")]
    OutOfMemory {
        /// What for.
        what: String,
        /// How much.
        bytes: usize,
        /// What the system said.
        reason: String,
    },
    /// A CUDA device could not do it.
    #[error(transparent)]
    Cuda(Box<CudaError>),
    /// NCCL could not do it.
    #[error(transparent)]
    Nccl(Box<NcclError>),
    /// A thread of the team could not be started.
    #[error("could not start thread {thread} of the CPU team: {reason}")]
    Thread {
        /// Which member.
        thread: usize,
        /// What the system said.
        reason: String,
    },
}

impl From<CudaError> for KernelError {
    fn from(error: CudaError) -> KernelError {
        KernelError::Cuda(Box::new(error))
    }
}

impl From<NcclError> for KernelError {
    fn from(error: NcclError) -> KernelError {
        KernelError::Nccl(Box::new(error))
    }
}

impl KernelError {
    /// `Ok` when `got == expected`, the length error otherwise.
    pub(crate) fn check_len(
        operation: &'static str,
        argument: &'static str,
        got: usize,
        expected: usize,
    ) -> Result<(), KernelError> {
        if got == expected { Ok(()) } else { Err(KernelError::Length { operation, argument, got, expected }) }
    }

    /// `Ok` when `got < limit`.
    pub(crate) fn check_index(
        operation: &'static str,
        what: &'static str,
        got: usize,
        limit: usize,
    ) -> Result<(), KernelError> {
        if got < limit { Ok(()) } else { Err(KernelError::OutOfRange { operation, what, got, limit }) }
    }
}
