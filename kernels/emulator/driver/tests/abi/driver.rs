//! What cuda.h says, as cudarc's bindings have it.

use cudarc::driver::sys;

use super::facts::{self, Facts, constants, functions, offsets, sizes};

/// The facts that the software driver states about itself, in the bindings' words.
pub(super) fn facts() -> Facts {
    let mut facts = Facts::default();
    constants(&mut facts);
    sizes(&mut facts);
    functions(&mut facts);
    facts
}

fn constants(facts: &mut Facts) {
    constants!(
        facts,
        sys::CUresult {
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_INVALID_IMAGE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_FILE_NOT_FOUND,
            CUDA_ERROR_OPERATING_SYSTEM,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_STREAM_CAPTURE_MERGE,
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUDA_ERROR_CAPTURED_EVENT,
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
            CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
        }
    );
    constants!(facts, sys::CUstream_flags { CU_STREAM_NON_BLOCKING });
    constants!(facts, sys::CUevent_flags { CU_EVENT_DISABLE_TIMING });
    constants!(
        facts,
        sys::CUstreamCaptureStatus {
            CU_STREAM_CAPTURE_STATUS_NONE,
            CU_STREAM_CAPTURE_STATUS_ACTIVE,
            CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        }
    );
    constants!(
        facts,
        sys::CUstreamCaptureMode {
            CU_STREAM_CAPTURE_MODE_GLOBAL,
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    );
    constants!(facts, sys::CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE });
    constants!(facts, sys::CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED });
    // Flags, which the bindings have as numbers.
    let file = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    facts.constant("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", file.0.into());
    constants!(
        facts,
        sys::CUmemAccess_flags {
            CU_MEM_ACCESS_FLAGS_PROT_NONE,
            CU_MEM_ACCESS_FLAGS_PROT_READ,
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    );
}

fn sizes(facts: &mut Facts) {
    sizes!(
        facts,
        sys {
            CUresult,
            CUdeviceptr,
            CUuuid,
            CUlaunchAttribute,
            CUlaunchConfig,
            CUmemLocation,
            CUmemAllocationProp,
            CUmemAccessDesc,
            CUgraphExecUpdateResultInfo,
        }
    );
    offsets!(facts, sys::CUlaunchAttribute { id, value });
    offsets!(facts, sys::CUlaunchConfig { gridDimX, blockDimX, sharedMemBytes, hStream, attrs, numAttrs });
    offsets!(facts, sys::CUmemLocation { type_, id });
    offsets!(
        facts,
        sys::CUmemAllocationProp { type_, requestedHandleTypes, location, win32HandleMetaData, allocFlags }
    );
    offsets!(facts, sys::CUmemAccessDesc { location, flags });
    offsets!(facts, sys::CUgraphExecUpdateResultInfo { result, errorNode, errorFromNode });
}

fn functions(facts: &mut Facts) {
    functions!(facts, sys, parameters_0 { cuCtxSynchronize });
    functions!(
        facts,
        sys,
        parameters_1 {
            cuInit,
            cuDriverGetVersion,
            cuDeviceGetCount,
            cuDevicePrimaryCtxRelease_v2,
            cuDevicePrimaryCtxReset_v2,
            cuCtxDestroy_v2,
            cuCtxGetCurrent,
            cuCtxSetCurrent,
            cuCtxPushCurrent_v2,
            cuCtxPopCurrent_v2,
            cuCtxGetDevice,
            cuCtxSetFlags,
            cuCtxSetCacheConfig,
            cuCtxGetCacheConfig,
            cuCtxDisablePeerAccess,
            cuMemFree_v2,
            cuMemFreeHost,
            cuMemHostUnregister,
            cuMemRelease,
            cuStreamDestroy_v2,
            cuStreamSynchronize,
            cuStreamQuery,
            cuEventDestroy_v2,
            cuEventQuery,
            cuEventSynchronize,
            cuThreadExchangeStreamCaptureMode,
            cuGraphDestroy,
            cuGraphExecDestroy,
            cuModuleUnload,
        }
    );
    functions!(
        facts,
        sys,
        parameters_2 {
            cuGetErrorName,
            cuGetErrorString,
            cuDeviceGet,
            cuDeviceGetUuid_v2,
            cuDeviceTotalMem_v2,
            cuDevicePrimaryCtxRetain,
            cuDevicePrimaryCtxSetFlags_v2,
            cuCtxGetStreamPriorityRange,
            cuCtxSetLimit,
            cuCtxGetLimit,
            cuCtxEnablePeerAccess,
            cuMemAlloc_v2,
            cuMemFreeAsync,
            cuMemGetInfo_v2,
            cuMemAllocHost_v2,
            cuMemHostGetFlags,
            cuMemRetainAllocationHandle,
            cuMemAddressFree,
            cuMemUnmap,
            cuMemGetAllocationPropertiesFromHandle,
            cuStreamCreate,
            cuStreamGetCtx,
            cuStreamGetFlags,
            cuStreamGetPriority,
            cuEventCreate,
            cuEventRecord,
            cuStreamBeginCapture_v2,
            cuStreamEndCapture,
            cuStreamIsCapturing,
            cuGraphLaunch,
            cuGraphUpload,
            cuModuleLoadData,
            cuModuleLoad,
            cuFuncSetCacheConfig,
            cuGetExportTable,
        }
    );
    functions!(
        facts,
        sys,
        parameters_3 {
            cuDeviceGetName,
            cuDeviceGetPCIBusId,
            cuDeviceGetAttribute,
            cuDeviceCanAccessPeer,
            cuDevicePrimaryCtxGetState,
            cuMemAllocAsync,
            cuMemGetAddressRange_v2,
            cuPointerGetAttribute,
            cuMemHostAlloc,
            cuMemHostRegister_v2,
            cuMemHostGetDevicePointer_v2,
            cuMemGetAllocationGranularity,
            cuMemGetAccess,
            cuMemImportFromShareableHandle,
            cuMemcpyHtoD_v2,
            cuMemcpyDtoH_v2,
            cuMemcpyDtoD_v2,
            cuMemcpy,
            cuMemsetD8_v2,
            cuMemsetD16_v2,
            cuMemsetD32_v2,
            cuStreamCreateWithPriority,
            cuStreamWaitEvent,
            cuEventRecordWithFlags,
            cuEventElapsedTime_v2,
            cuGraphInstantiateWithFlags,
            cuGraphExecUpdate_v2,
            cuGraphGetNodes,
            cuLaunchHostFunc,
            cuModuleGetFunction,
            cuFuncGetAttribute,
            cuFuncSetAttribute,
        }
    );
    functions!(
        facts,
        sys,
        parameters_4 {
            cuDeviceGetP2PAttribute,
            cuCtxCreate_v4,
            cuMemCreate,
            cuMemSetAccess,
            cuMemExportToShareableHandle,
            cuMemcpyHtoDAsync_v2,
            cuMemcpyDtoHAsync_v2,
            cuMemcpyDtoDAsync_v2,
            cuMemcpyAsync,
            cuMemsetD8Async,
            cuMemsetD16Async,
            cuMemsetD32Async,
            cuModuleGetGlobal_v2,
            cuFuncGetParamInfo,
            cuOccupancyMaxActiveBlocksPerMultiprocessor,
            cuOccupancyAvailableDynamicSMemPerBlock,
            cuLaunchKernelEx,
        }
    );
    functions!(
        facts,
        sys,
        parameters_5 {
            cuMemAddressReserve,
            cuMemMap,
            cuMemcpyPeer,
            cuModuleLoadDataEx,
            cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
            cuGetProcAddress_v2,
        }
    );
    functions!(facts, sys, parameters_6 { cuMemcpyPeerAsync, cuOccupancyMaxPotentialBlockSize });
    functions!(
        facts,
        sys,
        parameters_7 { cuStreamGetCaptureInfo_v3, cuOccupancyMaxPotentialBlockSizeWithFlags }
    );
    functions!(facts, sys, parameters_10 { cuLaunchCooperativeKernel });
    functions!(facts, sys, parameters_11 { cuLaunchKernel });
}
