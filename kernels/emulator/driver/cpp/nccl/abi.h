// Our view of nccl.h: what groups of devices exchange through. Held against the facts of the real header, which
// `cargo xtask abi` writes down.
#pragma once
#include <cstddef>
#include <cstdint>

// The check includes this file in a namespace, beside the real header, and wants no C linkage then.
#ifndef SOFTWARE_LINKAGE
#define SOFTWARE_LINKAGE extern "C" __attribute__((visibility("default")))
#endif

enum ncclResult_t : unsigned {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

// Types that callers may hand over stay numbers in our structures: any value can come in.
enum ncclDataType_t : unsigned { ncclFloat32 = 7, ncclBfloat16 = 9 };
enum ncclRedOp_t : unsigned { ncclSum = 0 };

enum : unsigned { NCCL_UNIQUE_ID_BYTES = 128, NCCL_API_MAGIC = 0xcafebeef };

typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;

struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
};

// As version 2.14 had it; later ones add fields behind these, and read no more than `size` bytes.
struct ncclConfig_t {
    std::size_t size;
    unsigned magic, version;
    int blocking;
};

SOFTWARE_LINKAGE ncclResult_t ncclGetVersion(int* version);
SOFTWARE_LINKAGE ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
SOFTWARE_LINKAGE ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                                     ncclConfig_t* config);
SOFTWARE_LINKAGE ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
SOFTWARE_LINKAGE ncclResult_t ncclCommAbort(ncclComm_t comm);
SOFTWARE_LINKAGE ncclResult_t ncclCommFinalize(ncclComm_t comm);
SOFTWARE_LINKAGE ncclResult_t ncclCommDestroy(ncclComm_t comm);
SOFTWARE_LINKAGE ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                            ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream);
SOFTWARE_LINKAGE ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                            ncclComm_t comm, cudaStream_t stream);
SOFTWARE_LINKAGE ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                            int root, ncclComm_t comm, cudaStream_t stream);
SOFTWARE_LINKAGE ncclResult_t ncclGroupStart();
SOFTWARE_LINKAGE ncclResult_t ncclGroupEnd();
SOFTWARE_LINKAGE const char* ncclGetErrorString(ncclResult_t result);
SOFTWARE_LINKAGE const char* ncclGetLastError(ncclComm_t comm);
