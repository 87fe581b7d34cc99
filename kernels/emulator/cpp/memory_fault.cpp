#include "memory_fault.h"

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>

#include "state.h"

namespace emulator {

#if defined(__x86_64__) && !defined(CONSORT_ASAN) && !defined(CONSORT_TSAN)

namespace {

struct sigaction before_segv, before_bus;
[[noreturn]] void report() { fault("touches %p, where no memory of this kernel is", machine->touched); }

// Not a kernel's: whoever was there before decides, or the signal comes again and ends the process. This handler stays
// where the other is one of its kind, because a program may hold two emulators.
void pass_on(int signal, siginfo_t* info, void* raw) {
    const struct sigaction& before = signal == SIGSEGV ? before_segv : before_bus;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, info, raw);
    else
        sigaction(signal, &before, nullptr);
}

// The thread goes on in `report`, on its own stack: the handler itself could not switch fibers.
void handle(int signal, siginfo_t* info, void* raw) {
    auto* context = static_cast<ucontext_t*>(raw);
    if (!current) {
        pass_on(signal, info, raw);
        return;
    }
    machine->touched = info->si_addr;
    auto& registers = context->uc_mcontext.gregs;
    constexpr std::int64_t RED_ZONE = 128;
    registers[REG_RSP] = ((registers[REG_RSP] - RED_ZONE) & ~std::int64_t(15)) - 8;
    registers[REG_RIP] = reinterpret_cast<std::int64_t>(&report);
}

// The handler needs a stack of its own where a fiber's has overflowed.
struct SignalStack {
    void* memory = nullptr;
    static constexpr std::size_t BYTES = 64 << 10;

    SignalStack() {
        stack_t present{};
        if (sigaltstack(nullptr, &present) == 0 && !(present.ss_flags & SS_DISABLE)) return;
        memory = std::malloc(BYTES);
        stack_t mine{};
        mine.ss_sp = memory;
        mine.ss_size = BYTES;
        if (memory) sigaltstack(&mine, nullptr);
    }

    ~SignalStack() {
        if (!memory) return;
        stack_t none{};
        none.ss_flags = SS_DISABLE;
        sigaltstack(&none, nullptr);
        std::free(memory);
    }
};

} // namespace

void watch_for_memory_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before_segv);
        sigaction(SIGBUS, &action, &before_bus);
    });
    thread_local SignalStack stack;
    (void)stack;
}

#else

// Sanitizers report such accesses themselves; on other processors the process ends with the signal.
void watch_for_memory_faults() {}

#endif

} // namespace emulator
