//! NCCL's functions as `nccl.h` declares them, found in the library at run time.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::cuda::dynamic::Library;

/// `ncclResult_t`.
pub(super) type Status = c_int;
/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;
/// `ncclDataType_t`.
pub(super) type DataType = c_int;

/// `ncclSuccess`.
pub(super) const SUCCESS: Status = 0;
/// `ncclUnhandledCudaError`.
pub(super) const UNHANDLED_CUDA_ERROR: Status = 1;
/// `ncclSystemError`.
pub(super) const SYSTEM_ERROR: Status = 2;
/// `ncclInternalError`.
pub(super) const INTERNAL_ERROR: Status = 3;
/// `ncclInvalidArgument`.
pub(super) const INVALID_ARGUMENT: Status = 4;
/// `ncclInvalidUsage`.
pub(super) const INVALID_USAGE: Status = 5;
/// `ncclRemoteError`.
pub(super) const REMOTE_ERROR: Status = 6;
/// `ncclInProgress`: neither an error nor the end.
pub(super) const IN_PROGRESS: Status = 7;

/// `ncclFloat32`.
pub(super) const FLOAT32: DataType = 7;
/// `ncclBfloat16`.
pub(super) const BFLOAT16: DataType = 9;

/// `ncclSum`, of `ncclRedOp_t`.
pub(super) const SUM: c_int = 0;

/// `NCCL_UNIQUE_ID_BYTES`.
pub(super) const ID_BYTES: usize = 128;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub(super) internal: [u8; ID_BYTES],
}

/// `ncclConfig_t` as version 2.14 had it. Every later one reads no more than `size` bytes, and takes its defaults for
/// what came after `version`.
#[repr(C)]
pub(super) struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
}

/// What `NCCL_CONFIG_INITIALIZER` puts into `magic`.
pub(super) const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// The version of [`Config`], 2.14.0.
pub(super) const CONFIG_VERSION: c_uint = 21_400;

impl Config {
    /// For a communicator whose calls return at once.
    pub(super) fn without_blocking() -> Config {
        Config { size: size_of::<Config>(), magic: CONFIG_MAGIC, version: CONFIG_VERSION, blocking: 0 }
    }
}

/// `ncclGetVersion`.
pub(super) type GetVersion = unsafe extern "C" fn(*mut c_int) -> Status;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// As declared in `nccl.h`, the same in all versions since the oldest that is used.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Those of a library, or the name of the first that it lacks.
            ///
            /// # Safety
            /// The library is NCCL.
            pub(super) unsafe fn of(library: Library) -> Result<Functions, &'static CStr> {
                // SAFETY: by the caller's word; the types are those of nccl.h.
                unsafe { Ok(Functions { $($field: library.function($name).ok_or($name)?,)* }) }
            }
        }

        #[cfg(test)]
        impl Functions {
            /// Name and signature of each, as sizes: of the result, and of the parameters.
            pub(super) fn facts() -> Vec<String> {
                vec![$({
                    let parameters: Vec<String> = vec![$(size_of::<$argument>().to_string()),*];
                    let name = $name.to_str().expect("names are ASCII");
                    format!("{name} = {}({})", size_of::<$result>(), parameters.join(","))
                }),*]
            }
        }
    };
}

functions! {
    get_unique_id = c"ncclGetUniqueId": fn(*mut RawId) -> Status;
    init = c"ncclCommInitRankConfig": fn(*mut Comm, c_int, RawId, c_int, *mut Config) -> Status;
    async_error = c"ncclCommGetAsyncError": fn(Comm, *mut Status) -> Status;
    abort = c"ncclCommAbort": fn(Comm) -> Status;
    finalize = c"ncclCommFinalize": fn(Comm) -> Status;
    destroy = c"ncclCommDestroy": fn(Comm) -> Status;
    all_reduce = c"ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Status;
    all_gather = c"ncclAllGather": fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> Status;
    broadcast = c"ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Status;
    group_start = c"ncclGroupStart": fn() -> Status;
    group_end = c"ncclGroupEnd": fn() -> Status;
    error_string = c"ncclGetErrorString": fn(Status) -> *const c_char;
    last_error = c"ncclGetLastError": fn(Comm) -> *const c_char;
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, mem::offset_of};

    use super::*;

    /// What `nccl.h` says, written by `cargo xtask abi --facts`.
    const HEADER: &str = include_str!("../../../emulator/driver/abi/nccl_facts.txt");

    #[test]
    fn the_binding_has_the_interface_of_the_header() {
        let mut ours: BTreeSet<String> = Functions::facts().into_iter().collect();
        // It is asked before the others are looked for: `GetVersion`.
        ours.insert(format!("ncclGetVersion = {}({})", size_of::<Status>(), size_of::<*mut c_int>()));
        for (name, value) in [
            ("ncclSuccess", SUCCESS.into()),
            ("ncclUnhandledCudaError", UNHANDLED_CUDA_ERROR.into()),
            ("ncclSystemError", SYSTEM_ERROR.into()),
            ("ncclInternalError", INTERNAL_ERROR.into()),
            ("ncclInvalidArgument", INVALID_ARGUMENT.into()),
            ("ncclInvalidUsage", INVALID_USAGE.into()),
            ("ncclRemoteError", REMOTE_ERROR.into()),
            ("ncclInProgress", IN_PROGRESS.into()),
            ("ncclFloat32", FLOAT32.into()),
            ("ncclBfloat16", BFLOAT16.into()),
            ("ncclSum", SUM.into()),
            ("NCCL_UNIQUE_ID_BYTES", ID_BYTES as i64),
            ("NCCL_CONFIG_INITIALIZER.magic", CONFIG_MAGIC.into()),
            ("sizeof ncclResult_t", size_of::<Status>() as i64),
            ("sizeof ncclDataType_t", size_of::<DataType>() as i64),
            ("sizeof ncclRedOp_t", size_of::<c_int>() as i64),
            ("sizeof ncclComm_t", size_of::<Comm>() as i64),
            ("sizeof cudaStream_t", size_of::<Stream>() as i64),
            ("sizeof ncclUniqueId", size_of::<RawId>() as i64),
            ("offsetof ncclUniqueId.internal", offset_of!(RawId, internal) as i64),
            ("offsetof ncclConfig_t.size", offset_of!(Config, size) as i64),
            ("offsetof ncclConfig_t.magic", offset_of!(Config, magic) as i64),
            ("offsetof ncclConfig_t.version", offset_of!(Config, version) as i64),
            ("offsetof ncclConfig_t.blocking", offset_of!(Config, blocking) as i64),
        ] {
            let value: i64 = value;
            ours.insert(format!("{name} = {value}"));
        }
        let header: BTreeSet<String> = HEADER.lines().map(str::to_owned).collect();
        let ours_alone: Vec<_> = ours.difference(&header).collect();
        let header_alone: Vec<_> = header.difference(&ours).collect();
        assert!(ours_alone.is_empty() && header_alone.is_empty(), "{ours_alone:?} and not {header_alone:?}");
    }
}
