// The library itself: handles, versions, names, the log.
#include "../enqueue.h"
#include "../living.h"
#include "handle.h"
#include "refusal.h"

namespace lt {

namespace {

struct Context {
    int device;
};

Living<cublasLtHandle_t, Context>& contexts() { return living<cublasLtHandle_t, Context>(); }

} // namespace

cublasStatus_t check_handle(cublasLtHandle_t handle) {
    auto context = contexts().find(handle);
    if (!context) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "the handle is null, or was destroyed");
    int device = software_driver_current_device();
    if (device == context->device) return CUBLAS_STATUS_SUCCESS;
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a handle of device %d, while the thread's context is of device %d",
                  context->device, device);
}

} // namespace lt

using namespace lt;

// The real library would make a context of its own on a thread without one; whoever relies on that has forgotten
// something, so it is refused here.
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (!handle) return refuse(CUBLAS_STATUS_INVALID_VALUE, "nowhere to put the handle");
    int device = software_driver_current_device();
    if (device < 0) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "the calling thread has no current context");
    *handle = contexts().add(Context{device});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (contexts().remove(handle)) return CUBLAS_STATUS_SUCCESS;
    return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "the handle is null, or was destroyed before");
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an invalid value was used as an argument";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "an absent device architectural feature is required";
    case CUBLAS_STATUS_MAPPING_ERROR: return "an access to GPU memory space failed";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the GPU program failed to execute";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality is not supported";
    case CUBLAS_STATUS_LICENSE_ERROR: return "the functionality requested requires some license";
    }
    return "unknown error";
}

std::size_t cublasLtGetVersion() { return 130000; }

std::size_t cublasLtGetCudartVersion() { return 13000; }

cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int* value) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (!value || type > PATCH_LEVEL) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no property %u", unsigned(type));
    *value = type == MAJOR_VERSION ? 13 : 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtLoggerSetLevel(int level) {
    if (level < 0 || level > 5) return refuse(CUBLAS_STATUS_INVALID_VALUE, "log levels are 0 to 5");
    set_log_level(level);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtLoggerOpenFile(const char* path) {
    if (!path || !open_log_file(path)) return refuse(CUBLAS_STATUS_INVALID_VALUE, "the log file cannot be opened");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtLoggerForceDisable() {
    disable_log();
    return CUBLAS_STATUS_SUCCESS;
}
