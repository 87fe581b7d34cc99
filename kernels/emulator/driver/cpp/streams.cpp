#include "streams.h"

#include <algorithm>

#include "api.h"
#include "capture.h"
#include "history.h"
#include "memory.h"
#include "settings.h"

namespace software {

namespace {

std::uint64_t operations = 0;

Clock& host() {
    static Clock& clock = *new Clock;
    return clock;
}

Time due_time() {
    Time time = std::chrono::steady_clock::now();
    std::chrono::milliseconds lag(settings().lag_ms);
    if (settings().order == Order::Eager) return time;
    if (settings().order == Order::Lazy) return time + lag;
    // By chance, from the number of the operation so that a seed says it all.
    std::uint64_t mixed = (operations + settings().seed) * 0x9e3779b97f4a7c15ull;
    return time + lag * static_cast<int>(mixed >> 60) / 15;
}

// What the legacy default stream waits for, and who waits for it.
std::vector<std::shared_ptr<Completion>> implicit(const Stream& stream) {
    std::vector<std::shared_ptr<Completion>> after;
    if (!stream.blocking()) return after;
    if (!stream.null()) {
        const auto& last = stream.context->null_stream->last;
        if (last && !last->done) after.push_back(last);
        return after;
    }
    for (const auto& other : streams())
        if (other.get() != &stream && other->context == stream.context && other->blocking() && other->last)
            after.push_back(other->last);
    return after;
}

std::shared_ptr<Completion> append(const std::shared_ptr<Stream>& stream, std::shared_ptr<const Work> work) {
    auto operation = std::make_unique<Operation>();
    operation->number = ++operations;
    operation->work = std::move(work);
    operation->after = implicit(*stream);
    operation->host = host();
    operation->due = due_time();
    operation->completion = std::make_shared<Completion>();
    operation->completion->stream = stream;
    stream->last = operation->completion;
    stream->queue.push_back(std::move(operation));
    driver().work.notify_one();
    return stream->last;
}

// Work whose memory is known must find it when it is enqueued; the device looks again.
int refused(const Work& work) {
    for (const Ranges* ranges : {&work.declared.reads, &work.declared.writes})
        for (const Range& each : *ranges) {
            std::string reason = why_not(each);
            if (reason.empty()) continue;
            trace("%s is refused: %s", work.name.c_str(), reason.c_str());
            return INVALID_VALUE;
        }
    return SUCCESS;
}

} // namespace

std::string name_of(const Stream& stream) {
    std::string name = stream.null() ? "the default stream" : "stream " + std::to_string(stream.number);
    return name + " of device " + std::to_string(stream.context->device->ordinal);
}

std::vector<std::shared_ptr<Stream>>& streams() {
    static auto& all = *new std::vector<std::shared_ptr<Stream>>;
    return all;
}

std::shared_ptr<Stream> new_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority) {
    static std::uint64_t made = 0;
    auto stream = std::make_shared<Stream>();
    stream->number = made++;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->line = new_line();
    streams().push_back(stream);
    return stream;
}

int enqueue(const std::shared_ptr<Stream>& stream, std::shared_ptr<const Work> work, bool hangs) {
    if (int result = refused(*work)) return result;
    if (stream->capture) return capture_work(*stream, std::move(work));
    if (int result = refuse_implicit_capture(*stream)) return result;
    append(stream, std::move(work));
    stream->queue.back()->hangs = hangs;
    return SUCCESS;
}

void enqueue_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Completion>& completion) {
    append(stream, nullptr);
    stream->queue.back()->after.push_back(completion);
}

std::shared_ptr<Completion> enqueue_record(const std::shared_ptr<Stream>& stream) { return append(stream, nullptr); }

void demand(const std::shared_ptr<Completion>& completion) {
    std::vector<std::shared_ptr<Completion>> wanted = {completion};
    while (!wanted.empty()) {
        std::shared_ptr<Completion> next = std::move(wanted.back());
        wanted.pop_back();
        std::shared_ptr<Stream> stream = next->stream.lock();
        if (next->done || !stream) continue;
        for (const auto& operation : stream->queue) {
            if (!operation->demanded)
                wanted.insert(wanted.end(), operation->after.begin(), operation->after.end());
            operation->demanded = true;
            if (operation->completion == next) break;
        }
    }
    driver().work.notify_one();
}

int wait_for(Lock& lock, Context& context, const std::shared_ptr<Completion>& completion) {
    demand(completion);
    driver().done.wait(lock, [&] { return completion->done || context.sticky || context.destroyed; });
    if (context.sticky) return context.sticky;
    if (context.destroyed) return CONTEXT_IS_DESTROYED;
    host_saw(completion->clock);
    return SUCCESS;
}

void await_end_of_failed(Lock& lock, const Context& context) {
    driver().work.notify_one();
    driver().done.wait(lock, [&] {
        return std::all_of(streams().begin(), streams().end(), [&](const auto& stream) {
            return stream->context.get() != &context || stream->queue.empty();
        });
    });
}

const Clock& host_clock() { return host(); }

void host_saw(const Clock& clock) { host().merge(clock); }

Clock settled() {
    Clock floor = host();
    for (const auto& stream : streams())
        for (const auto& operation : stream->queue) {
            Clock before = operation->host;
            before.merge(stream->clock);
            floor.meet(before);
        }
    return floor;
}

std::string in_flight(const Range& range) {
    Touches all;
    all.writes.push_back(range);
    for (const auto& stream : streams())
        for (const auto& operation : stream->queue) {
            if (!operation->work) continue;
            const Work& work = *operation->work;
            std::vector<Address> pointers = work.pointers();
            bool given = std::any_of(pointers.begin(), pointers.end(), [&](Address each) { return range.holds(each); });
            if (given || conflict(work.declared, all).bytes.bytes()) return work.name + " in " + name_of(*stream);
        }
    return unordered_toucher(range, host());
}

} // namespace software

using namespace software;

namespace {

int create_stream(const char* name, void** out, unsigned flags, int priority) {
    return in_context(name, [&](Call& call, Context&) -> int {
        if (!out || flags & ~unsigned(STREAM_NON_BLOCKING)) return INVALID_VALUE;
        *out = handles<Stream>().add(new_stream(call.context, flags, priority));
        return SUCCESS;
    });
}

} // namespace

API cuStreamCreate(void** out, unsigned flags) { return create_stream(__func__, out, flags, 0); }

API cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
    return create_stream(__func__, out, flags, priority);
}

API cuStreamDestroy_v2(void* handle) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Stream> stream = handles<Stream>().remove(handle);
        if (!stream) return INVALID_HANDLE;
        if (std::shared_ptr<Capture> capture = stream->capture) abandon(*capture);
        // Work that is in it is still done.
        stream->closed = true;
        driver().work.notify_one();
        return SUCCESS;
    });
}

API cuStreamSynchronize(void* handle) {
    return on_stream(__func__, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        if (int result = refuse_while_capturing()) return result;
        if (!stream->last) return SUCCESS;
        std::shared_ptr<Completion> end = stream->last;
        return wait_for(call.lock, *stream->context, end);
    });
}

API cuStreamQuery(void* handle) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (int result = refuse_while_capturing()) return result;
        if (!stream->last) return SUCCESS;
        if (!stream->last->done) {
            demand(stream->last);
            return NOT_READY;
        }
        host_saw(stream->last->clock);
        return SUCCESS;
    });
}

API cuStreamWaitEvent(void* handle, void* event, unsigned) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        std::shared_ptr<Event> waited = handles<Event>().find(event);
        if (!waited) return INVALID_HANDLE;
        if (waited->capture || stream->capture) return capture_wait(stream, *waited);
        if (waited->recorded) enqueue_wait(stream, waited->recorded);
        return SUCCESS;
    });
}

API cuStreamGetCtx(void* handle, void** out) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!out) return INVALID_VALUE;
        *out = stream->context->handle;
        return SUCCESS;
    });
}

API cuStreamGetFlags(void* handle, unsigned* flags) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!flags) return INVALID_VALUE;
        *flags = stream->flags;
        return SUCCESS;
    });
}

API cuStreamGetPriority(void* handle, int* priority) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!priority) return INVALID_VALUE;
        *priority = stream->priority;
        return SUCCESS;
    });
}
