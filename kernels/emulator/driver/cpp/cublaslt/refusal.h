// Why the library says no. A status alone leaves a caller guessing.
#pragma once
#include "abi.h"

namespace lt {

// Tells the log what was refused and why, and returns `status`. The log is silent until someone asks for it with
// cublasLtLoggerSetLevel, CUBLASLT_LOG_LEVEL (the real library's own variable) or CONSORT_SOFTWARE_DRIVER_TRACE.
[[gnu::format(printf, 2, 3)]] cublasStatus_t refuse(cublasStatus_t status, const char* format, ...);

// While one lives, refusals on this thread are not logged.
struct Quiet {
    Quiet();
    ~Quiet();
};

// Counts a call for the faults that the environment asks for; the status to fail with, if it is this call's turn.
cublasStatus_t begin_call(const char* function);

void set_log_level(int level);
bool open_log_file(const char* path);
void disable_log();

} // namespace lt
