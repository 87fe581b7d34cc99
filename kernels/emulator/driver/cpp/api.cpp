#include "api.h"

#include "capture.h"
#include "device_thread.h"
#include "settings.h"

namespace software {

namespace {

// Errors after which a context is of no use any more.
bool stays(int result) {
    bool of_the_hardware = result == 214 || result == 220 || result == 226 || result == 999;
    bool of_work = result == ILLEGAL_ADDRESS || result == 702 || result == 710 || (result >= 714 && result <= 719);
    return of_the_hardware || of_work;
}

} // namespace

Driver& driver() {
    static Driver& one = *new Driver;
    return one;
}

int begin_call(Call& call) {
    if (int result = count_call(call.name, call.hangs)) {
        if (result == STAYS) {
            call.lock.unlock();
            stay();
        }
        std::shared_ptr<Context> context = current_context();
        if (context && stays(result)) make_sticky(*context, result);
        return result;
    }
    // Nothing would ever be done.
    if (driver().ending) return DEINITIALIZED;
    return driver().initialised ? SUCCESS : NOT_INITIALIZED;
}

int enter_context(Call& call) {
    call.context = current_context();
    if (!call.context) return INVALID_CONTEXT;
    if (call.context->destroyed) return CONTEXT_IS_DESTROYED;
    return call.context->sticky;
}

std::shared_ptr<Stream> stream_of(const Call& call, const void* handle) {
    constexpr std::uintptr_t LEGACY = 1, OF_THE_THREAD = 2;
    auto number = reinterpret_cast<std::uintptr_t>(handle);
    if (number <= LEGACY) return call.context->null_stream;
    // A default stream of each thread would need one for each thread: nobody here compiles for that.
    return number == OF_THE_THREAD ? nullptr : handles<Stream>().find(handle);
}

} // namespace software

using namespace software;

API cuInit(unsigned flags) {
    Call call{Lock(driver().mutex), __func__, nullptr};
    if (int result = count_call(call.name, call.hangs)) {
        if (result != STAYS) return result;
        call.lock.unlock();
        stay();
    }
    if (flags) return INVALID_VALUE;
    if (settings().devices == 0) return NO_DEVICE;
    if (!driver().initialised) {
        driver().initialised = true;
        report_at_exit();
        start_device_thread();
    }
    return SUCCESS;
}

API cuDriverGetVersion(int* version) {
    constexpr int VERSION = 13000;
    if (!version) return INVALID_VALUE;
    *version = VERSION;
    return SUCCESS;
}
