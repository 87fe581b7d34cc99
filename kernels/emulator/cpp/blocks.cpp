// The life of a thread and of a block, and the order in which a block's threads run.
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>

#include "state.h"

namespace emulator {

namespace {

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

void run_lane(Lane& lane) {
    if (lane.done || machine->failed) return;
    if (lane.waits_for && *lane.waits_for == lane.seen) return;
    current = &lane.place;
    lane.fiber.enter();
    current = nullptr;
}

// Threads of no block, with their stacks.
thread_local std::vector<std::unique_ptr<Lane>> idle_lanes;

std::unique_ptr<Lane> take_lane() {
    if (idle_lanes.empty()) return std::make_unique<Lane>();
    std::unique_ptr<Lane> lane = std::move(idle_lanes.back());
    idle_lanes.pop_back();
    return lane;
}

// Threads whose stacks are kept for the next launch. Linux allows a process some 65,000 mappings; a stack takes two.
// The race detector never gives back what it has taken for a thread, so there none ends before the process.
#ifdef CONSORT_TSAN
constexpr std::size_t LANES_KEPT = SIZE_MAX;
#else
constexpr std::size_t LANES_KEPT = 1024;
#endif

} // namespace

void begin(Block& block) {
    const EmulatorGrid& launch = *block.grid->launch;
    auto [x, y, z] = launch.threads;
    block.threads = block.alive = x * y * z;
    block.shared.take(launch.shared_bytes);
    block.warps.resize((block.threads + 31) / 32);
    for (unsigned at = 0; at < block.threads; at++) {
        Lane& lane = *block.lanes.emplace_back(take_lane());
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
        block.warps[at / 32].alive |= 1u << at % 32;
    }
    block.begun = true;
}

void end(Block& block) {
    for (std::unique_ptr<Lane>& lane : block.lanes) {
        lane->fiber.abandon();
#ifdef CONSORT_TSAN
        machine->spent.push_back(std::move(lane->copying));
#endif
        idle_lanes.push_back(std::move(lane));
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

void report_deadlock(const std::vector<Block*>& under_way) {
    std::string text = "no thread can go on";
    std::map<std::string, const Lane*> places;
    for (const Block* block : under_way)
        for (const auto& lane : block->lanes) {
            if (lane->done) continue;
            std::string place = lane->waits_for ? std::string(lane->waits_in) + " in line " +
                                                      std::to_string(lane->waits_line)
                                                : std::string("a loop that polls memory");
            places.emplace(place, lane.get());
        }
    for (const auto& [place, lane] : places) text += "\n  " + describe(*lane) + " waits in " + place;
    fail(text);
}

bool somebody_polls(const std::vector<Block*>& under_way) {
    for (const Block* block : under_way)
        for (const auto& lane : block->lanes)
            if (!lane->done && (!lane->waits_for || *lane->waits_for != lane->seen)) return true;
    return false;
}

void end_finished(std::vector<Block*>& under_way) {
    std::erase_if(under_way, [](Block* block) {
        if (block->alive) return false;
        end(*block);
        return true;
    });
}

void give_back_lanes() {
    if (idle_lanes.size() > LANES_KEPT) idle_lanes.resize(LANES_KEPT);
}

} // namespace emulator
