// What the machine is made of: threads, warps, blocks, grids. For the files of the machine alone.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "block_memory.h"
#include "fiber.h"
#include "launch.h"
#include "machine.h"
#include "registry.h"
#include "warp_operations.h"

namespace emulator {

struct Block;

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

// Asynchronous copies that a thread has started: those not committed yet, and committed groups, the oldest first.
struct Copying {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

// A thread. Its `place` comes first: `current` points to it.
struct Lane {
    Thread place;
    Block* block = nullptr;
    Fiber fiber;
    bool done = false;
    // While set, there is nothing to run before `*waits_for` differs from `seen`.
    const std::uint64_t* waits_for = nullptr;
    std::uint64_t seen = 0;
    const char* waits_in = nullptr;
    int waits_line = 0;
    std::unique_ptr<Copying> copying;
};

// One operation of the lanes of one mask. Results are kept twice, because a lane may come for the next operation before
// a slow one has read the last.
struct Rendezvous {
    unsigned mask = 0, arrived = 0;
    std::uint64_t generation = 0;
    Collective what{};
    int line = 0;
    alignas(16) unsigned char brought[32][LANE_BYTES];
    alignas(16) unsigned char result[2][32][LANE_BYTES];
};

struct Warp {
    unsigned alive = 0;
    std::deque<Rendezvous> meetings;
};

// `started` and `ended` are what the race detector orders by: the launch before each thread, each thread before the
// launch's end, and nothing between threads.
struct Grid {
    const EmulatorGrid* launch;
    const Kernel* kernel;
    std::vector<std::vector<std::uint64_t>> arguments;
    std::vector<void*> pointers;
    char started = 0, ended = 0;
    // The grid of the same rank that ends before this one begins.
    Grid* before = nullptr;
};

struct Block {
    Grid* grid;
    Index index;
    unsigned threads = 0, alive = 0;
    bool begun = false;
    std::uint64_t generation = 0;
    unsigned arrived = 0, votes = 0, last_votes = 0;
    int barrier_line = 0;
    // What the race detector orders by. Two, taken in turn: a thread that is already at the next barrier must not seem
    // to come before one that has only passed the last.
    char passed[2] = {};
    const Lane* left_first = nullptr;
    BlockMemory shared;
    std::vector<std::unique_ptr<Lane>> lanes;
    std::vector<Warp> warps;
};

struct Machine {
    EmulatorSettings settings{};
    std::uint64_t random = 0;
    std::uint64_t events = 0;
    std::string failure;
    bool failed = false;
    // Set when a thread touched memory that is not there; `failed` is, too.
    const void* touched = nullptr;
    // For the race detector, what threads of this launch have allocated: it is freed when all of them are known to have
    // ended, and used by no other thread before, since the detector knows nothing of their order.
    std::vector<std::unique_ptr<Copying>> spent;

    std::uint64_t next_random() {
        random += 0x9e3779b97f4a7c15ull;
        std::uint64_t z = random;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
};

enum Order { ASCENDING, DESCENDING, SHUFFLED, FAR_WARP };
enum Copies { LATE, AT_ONCE, BY_CHANCE };

extern constinit thread_local Machine* machine __attribute__((tls_model("initial-exec")));

inline Lane& me() { return *reinterpret_cast<Lane*>(current); }

// Who and where.
std::string describe(const Lane& lane);

// Ends the launch; the first reason counts.
void fail(const std::string& what);

// A grid with its own copies of the arguments; `launch` must outlive it.
Grid grid_of(const EmulatorGrid& launch);

// Adds the blocks of a grid in the order of their indices.
void add_blocks(Grid& grid, std::vector<std::unique_ptr<Block>>& blocks);

// Brings blocks into the order that the settings ask for.
void put_in_order(std::vector<std::unique_ptr<Block>>& blocks);

// To be called when all threads of the grids have ended.
void forget_spent();

// ---- blocks.cpp ----

void begin(Block& block);
void end(Block& block);
// Ends, and removes, those whose threads have all left.
void end_finished(std::vector<Block*>& under_way);
// Lets every thread run once, or, with FAR_WARP, one warp after another as far as it gets without the others.
void run_round(Block& block);
void report_deadlock(const std::vector<Block*>& under_way);
// Whether a thread could go on if memory changed.
bool somebody_polls(const std::vector<Block*>& under_way);
// Keeps only so many idle stacks for the next launch.
void give_back_lanes();

// Threads that a rank has under way at most, as a device has room for so many: kernels whose blocks wait for each other
// must not have more.
constexpr std::size_t RESIDENT_THREADS_MAX = 4096;

// ---- streams.cpp ----

// Blocks one after the other, or a few at once.
void run_blocks(const std::vector<std::unique_ptr<Block>>& blocks);
// Ranks side by side, the grids of each one after the other.
void run_streams(std::vector<Grid>& grids, const std::vector<std::unique_ptr<Block>>& blocks);

} // namespace emulator
