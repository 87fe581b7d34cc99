#include "refusal.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "../enqueue.h"

namespace lt {

namespace {

struct Log {
    std::mutex mutex;
    int level = 0;
    bool disabled = false;
    std::FILE* file = nullptr;

    Log() {
        if (const char* text = std::getenv("CUBLASLT_LOG_LEVEL")) level = std::atoi(text);
        const char* trace = std::getenv("CONSORT_SOFTWARE_DRIVER_TRACE");
        if (trace && *trace && *trace != '0') level = 5;
    }
};

// Never destroyed: threads may still be in the library when the process ends.
Log& the_log() {
    static Log* log = new Log;
    return *log;
}

thread_local int quiet = 0;

} // namespace

Quiet::Quiet() { quiet++; }

Quiet::~Quiet() { quiet--; }

cublasStatus_t refuse(cublasStatus_t status, const char* format, ...) {
    Log& log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    if (quiet || log.level < 1 || log.disabled) return status;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::FILE* out = log.file ? log.file : stderr;
    std::fprintf(out, "software cuBLASLt: %s: %s\n", cublasLtGetStatusName(status), text);
    std::fflush(out);
    return status;
}

cublasStatus_t begin_call(const char* function) {
    int code = software_driver_count_call(function);
    if (code == 0) return CUBLAS_STATUS_SUCCESS;
    return refuse(static_cast<cublasStatus_t>(code), "%s fails because the environment asks for it", function);
}

void set_log_level(int level) {
    std::lock_guard<std::mutex> lock(the_log().mutex);
    the_log().level = level;
}

bool open_log_file(const char* path) {
    std::FILE* file = std::fopen(path, "w");
    if (!file) return false;
    std::lock_guard<std::mutex> lock(the_log().mutex);
    if (the_log().file) std::fclose(the_log().file);
    the_log().file = file;
    return true;
}

void disable_log() {
    std::lock_guard<std::mutex> lock(the_log().mutex);
    the_log().disabled = true;
}

} // namespace lt
