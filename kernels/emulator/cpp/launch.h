// The interface to the host, in C: what the Rust side mirrors.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct EmulatorGrid {
    const char* kernel;
    std::uint32_t grid[3];
    std::uint32_t threads[3];
    std::uint32_t rank;
    std::size_t shared_bytes;
    void* const* arguments;
    const std::uint32_t* argument_bytes;
    std::size_t argument_count;
};

// The order in which a block's threads run: 0 ascending, 1 descending, 2 shuffled, 3 one warp as far as it goes.
// When a copy happens: 0 as late as legal, 1 at once, 2 by chance.
struct EmulatorSettings {
    std::uint32_t order;
    std::uint32_t copies;
    std::uint64_t seed;
    // Whether all ranks are under way at the same time, as they must be when they wait for each other. The grids of one
    // rank follow one another.
    std::uint32_t together;
};

// Runs the grids to their end. Returns 0, or 1 with a message in `message` (zero-terminated, cut to `bytes`).
int emulator_launch(const EmulatorGrid* grids, std::size_t count, const EmulatorSettings* settings, char* message,
                    std::size_t bytes);

// ---- A grid run bit by bit ----
//
// Several may be open at once on one thread of the operating system, which is the one that opened them. A grid whose
// threads wait for memory to change does not end the launch: it is blocked, and may be advanced again when others have
// run.

struct EmulatorOpenGrid;

enum EmulatorProgress {
    EMULATOR_DONE,
    EMULATOR_PROGRESSED,
    // Nothing happened although threads are left: they poll memory.
    EMULATOR_BLOCKED,
    EMULATOR_FAULT,
    // A fault because a thread touched memory that is not there.
    EMULATOR_MEMORY_FAULT,
};

// Copies name and arguments. Null, with a message, where no device would take the launch. `together` has no meaning
// here: a block begins as soon as those before it have ended or wait for memory to change.
EmulatorOpenGrid* emulator_open(const EmulatorGrid* grid, const EmulatorSettings* settings, char* message,
                                std::size_t bytes);

// Lets every thread that is under way run once. Returns one of EmulatorProgress, with a message for a fault.
int emulator_advance(EmulatorOpenGrid* open, char* message, std::size_t bytes);

// The address of a memory fault.
const void* emulator_touched(const EmulatorOpenGrid* open);

// Ends the grid, wherever it is.
void emulator_close(EmulatorOpenGrid* open);

// The kernels compiled in: name and parameters of the `at`-th; 0 when there are no more.
int emulator_kernel(std::size_t at, const char** name, const std::uint32_t** parameter_bytes, std::uint32_t* parameters,
                    std::uint32_t* threads_max);
}
