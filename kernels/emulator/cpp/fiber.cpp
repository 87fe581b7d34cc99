#include "fiber.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if !defined(__x86_64__) || defined(CONSORT_PORTABLE_FIBERS)
#define PORTABLE 1
#include <ucontext.h>
#endif

extern "C" {
void emulator_switch(void** save, void* load);
#ifdef CONSORT_ASAN
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* bytes);
void __asan_unpoison_memory_region(const volatile void* address, std::size_t bytes);
#endif
#ifdef CONSORT_TSAN
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
#endif
}

namespace emulator {

constexpr std::size_t GUARD_BYTES = 4096;

void publish(void* address) {
#ifdef CONSORT_TSAN
    __tsan_release(address);
#endif
    (void)address;
}

void observe(void* address) {
#ifdef CONSORT_TSAN
    __tsan_acquire(address);
#endif
    (void)address;
}

Fiber::~Fiber() {
    abandon();
    if (stack) munmap(stack - GUARD_BYTES, STACK_BYTES + GUARD_BYTES);
#ifdef PORTABLE
    delete static_cast<ucontext_t*>(context);
    delete static_cast<ucontext_t*>(caller_context);
#endif
}

void Fiber::prepare(void (*entry)()) {
#ifdef CONSORT_TSAN
    // For the race detector, a stack of its own: it knows nothing of the order in which two threads used one.
    if (stack) munmap(stack - GUARD_BYTES, STACK_BYTES + GUARD_BYTES);
    stack = nullptr;
#endif
    if (!stack) {
        void* memory = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
            std::perror("emulator: no memory for a thread's stack (Linux: is vm.max_map_count reached?)");
            std::abort();
        }
        stack = static_cast<char*>(memory) + GUARD_BYTES;
    }
    abandon();
#ifdef PORTABLE
    if (!context) context = new ucontext_t, caller_context = new ucontext_t;
    auto* begin = static_cast<ucontext_t*>(context);
    getcontext(begin);
    begin->uc_stack = {stack, 0, STACK_BYTES};
    begin->uc_link = nullptr;
    makecontext(begin, entry, 0);
#else
    // As if `entry` had been called: an address to return to, six registers.
    auto** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    stack_pointer = top;
#endif
#ifdef CONSORT_TSAN
    race_fiber = __tsan_create_fiber(0);
#endif
}

void Fiber::enter() {
#ifdef CONSORT_TSAN
    constexpr unsigned NO_SYNC = 1;
    caller_race_fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(race_fiber, NO_SYNC);
#endif
#ifdef CONSORT_ASAN
    __sanitizer_start_switch_fiber(&caller_fake_stack, stack, STACK_BYTES);
#endif
#ifdef PORTABLE
    swapcontext(static_cast<ucontext_t*>(caller_context), static_cast<ucontext_t*>(context));
#else
    emulator_switch(&caller_stack_pointer, stack_pointer);
#endif
#ifdef CONSORT_ASAN
    __sanitizer_finish_switch_fiber(caller_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::begun() {
#ifdef CONSORT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &caller_stack, &caller_stack_bytes);
#endif
}

void Fiber::leave(bool for_good) {
    (void)for_good;
#ifdef CONSORT_TSAN
    constexpr unsigned NO_SYNC = 1;
    __tsan_switch_to_fiber(caller_race_fiber, NO_SYNC);
#endif
#ifdef CONSORT_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack, caller_stack, caller_stack_bytes);
#endif
#ifdef PORTABLE
    swapcontext(static_cast<ucontext_t*>(context), static_cast<ucontext_t*>(caller_context));
#else
    emulator_switch(&stack_pointer, caller_stack_pointer);
#endif
#ifdef CONSORT_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, &caller_stack, &caller_stack_bytes);
#endif
}

void Fiber::abandon() {
#ifdef CONSORT_ASAN
    if (stack) __asan_unpoison_memory_region(stack, STACK_BYTES);
#endif
#ifdef CONSORT_TSAN
    if (race_fiber) __tsan_destroy_fiber(race_fiber);
    race_fiber = nullptr;
#endif
}

} // namespace emulator
