// Functions that bindings look up and that the software driver does not offer: each says so.
#include "api.h"

using namespace software;

#define NOT_OFFERED(name)                                                              \
    API name() {                                                                       \
        return initialised(#name, [](Call&) -> int { return NOT_SUPPORTED; });         \
    }

// Managed memory.
NOT_OFFERED(cuMemAllocManaged)
NOT_OFFERED(cuMemAdvise)
NOT_OFFERED(cuMemAdvise_v2)
NOT_OFFERED(cuMemPrefetchAsync)
NOT_OFFERED(cuMemPrefetchAsync_v2)
NOT_OFFERED(cuStreamAttachMemAsync)

// Memory pools.
NOT_OFFERED(cuDeviceGetDefaultMemPool)
NOT_OFFERED(cuDeviceGetMemPool)
NOT_OFFERED(cuDeviceSetMemPool)
NOT_OFFERED(cuMemPoolCreate)
NOT_OFFERED(cuMemPoolDestroy)
NOT_OFFERED(cuMemPoolGetAttribute)
NOT_OFFERED(cuMemPoolSetAttribute)
NOT_OFFERED(cuMemPoolTrimTo)
NOT_OFFERED(cuMemAllocFromPoolAsync)

// Memory and files of other interfaces.
NOT_OFFERED(cuImportExternalMemory)
NOT_OFFERED(cuExternalMemoryGetMappedBuffer)
NOT_OFFERED(cuDestroyExternalMemory)
NOT_OFFERED(cuIpcGetMemHandle)
NOT_OFFERED(cuIpcOpenMemHandle_v2)
NOT_OFFERED(cuIpcCloseMemHandle)

// Clusters of blocks.
NOT_OFFERED(cuOccupancyMaxActiveClusters)
NOT_OFFERED(cuOccupancyMaxPotentialClusterSize)

// Profilers find nothing to profile, which is no error.
API cuProfilerStart() {
    return initialised(__func__, [](Call&) -> int { return SUCCESS; });
}
API cuProfilerStop() {
    return initialised(__func__, [](Call&) -> int { return SUCCESS; });
}
