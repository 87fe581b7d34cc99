#include "contexts.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "api.h"
#include "capture.h"
#include "memory.h"
#include "settings.h"

namespace software {

namespace {

thread_local std::vector<std::shared_ptr<Context>> entered;

std::shared_ptr<Context> make_context(Device& device, bool primary) {
    auto context = std::make_shared<Context>();
    context->device = &device;
    context->primary = primary;
    context->null_stream = new_stream(context, 0, 0);
    context->handle = handles<Context>().add(context);
    return context;
}

bool idle(const Context& context) {
    return std::all_of(streams().begin(), streams().end(), [&](const auto& stream) {
        return stream->context.get() != &context || stream->queue.empty();
    });
}

// Lets work end that can, then ends the rest and gives memory back.
void destroy(Lock& lock, Context& context) {
    constexpr std::chrono::seconds PATIENCE(1);
    for (const auto& stream : streams())
        if (stream->context.get() == &context && stream->last) demand(stream->last);
    driver().work.notify_one();
    driver().done.wait_for(lock, PATIENCE, [&] { return idle(context); });
    context.destroyed = true;
    driver().work.notify_one();
    driver().done.wait(lock, [&] { return idle(context); });
    release_all_of(context);
    std::erase_if(streams(), [&](const auto& stream) { return stream->context.get() == &context; });
    handles<Context>().remove(context.handle);
    for (const auto& [handle, other] : handles<Context>().all()) other->peers.erase(&context);
    // The two hold each other.
    context.null_stream = nullptr;
}

int create(const char* name, void** out, int ordinal) {
    return initialised(name, [&](Call&) -> int {
        if (!out) return INVALID_VALUE;
        if (ordinal < 0 || ordinal >= static_cast<int>(devices().size())) return INVALID_DEVICE;
        std::shared_ptr<Context> context = make_context(devices()[ordinal], false);
        entered.push_back(context);
        *out = context->handle;
        return SUCCESS;
    });
}

template <class Body> int of_primary(const char* name, int ordinal, Body body) {
    return initialised(name, [&](Call& call) -> int {
        if (ordinal < 0 || ordinal >= static_cast<int>(devices().size())) return INVALID_DEVICE;
        return body(call, devices()[ordinal]);
    });
}

int release_primary(const char* name, int ordinal) {
    return of_primary(name, ordinal, [&](Call& call, Device& device) -> int {
        if (device.primary_holders == 0) return INVALID_CONTEXT;
        if (--device.primary_holders == 0) destroy(call.lock, *std::exchange(device.primary, nullptr));
        return SUCCESS;
    });
}

int reset_primary(const char* name, int ordinal) {
    return of_primary(name, ordinal, [&](Call& call, Device& device) -> int {
        if (device.primary) destroy(call.lock, *std::exchange(device.primary, nullptr));
        return SUCCESS;
    });
}

// Accepted, and of no consequence here.
int accepted(const char* name) {
    return in_context(name, [](Call&, Context&) -> int { return SUCCESS; });
}

} // namespace

std::shared_ptr<Context> current_context() { return entered.empty() ? nullptr : entered.back(); }

void make_sticky(Context& context, int result) {
    if (!context.sticky) context.sticky = result;
    driver().work.notify_one();
    driver().done.notify_all();
}

} // namespace software

using namespace software;

API cuDevicePrimaryCtxRetain(void** out, int ordinal) {
    return of_primary(__func__, ordinal, [&](Call&, Device& device) -> int {
        if (!out) return INVALID_VALUE;
        if (!device.primary) device.primary = make_context(device, true);
        device.primary_holders++;
        *out = device.primary->handle;
        return SUCCESS;
    });
}

API cuDevicePrimaryCtxRelease(int ordinal) { return release_primary(__func__, ordinal); }
API cuDevicePrimaryCtxRelease_v2(int ordinal) { return release_primary(__func__, ordinal); }
API cuDevicePrimaryCtxReset(int ordinal) { return reset_primary(__func__, ordinal); }
API cuDevicePrimaryCtxReset_v2(int ordinal) { return reset_primary(__func__, ordinal); }

API cuDevicePrimaryCtxSetFlags_v2(int ordinal, unsigned) {
    return of_primary(__func__, ordinal, [](Call&, Device&) -> int { return SUCCESS; });
}

API cuDevicePrimaryCtxGetState(int ordinal, unsigned* flags, int* active) {
    return of_primary(__func__, ordinal, [&](Call&, Device& device) -> int {
        if (!flags || !active) return INVALID_VALUE;
        *flags = 0;
        *active = device.primary != nullptr;
        return SUCCESS;
    });
}

API cuCtxCreate_v2(void** out, unsigned, int ordinal) { return create(__func__, out, ordinal); }
API cuCtxCreate_v3(void** out, void*, int, unsigned, int ordinal) { return create(__func__, out, ordinal); }
API cuCtxCreate_v4(void** out, void*, unsigned, int ordinal) { return create(__func__, out, ordinal); }

API cuCtxDestroy_v2(void* handle) {
    return initialised(__func__, [&](Call& call) -> int {
        std::shared_ptr<Context> context = handles<Context>().find(handle);
        if (!context || context->primary) return INVALID_CONTEXT;
        if (current_context() == context) entered.pop_back();
        destroy(call.lock, *context);
        return SUCCESS;
    });
}

API cuCtxGetCurrent(void** out) {
    return initialised(__func__, [&](Call&) -> int {
        if (!out) return INVALID_VALUE;
        std::shared_ptr<Context> context = current_context();
        *out = context ? context->handle : nullptr;
        return SUCCESS;
    });
}

API cuCtxSetCurrent(void* handle) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Context> context = handles<Context>().find(handle);
        if (handle && !context) return INVALID_CONTEXT;
        if (!entered.empty()) entered.pop_back();
        if (context) entered.push_back(context);
        return SUCCESS;
    });
}

API cuCtxPushCurrent_v2(void* handle) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Context> context = handles<Context>().find(handle);
        if (!context) return INVALID_CONTEXT;
        entered.push_back(context);
        return SUCCESS;
    });
}

API cuCtxPopCurrent_v2(void** out) {
    return initialised(__func__, [&](Call&) -> int {
        if (entered.empty()) return INVALID_CONTEXT;
        if (out) *out = entered.back()->handle;
        entered.pop_back();
        return SUCCESS;
    });
}

API cuCtxGetDevice(int* ordinal) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Context> context = current_context();
        if (!context) return INVALID_CONTEXT;
        if (!ordinal) return INVALID_VALUE;
        *ordinal = context->device->ordinal;
        return SUCCESS;
    });
}

API cuCtxSynchronize() {
    return in_context(__func__, [&](Call& call, Context& context) -> int {
        if (int result = refuse_while_capturing()) return result;
        std::vector<std::shared_ptr<Completion>> ends;
        for (const auto& stream : streams())
            if (stream->context.get() == &context && stream->last) ends.push_back(stream->last);
        for (const auto& end : ends) demand(end);
        for (const auto& end : ends)
            if (int result = wait_for(call.lock, context, end)) return result;
        return SUCCESS;
    });
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
        return SUCCESS;
    });
}

API cuCtxSetFlags(unsigned) { return accepted(__func__); }
API cuCtxSetLimit(int, std::size_t) { return accepted(__func__); }
API cuCtxSetCacheConfig(int) { return accepted(__func__); }

API cuCtxGetLimit(std::size_t* value, int) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        if (!value) return INVALID_VALUE;
        *value = 0;
        return SUCCESS;
    });
}

API cuCtxGetCacheConfig(int* value) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        if (!value) return INVALID_VALUE;
        *value = 0;
        return SUCCESS;
    });
}

API cuCtxEnablePeerAccess(void* handle, unsigned flags) {
    return in_context(__func__, [&](Call&, Context& context) -> int {
        std::shared_ptr<Context> peer = handles<Context>().find(handle);
        if (flags) return INVALID_VALUE;
        if (!peer) return INVALID_CONTEXT;
        if (peer->device == context.device) return INVALID_DEVICE;
        if (!settings().peers) return PEER_ACCESS_UNSUPPORTED;
        bool is_new = context.peers.insert(peer.get()).second;
        return is_new ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
    });
}

API cuCtxDisablePeerAccess(void* handle) {
    return in_context(__func__, [&](Call&, Context& context) -> int {
        std::shared_ptr<Context> peer = handles<Context>().find(handle);
        if (!peer) return INVALID_CONTEXT;
        return context.peers.erase(peer.get()) ? SUCCESS : PEER_ACCESS_NOT_ENABLED;
    });
}
