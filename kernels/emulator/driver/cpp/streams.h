// Streams: work in order. Events: places in a stream that others wait for.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "contexts.h"
#include "driver.h"
#include "run.h"
#include "work.h"

namespace software {

struct Capture;
struct Stream;
using Time = std::chrono::steady_clock::time_point;

// The end of one operation, which others wait for.
struct Completion {
    bool done = false;
    // What is ordered before whoever waited for it; set when done.
    Clock clock;
    Time time;
    // Where it is to be reached; null once it is done.
    std::weak_ptr<Stream> stream;
};

struct Operation {
    std::uint64_t number = 0;
    // Null where there is nothing to do but to wait or to be waited for.
    std::shared_ptr<const Work> work;
    std::vector<std::shared_ptr<Completion>> after;
    std::shared_ptr<Completion> completion;
    // What the host had seen when it enqueued this.
    Clock host;
    std::unique_ptr<Run> run;
    // Since when it may run although nobody waits for it.
    Time due;
    bool demanded = false, hangs = false, blocked = false;
    // How often it was stepped: what goes on and on gives way to others.
    std::uint64_t steps = 0;
};

struct Stream {
    std::uint64_t number = 0;
    std::shared_ptr<Context> context;
    unsigned flags = 0;
    int priority = 0;
    std::deque<std::unique_ptr<Operation>> queue;
    // What is ordered before whatever begins next, and the stream's own line of time.
    Clock clock;
    std::size_t line = 0;
    // The lines of graphs that run in it, by the stream that they were captured from.
    std::vector<std::size_t> graph_lines;
    // The end of what was enqueued last; null where nothing was.
    std::shared_ptr<Completion> last;
    std::shared_ptr<Capture> capture;
    // Nodes that whatever is captured next comes after.
    std::vector<std::size_t> captured;
    // Its place among the streams of the capture.
    std::size_t capture_lane = 0;

    // Destroyed by the program; what is in it is still done.
    bool closed = false;

    bool null() const { return context->null_stream.get() == this; }
    bool blocking() const { return null() || !(flags & STREAM_NON_BLOCKING); }
};

struct Event {
    unsigned flags = 0;
    std::shared_ptr<Context> context;
    // What was recorded last; null where nothing was.
    std::shared_ptr<Completion> recorded;
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> captured;
};

// Every function here is called under the driver's lock.

// For messages.
std::string name_of(const Stream& stream);

// All streams, those of handles and the default ones, and destroyed ones with something left in them.
std::vector<std::shared_ptr<Stream>>& streams();

std::shared_ptr<Stream> new_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority);

// Puts work at the end of a stream, or into the graph that it is being captured into. Returns a Result.
int enqueue(const std::shared_ptr<Stream>& stream, std::shared_ptr<const Work> work, bool hangs);

// Puts a wait at its end.
void enqueue_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Completion>& completion);

// A place at its end.
std::shared_ptr<Completion> enqueue_record(const std::shared_ptr<Stream>& stream);

// Has everything run that a completion needs.
void demand(const std::shared_ptr<Completion>& completion);

// The host waits until it is done, or the context has failed; returns a Result.
int wait_for(Lock& lock, Context& context, const std::shared_ptr<Completion>& completion);

// Waits until the device's thread has dropped what a context that has failed had enqueued.
void await_end_of_failed(Lock& lock, const Context& context);

// What the host knows to have happened. `host_saw` tells that it has seen what comes before a clock.
const Clock& host_clock();
void host_saw(const Clock& clock);

// What is ordered before everything that has not ended yet or has not been enqueued yet.
Clock settled();

// Names of what touches memory without the host having seen its end; empty where nothing does.
std::string in_flight(const Range& range);

} // namespace software
