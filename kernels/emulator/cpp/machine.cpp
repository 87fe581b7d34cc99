// A launch: grids are taken apart into blocks, which are run.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "memory_fault.h"
#include "state.h"

namespace emulator {

constinit thread_local Thread* current = nullptr;
constinit thread_local Machine* machine = nullptr;

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

Grid grid_of(const EmulatorGrid& launch) {
    Grid grid{&launch, find_kernel(launch.kernel), {}, {}, 0, 0, nullptr};
    for (std::size_t at = 0; at < launch.argument_count; at++) {
        grid.arguments.emplace_back((launch.argument_bytes[at] + 7) / 8);
        std::memcpy(grid.arguments.back().data(), launch.arguments[at], launch.argument_bytes[at]);
    }
    for (auto& argument : grid.arguments) grid.pointers.push_back(argument.data());
    return grid;
}

void add_blocks(Grid& grid, std::vector<std::unique_ptr<Block>>& blocks) {
    auto [x, y, z] = grid.launch->grid;
    for (unsigned at = 0; at < x * y * z; at++) {
        blocks.push_back(std::make_unique<Block>());
        blocks.back()->grid = &grid;
        blocks.back()->index = {at % x, at / x % y, at / x / y};
    }
}

void put_in_order(std::vector<std::unique_ptr<Block>>& blocks) {
    if (machine->settings.order == DESCENDING) std::reverse(blocks.begin(), blocks.end());
    if (machine->settings.order >= SHUFFLED)
        for (std::size_t left = blocks.size(); left > 1; left--)
            std::swap(blocks[left - 1], blocks[machine->next_random() % left]);
}

// Threads of a launch that failed have not said that they ended: what they allocated is left to the process's end.
void forget_spent() {
    if (machine->failed)
        for (auto& copying : machine->spent) (void)copying.release();
    machine->spent.clear();
}

namespace {

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
        add_blocks(grid, blocks);
    }
    put_in_order(blocks);
    if (machine->settings.together) {
        run_streams(grids, blocks);
    } else {
        run_blocks(blocks);
    }
    for (Grid& grid : grids) observe(&grid.ended);
    forget_spent();
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
    give_back_lanes();
    if (mine.failed && bytes) std::snprintf(message, bytes, "%s", mine.failure.c_str());
    return mine.failed;
}
