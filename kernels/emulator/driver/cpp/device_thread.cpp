#include "device_thread.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "report.h"
#include "settings.h"
#include "streams.h"

namespace software {

namespace {

using std::chrono::microseconds;

// Pauses while all that is under way waits for something outside: another process, the host. A device polls all the
// time; here that would take the processor from those who are waited for.
constexpr microseconds PAUSE_MIN(20), PAUSE_MAX(500);

// Steps after which work that goes on gives way to other work: it may be a loop that only looks busy.
constexpr std::uint64_t STEPS_IN_A_ROW = 64;

using Streams = std::vector<std::shared_ptr<Stream>>;

Time now() { return std::chrono::steady_clock::now(); }

bool ready(const Operation& operation) {
    return !operation.hangs && !operation.blocked &&
           std::all_of(operation.after.begin(), operation.after.end(), [](const auto& each) { return each->done; });
}

bool wanted(const Operation& operation, Time time) { return operation.demanded || operation.due <= time; }

std::uint64_t next_random() {
    static std::uint64_t state = settings().seed;
    state += 0x9e3779b97f4a7c15ull;
    std::uint64_t z = state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// The stream whose first operation runs next. Eager: the oldest. Lazy: the youngest, which the program expects least.
std::shared_ptr<Stream> choose(const Streams& candidates) {
    if (candidates.empty()) return nullptr;
    if (settings().order == Order::Random) return candidates[next_random() % candidates.size()];
    bool lazy = settings().order == Order::Lazy;
    return *std::min_element(candidates.begin(), candidates.end(), [&](const auto& one, const auto& other) {
        const Operation &a = *one->queue.front(), &b = *other->queue.front();
        std::uint64_t turn_a = a.steps / STEPS_IN_A_ROW, turn_b = b.steps / STEPS_IN_A_ROW;
        if (turn_a != turn_b) return turn_a < turn_b;
        return lazy ? a.number > b.number : a.number < b.number;
    });
}

// Streams of which the first operation could run: that somebody wants, or any.
Streams candidates(bool any) {
    Streams found;
    Time time = now();
    for (const auto& stream : streams())
        if (!stream->queue.empty() && ready(*stream->queue.front()) && (any || wanted(*stream->queue.front(), time)))
            found.push_back(stream);
    return found;
}

bool unblock() {
    bool some = false;
    for (const auto& stream : streams())
        if (!stream->queue.empty()) some |= std::exchange(stream->queue.front()->blocked, false);
    return some;
}

bool some_blocked() {
    return std::any_of(streams().begin(), streams().end(), [](const auto& stream) {
        return !stream->queue.empty() && stream->queue.front()->blocked;
    });
}

void end_first(Stream& stream, const Clock& clock) {
    std::unique_ptr<Operation> operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.clock.merge(clock);
    operation->completion->clock = stream.clock;
    operation->completion->time = now();
    operation->completion->done = true;
    operation->completion->stream.reset();
    driver().done.notify_all();
}

// What is ordered before the first operation of a stream.
Clock before_first(const Stream& stream) {
    Clock clock = stream.clock;
    const Operation& operation = *stream.queue.front();
    clock.merge(operation.host);
    for (const auto& each : operation.after) clock.merge(each->clock);
    return clock;
}

// One step of the first operation. The lock is released while work is executed: callers may add to the stream
// meanwhile, and nobody else takes from it.
void advance(Lock& lock, const std::shared_ptr<Stream>& stream) {
    Operation& first = *stream->queue.front();
    if (!first.work) return end_first(*stream, before_first(*stream));
    if (!first.run)
        first.run = std::make_unique<Run>(first.work, *stream, *stream->context, before_first(*stream), stream->line,
                                          name_of(*stream));
    first.steps++;
    lock.unlock();
    Outcome outcome = first.run->step();
    lock.lock();
    switch (outcome.step) {
    case Outcome::Done:
        end_first(*stream, first.run->clock());
        unblock();
        break;
    case Outcome::Progressed: break;
    case Outcome::Blocked: first.blocked = true; break;
    case Outcome::Failed:
        device_fault(name_of(*stream) + ": " + outcome.message, outcome.result);
        make_sticky(*stream->context, outcome.result);
        break;
    }
}

// Work of contexts that have failed or are being destroyed ends here, whatever it was doing.
void drop_failed() {
    for (const auto& stream : streams()) {
        if (!stream->context->sticky && !stream->context->destroyed) continue;
        while (!stream->queue.empty()) end_first(*stream, Clock());
    }
    std::erase_if(streams(), [](const auto& stream) { return stream->closed && stream->queue.empty(); });
}

// Waits until there may be something to do: for news, or until the lag of something is over.
void rest(Lock& lock, microseconds pause) {
    if (some_blocked()) {
        driver().work.wait_for(lock, pause);
        unblock();
        return;
    }
    Time next = Time::max();
    for (const auto& stream : streams())
        if (!stream->queue.empty() && ready(*stream->queue.front()))
            next = std::min(next, stream->queue.front()->due);
    if (next == Time::max())
        driver().work.wait(lock);
    else
        driver().work.wait_until(lock, next);
}

void execute_everything() {
    Lock lock(driver().mutex);
    microseconds pause = PAUSE_MIN;
    for (;;) {
        drop_failed();
        std::shared_ptr<Stream> next = driver().ending ? nullptr : choose(candidates(false));
        // What is wanted waits for something: as a device would, let everything else go on.
        if (!next && !driver().ending && some_blocked()) next = choose(candidates(true));
        if (!next) {
            rest(lock, pause);
            pause = std::min(pause * 2, PAUSE_MAX);
            continue;
        }
        advance(lock, next);
        if (next->queue.empty() || !next->queue.front()->blocked) pause = PAUSE_MIN;
    }
}

} // namespace

void start_device_thread() { std::thread(execute_everything).detach(); }

} // namespace software
