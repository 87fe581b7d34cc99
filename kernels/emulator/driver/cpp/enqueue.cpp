// Work of the other software libraries.
#include "enqueue.h"

#include "api.h"

namespace software {

namespace {

// The operation's closure, which is dropped with the last who needs it.
struct Owned {
    explicit Owned(const SoftwareOperation& operation)
        : poll(operation.poll), closure(operation.closure), drop(operation.drop) {}
    ~Owned() {
        if (drop) drop(closure);
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;

    int (*poll)(void* closure, std::uint64_t state[4]);
    void* closure;
    void (*drop)(void* closure);
};

class PolledWork : public Work {
public:
    PolledWork(const SoftwareOperation& operation, std::shared_ptr<Owned> owned)
        : Work(operation.name ? operation.name : "unnamed work"), owned(std::move(owned)) {
        for (std::size_t at = 0; at < operation.extent_count; at++) {
            const SoftwareExtent& extent = operation.extents[at];
            if (!extent.bytes) continue;
            add(extent.writes ? declared.writes : declared.reads, {range(extent.address, extent.bytes)});
        }
    }

    std::unique_ptr<Execution> begin(Timed&) const override { return std::make_unique<Polled>(owned); }

private:
    // A call that takes longer has worked; others only look whether they can.
    static constexpr std::chrono::microseconds WAITING_MAX{50};

    struct Polled : Execution {
        explicit Polled(std::shared_ptr<Owned> owned) : owned(std::move(owned)) {}
        Outcome step() override {
            Time start = std::chrono::steady_clock::now();
            if (owned->poll(owned->closure, state) != 0) return {Outcome::Done};
            bool worked = std::chrono::steady_clock::now() - start > WAITING_MAX;
            return {worked ? Outcome::Progressed : Outcome::Blocked};
        }
        std::shared_ptr<Owned> owned;
        std::uint64_t state[4] = {};
    };

    std::shared_ptr<Owned> owned;
};

} // namespace
} // namespace software

using namespace software;

API software_driver_enqueue(void* handle, const SoftwareOperation* operation) {
    auto owned = std::make_shared<Owned>(*operation);
    auto work = std::make_shared<PolledWork>(*operation, owned);
    return on_stream(__func__, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        return enqueue(stream, work, call.hangs);
    });
}

API software_driver_current_device() {
    Lock lock(driver().mutex);
    std::shared_ptr<Context> context = current_context();
    return context ? context->device->ordinal : -1;
}

API software_driver_count_call(const char* function) {
    Call call{Lock(driver().mutex), function, nullptr};
    int result = count_call(function, call.hangs);
    if (result == STAYS) {
        call.lock.unlock();
        stay();
    }
    return result;
}

API software_driver_count_call_or_hang(const char* function, int* hangs) {
    Lock lock(driver().mutex);
    bool never_ends = false;
    int result = count_call(function, never_ends);
    if (result == STAYS) {
        lock.unlock();
        stay();
    }
    *hangs = never_ends;
    return result;
}
