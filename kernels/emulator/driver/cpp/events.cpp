// Events.
#include "api.h"
#include "capture.h"

using namespace software;

namespace {

int record(const char* name, void* event, void* handle) {
    return on_stream(name, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        std::shared_ptr<Event> recorded = handles<Event>().find(event);
        if (!recorded || recorded->context != stream->context) return INVALID_HANDLE;
        if (stream->capture) {
            if (stream->capture->invalid) return CAPTURE_INVALIDATED;
            capture_record(*stream, *recorded);
            return SUCCESS;
        }
        if (int result = refuse_implicit_capture(*stream)) return result;
        recorded->capture = nullptr;
        recorded->recorded = enqueue_record(stream);
        return SUCCESS;
    });
}

// For questions after an event's state: `body(call, event)`, with something recorded outside of a capture.
template <class Body> int asked(const char* name, void* event, Body body) {
    return with<Event>(name, event, [&](Call& call, const std::shared_ptr<Event>& event) -> int {
        if (int result = refuse_while_capturing()) return result;
        if (event->capture) {
            if (!event->capture->ended) invalidate(*event->capture);
            return CAPTURED_EVENT;
        }
        if (event->context->sticky) return event->context->sticky;
        return event->recorded ? body(call, event) : SUCCESS;
    });
}

int elapsed(const char* name, float* milliseconds, void* first, void* second) {
    return with<Event>(name, first, [&](Call&, const std::shared_ptr<Event>& start) -> int {
        std::shared_ptr<Event> end = handles<Event>().find(second);
        if (!milliseconds) return INVALID_VALUE;
        if (!end || !start->recorded || !end->recorded) return INVALID_HANDLE;
        if ((start->flags | end->flags) & EVENT_DISABLE_TIMING) return INVALID_HANDLE;
        if (!start->recorded->done || !end->recorded->done) return NOT_READY;
        *milliseconds = std::chrono::duration<float, std::milli>(end->recorded->time - start->recorded->time).count();
        return SUCCESS;
    });
}

} // namespace

API cuEventCreate(void** out, unsigned flags) {
    return in_context(__func__, [&](Call& call, Context&) -> int {
        if (!out) return INVALID_VALUE;
        auto event = std::make_shared<Event>();
        event->flags = flags;
        event->context = call.context;
        *out = handles<Event>().add(event);
        return SUCCESS;
    });
}

API cuEventDestroy_v2(void* event) { return destroyed<Event>(__func__, event); }

API cuEventRecord(void* event, void* stream) { return record(__func__, event, stream); }

API cuEventRecordWithFlags(void* event, void* stream, unsigned flags) {
    return flags ? int(INVALID_VALUE) : record(__func__, event, stream);
}

API cuEventQuery(void* event) {
    return asked(__func__, event, [](Call&, const std::shared_ptr<Event>& event) -> int {
        if (!event->recorded->done) {
            demand(event->recorded);
            return NOT_READY;
        }
        host_saw(event->recorded->clock);
        return SUCCESS;
    });
}

API cuEventSynchronize(void* event) {
    return asked(__func__, event, [](Call& call, const std::shared_ptr<Event>& event) -> int {
        std::shared_ptr<Completion> recorded = event->recorded;
        return wait_for(call.lock, *event->context, recorded);
    });
}

API cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    return elapsed(__func__, milliseconds, start, end);
}

API cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    return elapsed(__func__, milliseconds, start, end);
}
