// The machine: blocks, warps, barriers, copies, and the order in which threads run.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "block_memory.h"
#include "fiber.h"
#include "launch.h"
#include "memory_fault.h"
#include "registry.h"
#include "warp_operations.h"

namespace emulator {

thread_local Thread* current = nullptr;

namespace {

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
    std::vector<Lane*> lanes;
    std::vector<Warp> warps;
};

struct Machine {
    EmulatorSettings settings{};
    std::uint64_t random = 0;
    std::uint64_t events = 0;
    std::string failure;
    bool failed = false;
    std::vector<std::unique_ptr<Lane>> lanes;
    std::vector<Lane*> idle;
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

thread_local Machine* machine = nullptr;

Lane& me() { return *reinterpret_cast<Lane*>(current); }

std::string describe(const Lane& lane) {
    char text[256];
    const Block& block = *lane.block;
    std::snprintf(text, sizeof text, "kernel %s, rank %u, block (%u, %u, %u), thread (%u, %u, %u)",
                  block.grid->kernel->name, block.grid->launch->rank, block.index.x, block.index.y, block.index.z,
                  lane.place.thread.x, lane.place.thread.y, lane.place.thread.z);
    return text;
}

void fail(const std::string& what) {
    if (!machine->failed) machine->failure = what;
    machine->failed = true;
}

// Waits until `*word` is no longer `seen`.
void wait_for(const std::uint64_t* word, std::uint64_t seen, const char* in, int line) {
    Lane& lane = me();
    lane.waits_for = word;
    lane.seen = seen;
    lane.waits_in = in;
    lane.waits_line = line;
    while (*word == seen) lane.fiber.leave(false);
    lane.waits_for = nullptr;
}

Rendezvous& meeting_of(Warp& warp, unsigned mask) {
    for (auto& meeting : warp.meetings)
        if (meeting.mask == mask) return meeting;
    warp.meetings.emplace_back();
    warp.meetings.back().mask = mask;
    return warp.meetings.back();
}

void perform(const std::vector<Copy>& group) {
    for (const Copy& copy : group) access_copy_16(copy.to, copy.from, copy.valid);
}

} // namespace

// ---- What threads ask for ----

void fault(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    Lane& lane = me();
    fail(describe(lane) + ": " + text);
    for (;;) lane.fiber.leave(true);
}

unsigned block_barrier(bool predicate, int line) {
    Lane& lane = me();
    Block& block = *lane.block;
    if (block.arrived == 0) {
        block.barrier_line = line;
        block.votes = 0;
    } else if (block.barrier_line != line) {
        fault("a divergent barrier: this thread reaches __syncthreads in line %d, others wait in line %d", line,
              block.barrier_line);
    }
    if (block.left_first)
        fault("line %d: __syncthreads, but a thread has left the kernel: %s", line,
              describe(*block.left_first).c_str());
    block.votes += predicate;
    block.arrived++;
    machine->events++;
    char* passed = &block.passed[block.generation % 2];
    publish(passed);
    if (block.arrived == block.alive) {
        block.arrived = 0;
        block.last_votes = block.votes;
        block.generation++;
    } else {
        wait_for(&block.generation, block.generation, "__syncthreads", line);
    }
    observe(passed);
    return block.last_votes;
}

const unsigned char* warp_collective(unsigned mask, Collective what, int line, const void* value, unsigned bytes) {
    Lane& lane = me();
    unsigned index = lane.place.linear % 32;
    Warp& warp = lane.block->warps[lane.place.linear / 32];
    if (!(mask >> index & 1))
        fault("line %d: %s whose mask 0x%08x lacks its own lane %u", line, name_of(what), mask, index);
    if (mask & ~warp.alive)
        fault("line %d: %s names lanes 0x%08x, which are absent or have left the kernel", line, name_of(what),
              mask & ~warp.alive);
    Rendezvous& meeting = meeting_of(warp, mask);
    if (meeting.arrived == 0) {
        meeting.what = what;
        meeting.line = line;
    } else if (meeting.what != what || meeting.line != line) {
        fault("a divergent warp: this thread reaches %s in line %d, others wait in %s in line %d", name_of(what), line,
              name_of(meeting.what), meeting.line);
    }
    if (bytes) std::memcpy(meeting.brought[index], value, bytes);
    meeting.arrived |= 1u << index;
    machine->events++;
    std::uint64_t generation = meeting.generation;
    if (what == Collective::Sync) publish(meeting.result[generation % 2]);
    if (meeting.arrived == mask) {
        complete_collective(what, line, meeting.brought, meeting.result[generation % 2]);
        meeting.arrived = 0;
        meeting.generation++;
    } else {
        wait_for(&meeting.generation, generation, name_of(what), line);
    }
    if (what == Collective::Sync) observe(meeting.result[generation % 2]);
    return meeting.result[generation % 2][0];
}

bool in_shared_memory(const void* pointer, std::size_t bytes) { return me().block->shared.holds(pointer, bytes); }

void poll() { me().fiber.leave(false); }

void progress() { machine->events++; }

void copy_async(void* destination, const void* source, bool valid) {
    auto misaligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0; };
    if (misaligned(destination) || (valid && misaligned(source)))
        fault("a copy of 16 bytes from %p to %p is not aligned", source, destination);
    Lane& lane = me();
    if (valid && lane.block->shared.holds(source, 1))
        fault("an asynchronous copy from %p, which is in shared memory: it must come from global memory", source);
    if (!lane.block->shared.holds(destination, 16))
        fault("an asynchronous copy to %p, which is not in the block's %zu bytes of shared memory", destination,
              lane.block->shared.bytes());
    unsigned copies = machine->settings.copies;
    if (copies == AT_ONCE || (copies == BY_CHANCE && machine->next_random() % 2))
        access_copy_16(destination, source, valid);
    else
        lane.copying->open.push_back({destination, source, valid});
}

void copy_commit() {
    Lane& lane = me();
    Copying& copying = *lane.copying;
    copying.groups.push_back(std::move(copying.open));
    copying.open.clear();
}

void copy_wait(unsigned pending) {
    Lane& lane = me();
    auto& groups = lane.copying->groups;
    while (groups.size() > pending) {
        perform(groups.front());
        groups.pop_front();
    }
}

namespace {

// ---- The life of a thread and of a block ----

void run_thread() {
    Lane& lane = me();
    lane.fiber.begun();
    Block& block = *lane.block;
    Grid& grid = *block.grid;
    observe(&grid.started);
    if (grid.before) observe(&grid.before->ended);
    grid.kernel->invoke(grid.kernel->body, grid.pointers.data());
    bool copying = !lane.copying->open.empty();
    for (const auto& group : lane.copying->groups) copying |= !group.empty();
    if (copying) fault("leaves the kernel with copies to shared memory under way");
    if (block.arrived) fault("leaves the kernel while others wait in __syncthreads in line %d", block.barrier_line);
    for (const auto& meeting : block.warps[lane.place.linear / 32].meetings)
        if (meeting.arrived && (meeting.mask >> lane.place.linear % 32 & 1))
            fault("leaves the kernel while lanes of its warp wait for it in %s in line %d", name_of(meeting.what),
                  meeting.line);
    lane.done = true;
    if (!block.left_first) block.left_first = &lane;
    block.alive--;
    block.warps[lane.place.linear / 32].alive &= ~(1u << lane.place.linear % 32);
    machine->events++;
    publish(&grid.ended);
    for (;;) lane.fiber.leave(true);
}

void begin(Block& block) {
    const EmulatorGrid& launch = *block.grid->launch;
    auto [x, y, z] = launch.threads;
    block.threads = block.alive = x * y * z;
    block.shared.take(launch.shared_bytes);
    block.warps.resize((block.threads + 31) / 32);
    for (unsigned at = 0; at < block.threads; at++) {
        if (machine->idle.empty()) {
            machine->lanes.push_back(std::make_unique<Lane>());
            machine->idle.push_back(machine->lanes.back().get());
        }
        Lane& lane = *machine->idle.back();
        machine->idle.pop_back();
        lane.place.thread = {at % x, at / x % y, at / x / y};
        lane.place.block = block.index;
        lane.place.block_size = {x, y, z};
        lane.place.grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
        lane.place.shared = block.shared.start();
        lane.place.linear = at;
        lane.block = &block;
        lane.done = false;
        lane.waits_for = nullptr;
        if (!lane.copying) lane.copying = std::make_unique<Copying>();
        lane.copying->open.clear();
        lane.copying->groups.clear();
        lane.fiber.prepare(run_thread);
        block.lanes.push_back(&lane);
        block.warps[at / 32].alive |= 1u << at % 32;
    }
    block.begun = true;
}

void end(Block& block) {
    for (Lane* lane : block.lanes) {
        lane->fiber.abandon();
#ifdef CONSORT_TSAN
        machine->spent.push_back(std::move(lane->copying));
#endif
        machine->idle.push_back(lane);
    }
    block.lanes.clear();
    if (block.begun && !machine->failed && !block.shared.intact())
        fail("kernel " + std::string(block.grid->kernel->name) + " wrote beyond its " +
             std::to_string(block.shared.bytes()) + " bytes of shared memory");
#ifndef CONSORT_TSAN
    // The race detector must not see the memory of one block freed, or used by another, in the eyes of which its
    // threads have not ended.
    block.shared.give_back();
#endif
}

void run_lane(Lane& lane) {
    if (lane.done || machine->failed) return;
    if (lane.waits_for && *lane.waits_for == lane.seen) return;
    current = &lane.place;
    lane.fiber.enter();
    current = nullptr;
}

// Lets every thread run once, or, with FAR_WARP, one warp after another as far as it gets without the others.
void run_round(Block& block) {
    std::size_t count = block.lanes.size();
    if (machine->settings.order == FAR_WARP) {
        std::size_t warps = block.warps.size(), first = machine->next_random() % warps;
        for (std::size_t at = 0; at < warps; at++) {
            std::size_t start = (first + at) % warps * 32, stop = std::min(start + 32, count);
            for (std::uint64_t before = ~0ull; before != machine->events && !machine->failed;) {
                before = machine->events;
                for (std::size_t lane = start; lane < stop; lane++) run_lane(*block.lanes[lane]);
            }
        }
        return;
    }
    std::size_t offset = 0, step = 1;
    if (machine->settings.order == SHUFFLED) {
        offset = machine->next_random() % count;
        do step = 1 + machine->next_random() % count;
        while (std::gcd(step, count) != 1);
    }
    for (std::size_t at = 0; at < count; at++) {
        std::size_t lane = (offset + at * step) % count;
        run_lane(*block.lanes[machine->settings.order == DESCENDING ? count - 1 - lane : lane]);
    }
}

// Rounds in which nothing happened, after which nothing is taken to happen any more: a thread that polls may need a few
// rounds to see what it waits for.
constexpr int IDLE_ROUNDS_MAX = 1000;

void report_deadlock(const std::vector<Block*>& under_way) {
    std::string text = "no thread can go on";
    std::map<std::string, const Lane*> places;
    for (const Block* block : under_way)
        for (const Lane* lane : block->lanes) {
            if (lane->done) continue;
            std::string place = lane->waits_for ? std::string(lane->waits_in) + " in line " +
                                                      std::to_string(lane->waits_line)
                                                : std::string("a loop that polls memory");
            places.emplace(place, lane);
        }
    for (const auto& [place, lane] : places) text += "\n  " + describe(*lane) + " waits in " + place;
    fail(text);
}

void end_finished(std::vector<Block*>& under_way) {
    std::erase_if(under_way, [](Block* block) {
        if (block->alive) return false;
        end(*block);
        return true;
    });
}

void run_blocks(std::vector<std::unique_ptr<Block>>& blocks) {
    std::size_t window = machine->settings.order == SHUFFLED ? 3 : 1;
    std::vector<Block*> under_way;
    std::size_t next = 0;
    int idle_rounds = 0;
    while ((next < blocks.size() || !under_way.empty()) && !machine->failed) {
        while (under_way.size() < window && next < blocks.size()) {
            begin(*blocks[next]);
            under_way.push_back(blocks[next++].get());
        }
        std::uint64_t before = machine->events;
        for (Block* block : under_way) run_round(*block);
        end_finished(under_way);
        idle_rounds = machine->events == before ? idle_rounds + 1 : 0;
        if (idle_rounds > IDLE_ROUNDS_MAX && !machine->failed) report_deadlock(under_way);
    }
    for (Block* block : under_way) end(*block);
}

// ---- Ranks that run together ----

// Threads that a rank has under way at most, as a device has room for so many: kernels whose blocks wait for each other
// must not have more.
constexpr std::size_t RESIDENT_THREADS_MAX = 8192;

// The grids of one rank, one after the other as in a stream; as many blocks of a grid are under way as there is room.
struct Stream {
    std::deque<std::deque<Block*>> waiting;
    std::deque<Block*> rest;
    std::vector<Block*> under_way;
    std::size_t resident = 0;

    bool done() const { return waiting.empty() && rest.empty() && under_way.empty(); }

    void advance() {
        if (under_way.empty() && rest.empty() && !waiting.empty()) {
            rest = std::move(waiting.front());
            waiting.pop_front();
            resident = 0;
        }
        while (!rest.empty() && (under_way.empty() || resident < RESIDENT_THREADS_MAX)) {
            Block* block = rest.front();
            rest.pop_front();
            machine->events++;
            begin(*block);
            resident += block->threads;
            under_way.push_back(block);
        }
        for (Block* block : under_way) run_round(*block);
        for (Block* block : under_way)
            if (!block->alive) resident -= block->threads;
        end_finished(under_way);
    }
};

// Ranks drift apart as far as their flags allow: with FAR_WARP one after another runs on until it needs the others,
// with SHUFFLED a rank rests in every other round, by chance.
void advance_all(std::vector<Stream>& streams) {
    std::size_t count = streams.size(), order = machine->settings.order;
    std::size_t first = order == ASCENDING ? 0 : order == DESCENDING ? count - 1 : machine->next_random() % count;
    for (std::size_t at = 0; at < count; at++) {
        Stream& stream = streams[order == DESCENDING ? first - at : (first + at) % count];
        if (order == SHUFFLED && machine->next_random() % 2) continue;
        std::uint64_t before;
        do {
            before = machine->events;
            stream.advance();
        } while (order == FAR_WARP && machine->events != before && !machine->failed);
    }
}

void run_streams(std::vector<Stream>& streams) {
    int idle_rounds = 0;
    auto all_done = [&] { return std::all_of(streams.begin(), streams.end(), [](auto& each) { return each.done(); }); };
    std::vector<Block*> under_way;
    while (!all_done() && !machine->failed) {
        std::uint64_t before = machine->events;
        advance_all(streams);
        idle_rounds = machine->events == before ? idle_rounds + 1 : 0;
        if (idle_rounds <= IDLE_ROUNDS_MAX || machine->failed) continue;
        for (Stream& each : streams) under_way.insert(under_way.end(), each.under_way.begin(), each.under_way.end());
        report_deadlock(under_way);
    }
    for (Stream& each : streams)
        for (Block* block : each.under_way) end(*block);
}

std::vector<Stream> streams_of(std::vector<Grid>& grids, const std::vector<std::unique_ptr<Block>>& blocks) {
    std::map<std::uint32_t, Stream> by_rank;
    std::map<std::uint32_t, Grid*> last;
    for (Grid& grid : grids) {
        Grid*& before = last[grid.launch->rank];
        grid.before = std::exchange(before, &grid);
        auto& waiting = by_rank[grid.launch->rank].waiting.emplace_back();
        for (const auto& block : blocks)
            if (block->grid == &grid) waiting.push_back(block.get());
    }
    std::vector<Stream> streams;
    for (auto& [rank, stream] : by_rank) streams.push_back(std::move(stream));
    return streams;
}

// ---- A launch ----

Grid grid_of(const EmulatorGrid& launch) {
    Grid grid{&launch, find_kernel(launch.kernel), {}, {}, 0, 0, nullptr};
    for (std::size_t at = 0; at < launch.argument_count; at++) {
        grid.arguments.emplace_back((launch.argument_bytes[at] + 7) / 8);
        std::memcpy(grid.arguments.back().data(), launch.arguments[at], launch.argument_bytes[at]);
    }
    for (auto& argument : grid.arguments) grid.pointers.push_back(argument.data());
    return grid;
}

void run(const EmulatorGrid* launches, std::size_t count) {
    std::vector<Grid> grids;
    for (std::size_t at = 0; at < count; at++) {
        std::string reason = refusal(launches[at]);
        if (!reason.empty())
            return fail("kernel " + std::string(launches[at].kernel) + " cannot be launched: " + reason);
        grids.push_back(grid_of(launches[at]));
    }
    std::vector<std::unique_ptr<Block>> blocks;
    for (Grid& grid : grids) {
        publish(&grid.started);
        auto [x, y, z] = grid.launch->grid;
        for (unsigned at = 0; at < x * y * z; at++) {
            blocks.push_back(std::make_unique<Block>());
            blocks.back()->grid = &grid;
            blocks.back()->index = {at % x, at / x % y, at / x / y};
        }
    }
    if (machine->settings.order == DESCENDING) std::reverse(blocks.begin(), blocks.end());
    if (machine->settings.order >= SHUFFLED)
        for (std::size_t left = blocks.size(); left > 1; left--)
            std::swap(blocks[left - 1], blocks[machine->next_random() % left]);
    if (machine->settings.together) {
        std::vector<Stream> streams = streams_of(grids, blocks);
        run_streams(streams);
    } else {
        run_blocks(blocks);
    }
    for (Grid& grid : grids) observe(&grid.ended);
    // Threads of a launch that failed have not said that they ended: what they allocated is left to the process's end.
    if (machine->failed)
        for (auto& copying : machine->spent) (void)copying.release();
    machine->spent.clear();
}

} // namespace
} // namespace emulator

int emulator_launch(const EmulatorGrid* grids, std::size_t count, const EmulatorSettings* settings, char* message,
                    std::size_t bytes) {
    using namespace emulator;
    thread_local Machine mine;
    machine = &mine;
    watch_for_memory_faults();
    mine.settings = *settings;
    mine.random = settings->seed;
    mine.failed = false;
    mine.failure.clear();
    run(grids, count);
    if (mine.failed && bytes) std::snprintf(message, bytes, "%s", mine.failure.c_str());
    return mine.failed;
}
