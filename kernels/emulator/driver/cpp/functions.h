// Every function of cuda.h that the software driver has, so that definitions cannot differ from what is compared with
// the real header. Those that only say that they are not offered are left out: they never look at their parameters.
// Included by abi.h.
#pragma once

// The driver itself.
API cuInit(unsigned flags);
API cuDriverGetVersion(int* version);

// Errors.
API cuGetErrorName(int result, const char** name);
API cuGetErrorString(int result, const char** text);

// Devices.
API cuDeviceGetCount(int* count);
API cuDeviceGet(int* device, int ordinal);
API cuDeviceGetName(char* name, int bytes, int ordinal);
API cuDeviceGetUuid(software::Uuid* uuid, int ordinal);
API cuDeviceGetUuid_v2(software::Uuid* uuid, int ordinal);
API cuDeviceTotalMem_v2(std::size_t* bytes, int ordinal);
API cuDeviceGetPCIBusId(char* id, int bytes, int ordinal);
API cuDeviceGetAttribute(int* value, int attribute, int ordinal);
API cuDeviceCanAccessPeer(int* can, int ordinal, int peer);
API cuDeviceGetP2PAttribute(int* value, int attribute, int ordinal, int peer);

// Contexts.
API cuDevicePrimaryCtxRetain(void** out, int ordinal);
API cuDevicePrimaryCtxRelease(int ordinal);
API cuDevicePrimaryCtxRelease_v2(int ordinal);
API cuDevicePrimaryCtxReset(int ordinal);
API cuDevicePrimaryCtxReset_v2(int ordinal);
API cuDevicePrimaryCtxSetFlags_v2(int ordinal, unsigned);
API cuDevicePrimaryCtxGetState(int ordinal, unsigned* flags, int* active);
API cuCtxCreate_v2(void** out, unsigned, int ordinal);
API cuCtxCreate_v3(void** out, void*, int, unsigned, int ordinal);
API cuCtxCreate_v4(void** out, void*, unsigned, int ordinal);
API cuCtxDestroy_v2(void* handle);
API cuCtxGetCurrent(void** out);
API cuCtxSetCurrent(void* handle);
API cuCtxPushCurrent_v2(void* handle);
API cuCtxPopCurrent_v2(void** out);
API cuCtxGetDevice(int* ordinal);
API cuCtxSynchronize();
API cuCtxGetStreamPriorityRange(int* least, int* greatest);
API cuCtxSetFlags(unsigned);
API cuCtxSetLimit(int, std::size_t);
API cuCtxSetCacheConfig(int);
API cuCtxGetLimit(std::size_t* value, int);
API cuCtxGetCacheConfig(int* value);
API cuCtxEnablePeerAccess(void* handle, unsigned flags);
API cuCtxDisablePeerAccess(void* handle);

// Device memory.
API cuMemAlloc_v2(software::Address* out, std::size_t bytes);
API cuMemFree_v2(software::Address address);
API cuMemAllocAsync(software::Address* out, std::size_t bytes, void* handle);
API cuMemFreeAsync(software::Address address, void* handle);
API cuMemGetInfo_v2(std::size_t* free, std::size_t* total);
API cuMemGetAddressRange_v2(software::Address* base, std::size_t* bytes, software::Address address);
API cuPointerGetAttribute(void* out, int attribute, software::Address address);

// Host memory.
API cuMemHostAlloc(void** out, std::size_t bytes, unsigned);
API cuMemAllocHost_v2(void** out, std::size_t bytes);
API cuMemFreeHost(void* pointer);
API cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned);
API cuMemHostUnregister(void* pointer);
API cuMemHostGetDevicePointer_v2(software::Address* out, void* pointer, unsigned flags);
API cuMemHostGetFlags(unsigned* flags, void* pointer);

// Virtual memory.
API cuMemGetAllocationGranularity(std::size_t* bytes, const software::MemoryProperties* properties, int);
API cuMemCreate(std::uint64_t* out, std::size_t bytes, const software::MemoryProperties* properties, unsigned long long
                flags);
API cuMemRelease(std::uint64_t handle);
API cuMemRetainAllocationHandle(std::uint64_t* out, void* pointer);
API cuMemAddressReserve(software::Address* out, std::size_t bytes, std::size_t alignment, software::Address, unsigned
                        long long flags);
API cuMemAddressFree(software::Address start, std::size_t bytes);
API cuMemMap(software::Address start, std::size_t bytes, std::size_t offset, std::uint64_t handle, unsigned long long
             flags);
API cuMemUnmap(software::Address start, std::size_t bytes);
API cuMemSetAccess(software::Address start, std::size_t bytes, const software::MemoryAccess* wanted, std::size_t count);
API cuMemGetAccess(unsigned long long* flags, const software::MemoryLocation* location, software::Address address);
API cuMemExportToShareableHandle(void* out, std::uint64_t handle, int type, unsigned long long flags);
API cuMemImportFromShareableHandle(std::uint64_t* out, void* handle, int type);
API cuMemGetAllocationPropertiesFromHandle(software::MemoryProperties* out, std::uint64_t handle);

// Copies.
API cuMemcpyHtoDAsync_v2(software::Address to, const void* from, std::size_t bytes, void* handle);
API cuMemcpyDtoHAsync_v2(void* to, software::Address from, std::size_t bytes, void* handle);
API cuMemcpyDtoDAsync_v2(software::Address to, software::Address from, std::size_t bytes, void* handle);
API cuMemcpyPeerAsync(software::Address to, void*, software::Address from, void*, std::size_t bytes, void* handle);
API cuMemcpyAsync(software::Address to, software::Address from, std::size_t bytes, void* handle);
API cuMemcpyHtoD_v2(software::Address to, const void* from, std::size_t bytes);
API cuMemcpyDtoH_v2(void* to, software::Address from, std::size_t bytes);
API cuMemcpyDtoD_v2(software::Address to, software::Address from, std::size_t bytes);
API cuMemcpyPeer(software::Address to, void*, software::Address from, void*, std::size_t bytes);
API cuMemcpy(software::Address to, software::Address from, std::size_t bytes);
API cuMemsetD8Async(software::Address to, unsigned char value, std::size_t n, void* handle);
API cuMemsetD16Async(software::Address to, unsigned short value, std::size_t n, void* handle);
API cuMemsetD32Async(software::Address to, unsigned value, std::size_t n, void* handle);
API cuMemsetD8_v2(software::Address to, unsigned char value, std::size_t n);
API cuMemsetD16_v2(software::Address to, unsigned short value, std::size_t n);
API cuMemsetD32_v2(software::Address to, unsigned value, std::size_t n);

// Streams.
API cuStreamCreate(void** out, unsigned flags);
API cuStreamCreateWithPriority(void** out, unsigned flags, int priority);
API cuStreamDestroy_v2(void* handle);
API cuStreamSynchronize(void* handle);
API cuStreamQuery(void* handle);
API cuStreamWaitEvent(void* handle, void* event, unsigned);
API cuStreamGetCtx(void* handle, void** out);
API cuStreamGetFlags(void* handle, unsigned* flags);
API cuStreamGetPriority(void* handle, int* priority);

// Events.
API cuEventCreate(void** out, unsigned flags);
API cuEventDestroy_v2(void* event);
API cuEventRecord(void* event, void* stream);
API cuEventRecordWithFlags(void* event, void* stream, unsigned flags);
API cuEventQuery(void* event);
API cuEventSynchronize(void* event);
API cuEventElapsedTime(float* milliseconds, void* start, void* end);
API cuEventElapsedTime_v2(float* milliseconds, void* start, void* end);

// Capture.
API cuStreamBeginCapture_v2(void* handle, int mode);
API cuStreamEndCapture(void* handle, void** graph);
API cuStreamIsCapturing(void* handle, int* status);
API cuStreamGetCaptureInfo_v2(void* handle, int* status, std::uint64_t* number, void** graph, const void** nodes,
                              std::size_t* count);
API cuStreamGetCaptureInfo_v3(void* handle, int* status, std::uint64_t* number, void** graph, const void** nodes, const
                              void** edges, std::size_t* count);
API cuThreadExchangeStreamCaptureMode(int* mode);

// Graphs.
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags);
API cuGraphLaunch(void* exec, void* handle);
API cuGraphUpload(void* exec, void* handle);
API cuGraphExecUpdate_v2(void* exec, void* graph, software::GraphUpdateInfo* info);
API cuGraphGetNodes(void* graph, void** nodes, std::size_t* count);
API cuGraphDestroy(void* graph);
API cuGraphExecDestroy(void* exec);

// Functions of the host in streams.
API cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument);

// Modules.
API cuModuleLoadData(void** out, const void* image);
API cuModuleLoadDataEx(void** out, const void* image, unsigned, int*, void**);
API cuModuleLoad(void** out, const char* path);
API cuModuleUnload(void* module);
API cuModuleGetFunction(void** out, void* handle, const char* name);
API cuModuleGetGlobal_v2(software::Address*, std::size_t*, void* handle, const char*);

// Kernels.
API cuFuncGetAttribute(int* value, int attribute, void* handle);
API cuFuncSetAttribute(void* handle, int attribute, int value);
API cuFuncSetCacheConfig(void* handle, int);
API cuFuncGetParamInfo(void* handle, std::size_t index, std::size_t* offset, std::size_t* bytes);
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* handle, int threads, std::size_t shared_bytes);
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, void* handle, int threads, std::size_t shared_bytes,
                                                         unsigned);
API cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void* handle, std::size_t (*shared_of)(int threads),
                                     std::size_t shared_bytes, int limit);
API cuOccupancyMaxPotentialBlockSizeWithFlags(int* grid, int* block, void* handle, std::size_t (*shared_of)(int
                                              threads), std::size_t shared_bytes, int limit, unsigned);
API cuOccupancyAvailableDynamicSMemPerBlock(std::size_t* bytes, void* handle, int blocks, int);

// Launches.
API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra);
API cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned
                              bz, unsigned shared_bytes, void* stream, void** arguments);
API cuLaunchKernelEx(const software::LaunchConfig* config, void* function, void** arguments, void** extra);

// Finding functions.
API cuGetProcAddress_v2(const char* name, void** out, int, std::uint64_t, int* status);
API cuGetProcAddress(const char* name, void** out, int version, std::uint64_t flags);
API cuGetExportTable(const void** table, const void*);

// Others.
API cuProfilerStart();
API cuProfilerStop();
