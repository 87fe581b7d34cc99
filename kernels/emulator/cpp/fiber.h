// Fibers: stacks that are switched by hand. On x86-64 a few instructions, elsewhere `swapcontext`.
#pragma once
#include <cstddef>

namespace emulator {

// Below a stack lies a page that nobody may touch.
#if defined(CONSORT_ASAN) || defined(CONSORT_TSAN)
constexpr std::size_t STACK_BYTES = 512 << 10;
#else
constexpr std::size_t STACK_BYTES = 128 << 10;
#endif

// A stack and where it stopped. What the sanitizers must know of it stays in here.
class Fiber {
public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber();

    // Prepares to call `entry` at the first `enter`; `entry` never returns but leaves for good.
    void prepare(void (*entry)());

    // From the launching thread: runs the fiber until it leaves.
    void enter();

    // From the fiber: back to whoever entered it. `for_good`: it will not be entered again.
    void leave(bool for_good);

    // The first thing that `entry` does.
    void begun();

    // Forgets whatever the fiber was doing.
    void abandon();

private:
    void* stack_pointer = nullptr;
    void* caller_stack_pointer = nullptr;
    char* stack = nullptr;
    void* context = nullptr;
    void* caller_context = nullptr;
    void* fake_stack = nullptr;
    void* caller_fake_stack = nullptr;
    const void* caller_stack = nullptr;
    std::size_t caller_stack_bytes = 0;
    void* race_fiber = nullptr;
    void* caller_race_fiber = nullptr;
};

// For the race detector: what came before `publish` on an address is seen after `observe` on it.
void publish(void* address);
void observe(void* address);

} // namespace emulator
