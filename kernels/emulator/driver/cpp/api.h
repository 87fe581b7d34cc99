// How every function of the interface begins: the lock is taken, the call is counted and may be made to fail, and what
// it needs is looked up.
#pragma once
#include <memory>

#include "abi.h"
#include "contexts.h"
#include "driver.h"
#include "handles.h"
#include "report.h"
#include "streams.h"

namespace software {

struct Call {
    Lock lock;
    const char* name;
    std::shared_ptr<Context> context;
    // The work that this call enqueues shall never end.
    bool hangs = false;
};

// Counts the call; a Result other than SUCCESS ends it.
int begin_call(Call& call);

// Sets the call's context to that of the thread.
int enter_context(Call& call);

// The stream of a handle, the default ones included; null where there is none.
std::shared_ptr<Stream> stream_of(const Call& call, const void* handle);

inline int ended(const Call& call, int result) {
    if (result != SUCCESS && result != NOT_READY) trace("%s answers %d", call.name, result);
    return result;
}

// For functions that need cuInit only: `body(call)`.
template <class Body> int initialised(const char* name, Body body) {
    Call call{Lock(driver().mutex), name, nullptr};
    int result = begin_call(call);
    return ended(call, result ? result : body(call));
}

// For functions of the current context: `body(call, context)`.
template <class Body> int in_context(const char* name, Body body) {
    return initialised(name, [&](Call& call) -> int {
        int result = enter_context(call);
        return result ? result : body(call, *call.context);
    });
}

// For functions of a stream: `body(call, stream)`.
template <class Body> int on_stream(const char* name, const void* handle, Body body) {
    return in_context(name, [&](Call& call, Context&) -> int {
        std::shared_ptr<Stream> stream = stream_of(call, handle);
        if (!stream) return INVALID_HANDLE;
        if (stream->context->sticky) return stream->context->sticky;
        return body(call, stream);
    });
}

// For functions of any other object: `body(call, object)`. It may be of another context than the current one.
template <class Object, class Body> int with(const char* name, const void* handle, Body body) {
    return in_context(name, [&](Call& call, Context&) -> int {
        std::shared_ptr<Object> object = handles<Object>().find(handle);
        return object ? body(call, object) : INVALID_HANDLE;
    });
}

// For functions that destroy one: they do so after an error, too.
template <class Object> int destroyed(const char* name, const void* handle) {
    return initialised(name,
                       [&](Call&) -> int { return handles<Object>().remove(handle) ? SUCCESS : INVALID_HANDLE; });
}

} // namespace software
