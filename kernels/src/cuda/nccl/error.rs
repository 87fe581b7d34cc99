//! What may go wrong with NCCL.

use std::path::PathBuf;

use super::sys;
use crate::cuda::device::CudaError;

/// Why NCCL cannot be used, or did not do what it was asked for. Errors of a communicator name the rank that has it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NcclError {
    /// No library.
    #[error(
        "no usable NCCL on this machine. Looked at:{looked}\nInstall it (`pip install nvidia-nccl-cu12`, or your \
         distribution's libnccl2); CONSORT_CUDA_LIB_PATH, if set, must name the folder of libnccl.so.2 or the file"
    )]
    NotFound {
        /// One line for each place, each after a line's end, with what was wrong there.
        looked: String,
    },
    /// A library that lacks what is needed.
    #[error("{file} cannot be used: {reason}. Install NCCL 2.19 or newer", file = file.display())]
    Unusable {
        /// The library.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No id for a group.
    #[error(
        "could not make the id of a group: ncclGetUniqueId says {text} ({code}). See that a network of this machine, \
         loopback if no other, is up, and what NCCL_SOCKET_IFNAME names"
    )]
    NoId {
        /// NCCL's words for the error.
        text: String,
        /// The error's number.
        code: i32,
    },
    /// A call that failed, or work that it had begun.
    #[error(
        "rank {rank} of {ranks} ({device}) could not {doing}: {function} says {text} ({code}). {}",
        advice(*code)
    )]
    Call {
        /// The rank.
        rank: usize,
        /// Ranks of its group.
        ranks: usize,
        /// Its device.
        device: String,
        /// What the call was for.
        doing: String,
        /// The function.
        function: &'static str,
        /// NCCL's words for the error.
        text: String,
        /// The error's number.
        code: i32,
    },
    /// A communicator that was not complete in time.
    #[error(
        "rank {rank} of {ranks} ({device}) did not meet the others through NCCL within {seconds} s: {}",
        absent(missing, *begun)
    )]
    JoinTimeout {
        /// The rank.
        rank: usize,
        /// Ranks of its group.
        ranks: usize,
        /// Its device.
        device: String,
        /// How long it waited, rounded up.
        seconds: u64,
        /// Ranks that are not known to have come, or not to be ready.
        missing: Vec<usize>,
        /// Whether they have come.
        begun: bool,
    },
    /// NCCL took too long to enqueue an operation, or to end.
    #[error(
        "rank {rank} of {ranks} ({device}) did not {doing} within {seconds} s: NCCL waits for a rank that is gone or \
         does something else"
    )]
    Timeout {
        /// The rank.
        rank: usize,
        /// Ranks of its group.
        ranks: usize,
        /// Its device.
        device: String,
        /// What was waited for.
        doing: String,
        /// How long, rounded up.
        seconds: u64,
    },
    /// A communicator that was aborted or has ended.
    #[error("rank {rank} of {ranks} takes part in nothing any more: {reason}")]
    Ended {
        /// The rank.
        rank: usize,
        /// Ranks of its group.
        ranks: usize,
        /// Why.
        reason: String,
    },
    /// A call that would break a rule of this module.
    #[error("rank {rank} of {ranks}: {reason}")]
    Misuse {
        /// The rank.
        rank: usize,
        /// Ranks of its group.
        ranks: usize,
        /// Which rule, and what was asked for.
        reason: String,
    },
    /// The device has an error of its own.
    #[error(transparent)]
    Device(Box<CudaError>),
}

impl NcclError {
    /// Whether it tells of another rank that has gone, and not of this one.
    pub fn is_of_a_peer(&self) -> bool {
        matches!(self, NcclError::Call { code: sys::REMOTE_ERROR, .. })
    }
}

impl From<CudaError> for NcclError {
    fn from(error: CudaError) -> NcclError {
        NcclError::Device(Box::new(error))
    }
}

/// What somebody who reads of an error can do.
fn advice(code: i32) -> &'static str {
    match code {
        sys::UNHANDLED_CUDA_ERROR => {
            "The device has an error, or too little memory is free for NCCL's buffers"
        }
        sys::SYSTEM_ERROR => {
            "See that /dev/shm has room and that NCCL_SOCKET_IFNAME, if set, names a network that all ranks reach; \
             NCCL_DEBUG=WARN tells more"
        }
        sys::INTERNAL_ERROR => "NCCL cannot go on; with NCCL_DEBUG=WARN it tells where",
        sys::INVALID_ARGUMENT | sys::INVALID_USAGE => "All ranks must ask for the same, in the same order",
        sys::REMOTE_ERROR => "Another rank's process has ended or cannot be reached: its log tells why",
        _ => "NCCL_DEBUG=WARN has NCCL tell more",
    }
}

fn absent(missing: &[usize], begun: bool) -> String {
    match missing {
        [] => {
            "all of them have come as far as is known, so one hangs, or NCCL's network does not connect them \
               (NCCL_DEBUG=INFO tells its ways)"
                .to_owned()
        }
        [one] if begun => {
            format!("rank {one} has begun and is not ready, as the others are: it hangs in NCCL")
        }
        [one] => format!("rank {one} has not come; its log tells why"),
        many => {
            let many: Vec<String> = many.iter().map(usize::to_string).collect();
            let what =
                if begun { "are not ready, as others are" } else { "have not come; their logs tell why" };
            format!("ranks {} {what}", many.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_tells_rank_device_and_what_to_do() {
        let error = NcclError::Call {
            rank: 1,
            ranks: 3,
            device: "cuda:4".into(),
            doing: "sum 12 elements".into(),
            function: "ncclAllReduce",
            text: "remote process exited or there was a network error: socket closed".into(),
            code: 6,
        };
        assert_eq!(
            error.to_string(),
            "rank 1 of 3 (cuda:4) could not sum 12 elements: ncclAllReduce says remote process exited or there was a \
             network error: socket closed (6). Another rank's process has ended or cannot be reached: its log tells why"
        );
    }

    #[test]
    fn only_the_loss_of_another_rank_is_of_a_peer() {
        let call = |code| NcclError::Call {
            rank: 1,
            ranks: 3,
            device: "cuda:4".into(),
            doing: "go on".into(),
            function: "ncclCommGetAsyncError",
            text: "an error".into(),
            code,
        };
        assert!(call(sys::REMOTE_ERROR).is_of_a_peer());
        assert!(!call(sys::SYSTEM_ERROR).is_of_a_peer());
        assert!(!NcclError::Ended { rank: 1, ranks: 3, reason: "the end".into() }.is_of_a_peer());
    }

    #[test]
    fn an_error_fits_in_a_result_without_a_box() {
        assert!(size_of::<NcclError>() <= 112, "{}", size_of::<NcclError>());
    }

    #[test]
    fn a_deadline_names_who_is_missing() {
        let told = |missing: &[usize]| {
            let missing = missing.to_vec();
            NcclError::JoinTimeout {
                rank: 0,
                ranks: 4,
                device: "cuda:0".into(),
                seconds: 30,
                missing,
                begun: false,
            }
            .to_string()
        };
        assert_eq!(
            told(&[2]),
            "rank 0 of 4 (cuda:0) did not meet the others through NCCL within 30 s: rank 2 has not come; its log tells \
             why"
        );
        assert!(told(&[1, 3]).contains("ranks 1, 3 have not come"), "{}", told(&[1, 3]));
        assert!(told(&[]).contains("one hangs"), "{}", told(&[]));
    }
}
