// Everything of abi.h and functions.h that can be compared with another view of cuda.h: our name, and its name there.
#pragma once

#define DRIVER_ABI_CONSTANTS(NAME)                                                  \
    NAME(SUCCESS, CUDA_SUCCESS)                                                     \
    NAME(INVALID_VALUE, CUDA_ERROR_INVALID_VALUE)                                   \
    NAME(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY)                                   \
    NAME(NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED)                               \
    NAME(NO_DEVICE, CUDA_ERROR_NO_DEVICE)                                           \
    NAME(INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE)                                 \
    NAME(INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE)                                   \
    NAME(INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT)                               \
    NAME(NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU)                           \
    NAME(PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)               \
    NAME(INVALID_PTX, CUDA_ERROR_INVALID_PTX)                                       \
    NAME(FILE_NOT_FOUND, CUDA_ERROR_FILE_NOT_FOUND)                                 \
    NAME(OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM)                             \
    NAME(INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE)                                 \
    NAME(NOT_FOUND, CUDA_ERROR_NOT_FOUND)                                           \
    NAME(NOT_READY, CUDA_ERROR_NOT_READY)                                           \
    NAME(ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS)                               \
    NAME(LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)               \
    NAME(PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)       \
    NAME(PEER_ACCESS_NOT_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)               \
    NAME(CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED)                     \
    NAME(HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) \
    NAME(HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)         \
    NAME(LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED)                                   \
    NAME(COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)     \
    NAME(NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED)                                   \
    NAME(CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)                \
    NAME(CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)                \
    NAME(CAPTURE_MERGE, CUDA_ERROR_STREAM_CAPTURE_MERGE)                            \
    NAME(CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)                    \
    NAME(CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_UNJOINED)                      \
    NAME(CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)                    \
    NAME(CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)                      \
    NAME(CAPTURED_EVENT, CUDA_ERROR_CAPTURED_EVENT)                                 \
    NAME(CAPTURE_WRONG_THREAD, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)              \
    NAME(GRAPH_EXEC_UPDATE_FAILURE, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)           \
    NAME(STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING)                               \
    NAME(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING)                             \
    NAME(CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE)                               \
    NAME(CAPTURE_ACTIVE, CU_STREAM_CAPTURE_STATUS_ACTIVE)                           \
    NAME(CAPTURE_STATUS_INVALIDATED, CU_STREAM_CAPTURE_STATUS_INVALIDATED)          \
    NAME(CAPTURE_GLOBAL, CU_STREAM_CAPTURE_MODE_GLOBAL)                             \
    NAME(CAPTURE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)                 \
    NAME(CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED)                           \
    NAME(LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE)                              \
    NAME(MEMORY_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED)                              \
    NAME(HANDLE_POSIX_FILE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)               \
    NAME(ACCESS_NONE, CU_MEM_ACCESS_FLAGS_PROT_NONE)                                \
    NAME(ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ)                                \
    NAME(ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

#define DRIVER_ABI_TYPES(NAME)                         \
    NAME(Result, CUresult)                             \
    NAME(Address, CUdeviceptr)                         \
    NAME(Uuid, CUuuid)                                 \
    NAME(LaunchAttribute, CUlaunchAttribute)           \
    NAME(LaunchConfig, CUlaunchConfig)                 \
    NAME(MemoryLocation, CUmemLocation)                \
    NAME(MemoryProperties, CUmemAllocationProp)        \
    NAME(MemoryAccess, CUmemAccessDesc)                \
    NAME(GraphUpdateInfo, CUgraphExecUpdateResultInfo)

#define DRIVER_ABI_FIELDS(NAME)                                                        \
    NAME(LaunchAttribute, id, CUlaunchAttribute, id)                                   \
    NAME(LaunchAttribute, value, CUlaunchAttribute, value)                             \
    NAME(LaunchConfig, grid, CUlaunchConfig, gridDimX)                                 \
    NAME(LaunchConfig, block, CUlaunchConfig, blockDimX)                               \
    NAME(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes)                   \
    NAME(LaunchConfig, stream, CUlaunchConfig, hStream)                                \
    NAME(LaunchConfig, attributes, CUlaunchConfig, attrs)                              \
    NAME(LaunchConfig, attribute_count, CUlaunchConfig, numAttrs)                      \
    NAME(MemoryLocation, type, CUmemLocation, type)                                    \
    NAME(MemoryLocation, id, CUmemLocation, id)                                        \
    NAME(MemoryProperties, type, CUmemAllocationProp, type)                            \
    NAME(MemoryProperties, handle_types, CUmemAllocationProp, requestedHandleTypes)    \
    NAME(MemoryProperties, location, CUmemAllocationProp, location)                    \
    NAME(MemoryProperties, win32_data, CUmemAllocationProp, win32HandleMetaData)       \
    NAME(MemoryProperties, flags, CUmemAllocationProp, allocFlags)                     \
    NAME(MemoryAccess, location, CUmemAccessDesc, location)                            \
    NAME(MemoryAccess, flags, CUmemAccessDesc, flags)                                  \
    NAME(GraphUpdateInfo, result, CUgraphExecUpdateResultInfo, result)                 \
    NAME(GraphUpdateInfo, error_node, CUgraphExecUpdateResultInfo, errorNode)          \
    NAME(GraphUpdateInfo, error_from_node, CUgraphExecUpdateResultInfo, errorFromNode)

#define DRIVER_ABI_FUNCTIONS(NAME)                             \
    NAME(cuInit)                                               \
    NAME(cuDriverGetVersion)                                   \
    NAME(cuGetErrorName)                                       \
    NAME(cuGetErrorString)                                     \
    NAME(cuDeviceGetCount)                                     \
    NAME(cuDeviceGet)                                          \
    NAME(cuDeviceGetName)                                      \
    NAME(cuDeviceGetUuid)                                      \
    NAME(cuDeviceGetUuid_v2)                                   \
    NAME(cuDeviceTotalMem_v2)                                  \
    NAME(cuDeviceGetPCIBusId)                                  \
    NAME(cuDeviceGetAttribute)                                 \
    NAME(cuDeviceCanAccessPeer)                                \
    NAME(cuDeviceGetP2PAttribute)                              \
    NAME(cuDevicePrimaryCtxRetain)                             \
    NAME(cuDevicePrimaryCtxRelease)                            \
    NAME(cuDevicePrimaryCtxRelease_v2)                         \
    NAME(cuDevicePrimaryCtxReset)                              \
    NAME(cuDevicePrimaryCtxReset_v2)                           \
    NAME(cuDevicePrimaryCtxSetFlags_v2)                        \
    NAME(cuDevicePrimaryCtxGetState)                           \
    NAME(cuCtxCreate_v4)                                       \
    NAME(cuCtxDestroy_v2)                                      \
    NAME(cuCtxGetCurrent)                                      \
    NAME(cuCtxSetCurrent)                                      \
    NAME(cuCtxPushCurrent_v2)                                  \
    NAME(cuCtxPopCurrent_v2)                                   \
    NAME(cuCtxGetDevice)                                       \
    NAME(cuCtxSynchronize)                                     \
    NAME(cuCtxGetStreamPriorityRange)                          \
    NAME(cuCtxSetFlags)                                        \
    NAME(cuCtxSetLimit)                                        \
    NAME(cuCtxSetCacheConfig)                                  \
    NAME(cuCtxGetLimit)                                        \
    NAME(cuCtxGetCacheConfig)                                  \
    NAME(cuCtxEnablePeerAccess)                                \
    NAME(cuCtxDisablePeerAccess)                               \
    NAME(cuMemAlloc_v2)                                        \
    NAME(cuMemFree_v2)                                         \
    NAME(cuMemAllocAsync)                                      \
    NAME(cuMemFreeAsync)                                       \
    NAME(cuMemGetInfo_v2)                                      \
    NAME(cuMemGetAddressRange_v2)                              \
    NAME(cuPointerGetAttribute)                                \
    NAME(cuMemHostAlloc)                                       \
    NAME(cuMemAllocHost_v2)                                    \
    NAME(cuMemFreeHost)                                        \
    NAME(cuMemHostRegister_v2)                                 \
    NAME(cuMemHostUnregister)                                  \
    NAME(cuMemHostGetDevicePointer_v2)                         \
    NAME(cuMemHostGetFlags)                                    \
    NAME(cuMemGetAllocationGranularity)                        \
    NAME(cuMemCreate)                                          \
    NAME(cuMemRelease)                                         \
    NAME(cuMemRetainAllocationHandle)                          \
    NAME(cuMemAddressReserve)                                  \
    NAME(cuMemAddressFree)                                     \
    NAME(cuMemMap)                                             \
    NAME(cuMemUnmap)                                           \
    NAME(cuMemSetAccess)                                       \
    NAME(cuMemGetAccess)                                       \
    NAME(cuMemExportToShareableHandle)                         \
    NAME(cuMemImportFromShareableHandle)                       \
    NAME(cuMemGetAllocationPropertiesFromHandle)               \
    NAME(cuMemcpyHtoDAsync_v2)                                 \
    NAME(cuMemcpyDtoHAsync_v2)                                 \
    NAME(cuMemcpyDtoDAsync_v2)                                 \
    NAME(cuMemcpyPeerAsync)                                    \
    NAME(cuMemcpyAsync)                                        \
    NAME(cuMemcpyHtoD_v2)                                      \
    NAME(cuMemcpyDtoH_v2)                                      \
    NAME(cuMemcpyDtoD_v2)                                      \
    NAME(cuMemcpyPeer)                                         \
    NAME(cuMemcpy)                                             \
    NAME(cuMemsetD8Async)                                      \
    NAME(cuMemsetD16Async)                                     \
    NAME(cuMemsetD32Async)                                     \
    NAME(cuMemsetD8_v2)                                        \
    NAME(cuMemsetD16_v2)                                       \
    NAME(cuMemsetD32_v2)                                       \
    NAME(cuStreamCreate)                                       \
    NAME(cuStreamCreateWithPriority)                           \
    NAME(cuStreamDestroy_v2)                                   \
    NAME(cuStreamSynchronize)                                  \
    NAME(cuStreamQuery)                                        \
    NAME(cuStreamWaitEvent)                                    \
    NAME(cuStreamGetCtx)                                       \
    NAME(cuStreamGetFlags)                                     \
    NAME(cuStreamGetPriority)                                  \
    NAME(cuEventCreate)                                        \
    NAME(cuEventDestroy_v2)                                    \
    NAME(cuEventRecord)                                        \
    NAME(cuEventRecordWithFlags)                               \
    NAME(cuEventQuery)                                         \
    NAME(cuEventSynchronize)                                   \
    NAME(cuEventElapsedTime)                                   \
    NAME(cuEventElapsedTime_v2)                                \
    NAME(cuStreamBeginCapture_v2)                              \
    NAME(cuStreamEndCapture)                                   \
    NAME(cuStreamIsCapturing)                                  \
    NAME(cuStreamGetCaptureInfo_v3)                            \
    NAME(cuThreadExchangeStreamCaptureMode)                    \
    NAME(cuGraphInstantiateWithFlags)                          \
    NAME(cuGraphLaunch)                                        \
    NAME(cuGraphUpload)                                        \
    NAME(cuGraphExecUpdate_v2)                                 \
    NAME(cuGraphGetNodes)                                      \
    NAME(cuGraphDestroy)                                       \
    NAME(cuGraphExecDestroy)                                   \
    NAME(cuLaunchHostFunc)                                     \
    NAME(cuModuleLoadData)                                     \
    NAME(cuModuleLoadDataEx)                                   \
    NAME(cuModuleLoad)                                         \
    NAME(cuModuleUnload)                                       \
    NAME(cuModuleGetFunction)                                  \
    NAME(cuModuleGetGlobal_v2)                                 \
    NAME(cuFuncGetAttribute)                                   \
    NAME(cuFuncSetAttribute)                                   \
    NAME(cuFuncSetCacheConfig)                                 \
    NAME(cuFuncGetParamInfo)                                   \
    NAME(cuOccupancyMaxActiveBlocksPerMultiprocessor)          \
    NAME(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) \
    NAME(cuOccupancyMaxPotentialBlockSize)                     \
    NAME(cuOccupancyMaxPotentialBlockSizeWithFlags)            \
    NAME(cuOccupancyAvailableDynamicSMemPerBlock)              \
    NAME(cuLaunchKernel)                                       \
    NAME(cuLaunchCooperativeKernel)                            \
    NAME(cuLaunchKernelEx)                                     \
    NAME(cuGetProcAddress_v2)                                  \
    NAME(cuGetProcAddress)                                     \
    NAME(cuGetExportTable)

// Functions that programs of older versions call, and the profiler's: cuda.h of version 13 has none of them.
#define DRIVER_ABI_OTHER_FUNCTIONS(NAME) \
    NAME(cuCtxCreate_v2)                 \
    NAME(cuCtxCreate_v3)                 \
    NAME(cuStreamGetCaptureInfo_v2)      \
    NAME(cuProfilerStart)                \
    NAME(cuProfilerStop)
