// Copies and fills.
#include <cstring>
#include <vector>

#include "api.h"
#include "capture.h"
#include "memory.h"
#include "settings.h"
#include "space.h"

namespace software {

namespace {

constexpr int POISON = 0xff;

void* at(Address address) { return reinterpret_cast<void*>(address); }
Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

using StreamPointer = std::shared_ptr<Stream>;

int copy(const Call& call, const StreamPointer& stream, const char* what, Address to, Address from, std::size_t bytes) {
    Touches touches;
    touches.reads.push_back(range(from, bytes));
    touches.writes.push_back(range(to, bytes));
    auto body = [=] { std::memmove(at(to), at(from), bytes); };
    std::string name = std::string(what) + " of " + std::to_string(bytes) + " bytes";
    return enqueue(stream, std::make_shared<SimpleWork>(name, touches, body, what), call.hangs);
}

// Pageable memory is read before the call returns.
int copy_staged(const Call& call, const StreamPointer& stream, Address to, const void* from, std::size_t bytes) {
    auto first = static_cast<const unsigned char*>(from);
    auto staged = std::make_shared<std::vector<unsigned char>>(first, first + bytes);
    Touches touches;
    touches.writes.push_back(range(to, bytes));
    auto body = [=] { std::memcpy(at(to), staged->data(), bytes); };
    std::string what = "copy from pageable memory", name = what + " of " + std::to_string(bytes) + " bytes";
    return enqueue(stream, std::make_shared<SimpleWork>(name, touches, body, what), call.hangs);
}

int copy_to_device(const Call& call, const StreamPointer& stream, Address to, const void* from, std::size_t bytes) {
    // A captured copy reads when the graph is launched.
    if (stream->capture || is_pinned(range(address_of(from), bytes)))
        return copy(call, stream, "copy to the device", to, address_of(from), bytes);
    return copy_staged(call, stream, to, from, bytes);
}

int copy_to_host(Call& call, const StreamPointer& stream, void* to, Address from, std::size_t bytes) {
    const char* what = "copy to the host";
    if (stream->capture) return copy(call, stream, what, address_of(to), from, bytes);
    bool pinned = is_pinned(range(address_of(to), bytes));
    // What is there is not yet what is copied: who reads it early shall see that.
    bool may_poison = pinned && settings().order != Order::Eager && in_flight(range(address_of(to), bytes)).empty();
    if (may_poison && why_not(range(from, bytes)).empty()) std::memset(to, POISON, bytes);
    int result = copy(call, stream, what, address_of(to), from, bytes);
    // Into pageable memory, the call returns when it is done.
    if (result || pinned) return result;
    return wait_for(call.lock, *stream->context, stream->last);
}

// In either direction, as the addresses tell.
int copy_anywhere(Call& call, const StreamPointer& stream, Address to, Address from, std::size_t bytes) {
    if (!find_memory(from) && !space().holds(from)) return copy_to_device(call, stream, to, at(from), bytes);
    if (!find_memory(to) && !space().holds(to)) return copy_to_host(call, stream, at(to), from, bytes);
    return copy(call, stream, "copy", to, from, bytes);
}

template <class Body> int asynchronous(const char* name, void* handle, std::size_t bytes, Body body) {
    return on_stream(name, handle, [&](Call& call, const StreamPointer& stream) -> int {
        return bytes ? body(call, stream) : int(SUCCESS);
    });
}

// In the default stream; returns when it is done.
template <class Body> int synchronous(const char* name, std::size_t bytes, Body body) {
    return in_context(name, [&](Call& call, Context& context) -> int {
        if (!bytes) return SUCCESS;
        if (int result = refuse_while_capturing()) return result;
        std::shared_ptr<Stream> stream = context.null_stream;
        int result = body(call, stream);
        return result ? result : wait_for(call.lock, context, stream->last);
    });
}

template <class Value> int fill(const Call& call, const StreamPointer& stream, Address to, Value value, std::size_t n) {
    if (to % sizeof(Value)) return INVALID_VALUE;
    Touches touches;
    touches.writes.push_back(range(to, n * sizeof(Value)));
    auto body = [=] { std::fill_n(static_cast<Value*>(at(to)), n, value); };
    std::string what = "fill", name = what + " of " + std::to_string(n * sizeof(Value)) + " bytes";
    return enqueue(stream, std::make_shared<SimpleWork>(name, touches, body, what), call.hangs);
}

template <class Value> int fill_later(const char* name, Address to, Value value, std::size_t n, void* handle) {
    return asynchronous(name, handle, n, [&](Call& call, const StreamPointer& stream) -> int {
        return fill(call, stream, to, value, n);
    });
}

template <class Value> int fill_now(const char* name, Address to, Value value, std::size_t n) {
    return synchronous(name, n, [&](Call& call, const StreamPointer& stream) -> int {
        return fill(call, stream, to, value, n);
    });
}

} // namespace
} // namespace software

using namespace software;

API cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, void* handle) {
    return asynchronous(__func__, handle, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_to_device(call, stream, to, from, bytes);
    });
}

API cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, void* handle) {
    return asynchronous(__func__, handle, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_to_host(call, stream, to, from, bytes);
    });
}

API cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void* handle) {
    return asynchronous(__func__, handle, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy(call, stream, "copy on the device", to, from, bytes);
    });
}

API cuMemcpyPeerAsync(Address to, void*, Address from, void*, std::size_t bytes, void* handle) {
    return asynchronous(__func__, handle, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy(call, stream, "copy between devices", to, from, bytes);
    });
}

API cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* handle) {
    return asynchronous(__func__, handle, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_anywhere(call, stream, to, from, bytes);
    });
}

API cuMemcpyHtoD_v2(Address to, const void* from, std::size_t bytes) {
    return synchronous(__func__, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_to_device(call, stream, to, from, bytes);
    });
}

API cuMemcpyDtoH_v2(void* to, Address from, std::size_t bytes) {
    return synchronous(__func__, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_to_host(call, stream, to, from, bytes);
    });
}

API cuMemcpyDtoD_v2(Address to, Address from, std::size_t bytes) {
    return synchronous(__func__, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy(call, stream, "copy on the device", to, from, bytes);
    });
}

API cuMemcpyPeer(Address to, void*, Address from, void*, std::size_t bytes) {
    return synchronous(__func__, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy(call, stream, "copy between devices", to, from, bytes);
    });
}

API cuMemcpy(Address to, Address from, std::size_t bytes) {
    return synchronous(__func__, bytes, [&](Call& call, const StreamPointer& stream) -> int {
        return copy_anywhere(call, stream, to, from, bytes);
    });
}

API cuMemsetD8Async(Address to, unsigned char value, std::size_t n, void* handle) {
    return fill_later(__func__, to, value, n, handle);
}

API cuMemsetD16Async(Address to, unsigned short value, std::size_t n, void* handle) {
    return fill_later(__func__, to, value, n, handle);
}

API cuMemsetD32Async(Address to, unsigned value, std::size_t n, void* handle) {
    return fill_later(__func__, to, value, n, handle);
}

API cuMemsetD8_v2(Address to, unsigned char value, std::size_t n) { return fill_now(__func__, to, value, n); }
API cuMemsetD16_v2(Address to, unsigned short value, std::size_t n) { return fill_now(__func__, to, value, n); }
API cuMemsetD32_v2(Address to, unsigned value, std::size_t n) { return fill_now(__func__, to, value, n); }
