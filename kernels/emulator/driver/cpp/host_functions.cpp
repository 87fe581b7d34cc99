// Functions of the program that run in a stream's order, on a thread of their own: they may take as long as they like
// without stopping other streams.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "api.h"

namespace software {

namespace {

using Function = void (*)(void*);

struct Pending {
    Function function;
    void* argument;
    std::shared_ptr<std::atomic<bool>> done;
};

// The thread and what it has to do. Never destroyed, as it never ends.
class Caller {
public:
    Caller() { std::thread([this] { call_all(); }).detach(); }

    void call(Pending pending) {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(pending));
        arrived.notify_one();
    }

private:
    void call_all() {
        for (;;) {
            Pending next = take();
            next.function(next.argument);
            *next.done = true;
            Lock lock(driver().mutex);
            driver().work.notify_one();
        }
    }

    Pending take() {
        std::unique_lock<std::mutex> lock(mutex);
        arrived.wait(lock, [&] { return !queue.empty(); });
        Pending next = std::move(queue.front());
        queue.pop_front();
        return next;
    }

    std::mutex mutex;
    std::condition_variable arrived;
    std::deque<Pending> queue;
};

Caller& caller() {
    static Caller& one = *new Caller;
    return one;
}

class HostFunction : public Work {
public:
    HostFunction(Function function, void* argument)
        : Work("a host function"), function(function), argument(argument) {}

    std::unique_ptr<Execution> begin(Timed& timed) const override {
        // The program learns from it that what comes before is done.
        host_saw(timed.moment.clock);
        return std::make_unique<Calling>(function, argument);
    }

private:
    struct Calling : Execution {
        Calling(Function function, void* argument) : pending{function, argument, nullptr} {}

        Outcome step() override {
            if (!pending.done) {
                pending.done = std::make_shared<std::atomic<bool>>(false);
                caller().call(pending);
            }
            return {*pending.done ? Outcome::Done : Outcome::Blocked};
        }

        Pending pending;
    };

    Function function;
    void* argument;
};

int enqueue_function(const char* name, void* handle, void (*function)(void*), void* argument) {
    return on_stream(name, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        if (!function) return INVALID_VALUE;
        return enqueue(stream, std::make_shared<HostFunction>(function, argument), call.hangs);
    });
}

} // namespace
} // namespace software

using namespace software;

API cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
    return enqueue_function(__func__, handle, function, argument);
}
