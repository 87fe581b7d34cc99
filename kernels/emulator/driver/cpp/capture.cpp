#include "capture.h"

#include <algorithm>
#include <set>
#include <utility>

#include "api.h"

namespace software {

namespace {

std::vector<std::shared_ptr<Capture>>& captures() {
    static auto& all = *new std::vector<std::shared_ptr<Capture>>;
    return all;
}

// What the calling thread has chosen for its own calls.
thread_local CaptureMode thread_mode = CAPTURE_GLOBAL;

bool forbids(const Capture& capture) {
    if (thread_mode == CAPTURE_RELAXED || capture.mode == CAPTURE_RELAXED) return false;
    if (capture.thread == std::this_thread::get_id()) return true;
    return thread_mode == CAPTURE_GLOBAL && capture.mode == CAPTURE_GLOBAL;
}

void join(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture) {
    stream->capture = capture;
    stream->captured.clear();
    stream->capture_lane = capture->graph->lanes++;
    capture->members.push_back(stream);
}

// Whether everything captured comes before what the origin would capture next.
bool all_joined(const Capture& capture) {
    const auto& nodes = capture.graph->nodes;
    std::set<std::size_t> reached(capture.origin->captured.begin(), capture.origin->captured.end());
    // Nodes come after nodes of smaller index only.
    for (std::size_t at = nodes.size(); at-- > 0;)
        if (reached.count(at)) reached.insert(nodes[at].after.begin(), nodes[at].after.end());
    return reached.size() == nodes.size();
}

void leave(Capture& capture) {
    capture.ended = true;
    // The members may be the last to hold it.
    std::vector<std::shared_ptr<Stream>> members = std::move(capture.members);
    std::erase_if(captures(), [&](const auto& each) { return each.get() == &capture; });
    for (const auto& member : members) {
        member->captured.clear();
        member->capture = nullptr;
    }
}

} // namespace

int capture_work(Stream& stream, std::shared_ptr<const Work> work) {
    Capture& capture = *stream.capture;
    if (capture.invalid) return CAPTURE_INVALIDATED;
    capture.graph->nodes.push_back({std::move(work), stream.context, stream.captured, stream.capture_lane});
    stream.captured = {capture.graph->nodes.size() - 1};
    return SUCCESS;
}

int capture_wait(const std::shared_ptr<Stream>& stream, const Event& event) {
    if (!event.capture) {
        // What was recorded outside cannot be waited for inside, not even when it is done.
        if (!event.recorded) return SUCCESS;
        invalidate(*stream->capture);
        return CAPTURE_ISOLATION;
    }
    if (event.capture->ended) return CAPTURED_EVENT;
    if (event.capture->invalid) return CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != event.capture) {
        invalidate(*stream->capture);
        invalidate(*event.capture);
        return CAPTURE_MERGE;
    }
    if (stream->null()) return CAPTURE_IMPLICIT;
    if (!stream->capture) join(stream, event.capture);
    for (std::size_t node : event.captured)
        if (std::find(stream->captured.begin(), stream->captured.end(), node) == stream->captured.end())
            stream->captured.push_back(node);
    return SUCCESS;
}

void capture_record(Stream& stream, Event& event) {
    event.capture = stream.capture;
    event.captured = stream.captured;
    event.recorded = nullptr;
}

void invalidate(Capture& capture) { capture.invalid = true; }

void abandon(Capture& capture) {
    invalidate(capture);
    leave(capture);
}

int refuse_while_capturing() {
    int result = SUCCESS;
    for (const auto& capture : captures()) {
        if (!forbids(*capture)) continue;
        invalidate(*capture);
        result = CAPTURE_UNSUPPORTED;
    }
    return result;
}

int refuse_implicit_capture(const Stream& stream) {
    if (!stream.null()) return SUCCESS;
    int result = SUCCESS;
    for (const auto& capture : captures()) {
        bool waits = std::any_of(capture->members.begin(), capture->members.end(), [&](const auto& member) {
            return member->context == stream.context && member->blocking();
        });
        if (!waits) continue;
        invalidate(*capture);
        result = CAPTURE_IMPLICIT;
    }
    return result;
}

} // namespace software

using namespace software;

API cuStreamBeginCapture_v2(void* handle, int mode) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        static std::uint64_t number = 0;
        if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return INVALID_VALUE;
        if (stream->null()) return CAPTURE_UNSUPPORTED;
        if (stream->capture) return ILLEGAL_STATE;
        auto capture = std::make_shared<Capture>();
        capture->number = ++number;
        capture->graph = std::make_shared<Graph>();
        capture->origin = stream;
        capture->mode = static_cast<CaptureMode>(mode);
        capture->thread = std::this_thread::get_id();
        captures().push_back(capture);
        join(stream, capture);
        return SUCCESS;
    });
}

API cuStreamEndCapture(void* handle, void** graph) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!graph) return INVALID_VALUE;
        *graph = nullptr;
        std::shared_ptr<Capture> capture = stream->capture;
        if (!capture) return ILLEGAL_STATE;
        if (capture->origin != stream) return CAPTURE_UNMATCHED;
        if (capture->mode != CAPTURE_RELAXED && capture->thread != std::this_thread::get_id())
            return CAPTURE_WRONG_THREAD;
        bool joined = all_joined(*capture);
        leave(*capture);
        if (capture->invalid) return CAPTURE_INVALIDATED;
        if (!joined) return CAPTURE_UNJOINED;
        *graph = handles<Graph>().add(capture->graph);
        return SUCCESS;
    });
}

API cuStreamIsCapturing(void* handle, int* status) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!status) return INVALID_VALUE;
        bool invalid = stream->capture && stream->capture->invalid;
        *status = !stream->capture ? CAPTURE_NONE : invalid ? CAPTURE_STATUS_INVALIDATED : CAPTURE_ACTIVE;
        return SUCCESS;
    });
}

namespace {

// Nodes cannot be added to a graph under capture by hand, so neither the graph nor its nodes are told.
int capture_info(const char* name, void* handle, int* status, std::uint64_t* number, void** graph, std::size_t* count) {
    return on_stream(name, handle, [&](Call&, const std::shared_ptr<Stream>& stream) -> int {
        if (!status) return INVALID_VALUE;
        bool invalid = stream->capture && stream->capture->invalid;
        *status = !stream->capture ? CAPTURE_NONE : invalid ? CAPTURE_STATUS_INVALIDATED : CAPTURE_ACTIVE;
        if (number) *number = stream->capture ? stream->capture->number : 0;
        if (graph) *graph = nullptr;
        if (count) *count = stream->captured.size();
        return SUCCESS;
    });
}

} // namespace

API cuStreamGetCaptureInfo_v2(void* handle, int* status, std::uint64_t* number, void** graph, const void** nodes,
                              std::size_t* count) {
    if (nodes) *nodes = nullptr;
    return capture_info(__func__, handle, status, number, graph, count);
}

API cuStreamGetCaptureInfo_v3(void* handle, int* status, std::uint64_t* number, void** graph, const void** nodes,
                              const void** edges, std::size_t* count) {
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    return capture_info(__func__, handle, status, number, graph, count);
}

API cuThreadExchangeStreamCaptureMode(int* mode) {
    return initialised(__func__, [&](Call&) -> int {
        if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
        *mode = std::exchange(thread_mode, static_cast<CaptureMode>(*mode));
        return SUCCESS;
    });
}
