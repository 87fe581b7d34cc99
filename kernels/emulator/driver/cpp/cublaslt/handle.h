// The library's handle, and the device that it was made for.
#pragma once
#include "abi.h"

namespace lt {

// NOT_INITIALIZED for a handle that is none or was destroyed, INVALID_VALUE on a thread whose current context is of
// another device: the real library keeps state of the device that was current when the handle was made.
cublasStatus_t check_handle(cublasLtHandle_t handle);

} // namespace lt
