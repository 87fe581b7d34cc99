// What a thread of an emulated kernel asks of the machine below it, and how kernels make themselves known.
//
// The threads of a block are fibers: each runs until it must wait, then gives the processor to the next. All state
// belongs to the operating system's thread that launched, so that tests run side by side.
//
// This header is all that kernels see. The machine itself is compiled without sanitizers; what it reads or writes on a
// thread's behalf goes through `accesses.cpp`, which is compiled with them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// What a thread can see of its own place. The machine's fiber begins with it.
struct Thread {
    Index thread, block, block_size, grid_size;
    unsigned char* shared;
    unsigned linear;
};

// Constant-initialised and within the first block of thread-local storage: kernels ask for it all the time, also where
// the machine is part of a shared library.
extern constinit thread_local Thread* current __attribute__((tls_model("initial-exec")));

// Ends the launch with a message that names kernel, rank, block and thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fault(const char* format, ...);

// ---- Waiting ----

// `__syncthreads` and its voting forms: returns how many threads had a true predicate.
unsigned block_barrier(bool predicate, int line);

// The operations of a warp. Only `Sync` orders memory.
enum class Collective { Sync, Shuffle, Vote, LoadMatrices, LoadMatricesTransposed, MultiplyBf16 };

constexpr unsigned LANE_BYTES = 64;

// Every lane of `mask` leaves `bytes` of its own; returns, when all have come, what the operation makes of them:
// 32 places of LANE_BYTES, by lane.
const unsigned char* warp_collective(unsigned mask, Collective what, int line, const void* value, unsigned bytes);

// Whether `bytes` bytes at an address are in the block's dynamic shared memory.
bool in_shared_memory(const void* pointer, std::size_t bytes);

// Lets others run, because this thread polls memory.
void poll();

// Tells that memory changed for which others may poll, so that a deadlock is not seen where there is none.
void progress();

// ---- Copies from global to shared memory ----

void copy_async(void* destination, const void* source, bool valid);
void copy_commit();
void copy_wait(unsigned pending);

// ---- Kernels ----

struct Kernel {
    const char* name;
    unsigned threads_max;
    unsigned parameters;
    const unsigned* parameter_bytes;
    void (*invoke)(void (*body)(), void* const* arguments);
    void (*body)();
};

void register_kernel(const Kernel& kernel);

template <class... Parameters> struct Signature {
    static constexpr unsigned bytes[sizeof...(Parameters) + 1] = {sizeof(Parameters)..., 0};

    static void invoke(void (*body)(), void* const* arguments) {
        call(body, arguments, std::index_sequence_for<Parameters...>{});
    }

    template <std::size_t... At>
    static void call(void (*body)(), void* const* arguments, std::index_sequence<At...>) {
        (void)arguments;
        reinterpret_cast<void (*)(Parameters...)>(body)(*static_cast<Parameters*>(arguments[At])...);
    }
};

struct Registration {
    template <class... Parameters>
    Registration(const char* name, unsigned threads_max, void (*kernel)(Parameters...)) {
        using S = Signature<Parameters...>;
        register_kernel({name, threads_max, sizeof...(Parameters), S::bytes, &S::invoke,
                         reinterpret_cast<void (*)()>(kernel)});
    }
};

// ---- Accesses on a thread's behalf (accesses.cpp) ----

void access_copy_16(void* destination, const void* source, bool valid);
void access_matrix_row(std::uint16_t (&out)[8], const void* row);

} // namespace emulator
