// Streams that are being captured: what would be enqueued becomes a node of a graph. Under the driver's lock.
#pragma once
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "abi.h"
#include "graphs.h"
#include "streams.h"

namespace software {

struct Capture {
    std::uint64_t number = 0;
    std::shared_ptr<Graph> graph;
    std::shared_ptr<Stream> origin;
    std::vector<std::shared_ptr<Stream>> members;
    CaptureMode mode = CAPTURE_GLOBAL;
    std::thread::id thread;
    // Something was done that cannot be captured: the graph will not be.
    bool invalid = false;
    bool ended = false;
};

// Adds a node after what the stream has captured so far. Returns a Result, as the others.
int capture_work(Stream& stream, std::shared_ptr<const Work> work);

// A wait of which the stream, the event or both are being captured.
int capture_wait(const std::shared_ptr<Stream>& stream, const Event& event);

void capture_record(Stream& stream, Event& event);

void invalidate(Capture& capture);

// Ends a capture that nobody can end in order any more.
void abandon(Capture& capture);

// For calls that could wait for, or be waited for by, what is being captured: which captures forbid them depends on
// their modes. Breaks those.
int refuse_while_capturing();

// For work in the default stream, which streams that are being captured would wait for.
int refuse_implicit_capture(const Stream& stream);

} // namespace software
