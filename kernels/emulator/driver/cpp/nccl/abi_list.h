// Every name of abi.h that can be compared with another view of the same interface.
#pragma once

#define NCCL_ABI_CONSTANTS(NAME)  \
    NAME(ncclSuccess)             \
    NAME(ncclUnhandledCudaError)  \
    NAME(ncclSystemError)         \
    NAME(ncclInternalError)       \
    NAME(ncclInvalidArgument)     \
    NAME(ncclInvalidUsage)        \
    NAME(ncclRemoteError)         \
    NAME(ncclInProgress)          \
    NAME(ncclFloat32)             \
    NAME(ncclBfloat16)            \
    NAME(ncclSum)

#define NCCL_ABI_TYPES(NAME) \
    NAME(ncclResult_t)       \
    NAME(ncclDataType_t)     \
    NAME(ncclRedOp_t)        \
    NAME(ncclComm_t)         \
    NAME(cudaStream_t)       \
    NAME(ncclUniqueId)

#define NCCL_ABI_FIELDS(NAME)       \
    NAME(ncclUniqueId, internal)    \
    NAME(ncclConfig_t, size)        \
    NAME(ncclConfig_t, magic)       \
    NAME(ncclConfig_t, version)     \
    NAME(ncclConfig_t, blocking)

#define NCCL_ABI_FUNCTIONS(NAME)  \
    NAME(ncclGetVersion)          \
    NAME(ncclGetUniqueId)         \
    NAME(ncclCommInitRankConfig)  \
    NAME(ncclCommGetAsyncError)   \
    NAME(ncclCommAbort)           \
    NAME(ncclCommFinalize)        \
    NAME(ncclCommDestroy)         \
    NAME(ncclAllReduce)           \
    NAME(ncclAllGather)           \
    NAME(ncclBroadcast)           \
    NAME(ncclGroupStart)          \
    NAME(ncclGroupEnd)            \
    NAME(ncclGetErrorString)      \
    NAME(ncclGetLastError)
