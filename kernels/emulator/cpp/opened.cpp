// A grid run bit by bit, so that several can be open at once on one thread of the operating system.
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "memory_fault.h"
#include "state.h"

struct EmulatorOpenGrid {
    emulator::Machine machine;
    std::string kernel;
    EmulatorGrid launch;
    std::unique_ptr<emulator::Grid> grid;
    std::vector<std::unique_ptr<emulator::Block>> blocks;
    std::deque<emulator::Block*> waiting;
    std::vector<emulator::Block*> under_way;
};

namespace emulator {

namespace {

// What the machine's functions work on while one of the grids is advanced.
class Entered {
public:
    explicit Entered(Machine& entered) : before(machine) { machine = &entered; }
    ~Entered() { machine = before; }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

private:
    Machine* before;
};

bool has_room(const EmulatorOpenGrid& open, const Block& block) {
    const std::uint32_t* threads = block.grid->launch->threads;
    std::size_t resident = std::size_t(threads[0]) * threads[1] * threads[2];
    for (const Block* other : open.under_way) resident += other->threads;
    return open.under_way.empty() || resident <= RESIDENT_THREADS_MAX;
}

// Whether one more block has begun.
bool begin_one(EmulatorOpenGrid& open) {
    if (open.waiting.empty() || !has_room(open, *open.waiting.front())) return false;
    Block* block = open.waiting.front();
    open.waiting.pop_front();
    begin(*block);
    open.under_way.push_back(block);
    return true;
}

EmulatorProgress advance(EmulatorOpenGrid& open) {
    std::size_t window = open.machine.settings.order == SHUFFLED ? 3 : 1;
    while (open.under_way.size() < window && begin_one(open)) continue;
    std::uint64_t before = open.machine.events;
    for (Block* block : open.under_way) run_round(*block);
    if (!open.machine.failed) end_finished(open.under_way);
    if (!open.machine.failed && open.under_way.empty() && open.waiting.empty()) return EMULATOR_DONE;
    // Those under way may wait for one that has not begun.
    if (!open.machine.failed && open.machine.events == before && !begin_one(open)) {
        if (somebody_polls(open.under_way)) return EMULATOR_BLOCKED;
        report_deadlock(open.under_way);
    }
    if (!open.machine.failed) return EMULATOR_PROGRESSED;
    return open.machine.touched ? EMULATOR_MEMORY_FAULT : EMULATOR_FAULT;
}

void tell(const std::string& what, char* message, std::size_t bytes) {
    if (bytes) std::snprintf(message, bytes, "%s", what.c_str());
}

} // namespace
} // namespace emulator

EmulatorOpenGrid* emulator_open(const EmulatorGrid* grid, const EmulatorSettings* settings, char* message,
                                std::size_t bytes) {
    using namespace emulator;
    std::string reason = refusal(*grid);
    if (!reason.empty()) {
        tell("kernel " + std::string(grid->kernel) + " cannot be launched: " + reason, message, bytes);
        return nullptr;
    }
    watch_for_memory_faults();
    auto open = std::make_unique<EmulatorOpenGrid>();
    open->machine.settings = *settings;
    open->machine.random = settings->seed;
    open->kernel = grid->kernel;
    open->launch = *grid;
    open->launch.kernel = open->kernel.c_str();
    open->grid = std::make_unique<Grid>(grid_of(open->launch));
    Entered entered(open->machine);
    publish(&open->grid->started);
    add_blocks(*open->grid, open->blocks);
    put_in_order(open->blocks);
    for (const auto& block : open->blocks) open->waiting.push_back(block.get());
    return open.release();
}

int emulator_advance(EmulatorOpenGrid* open, char* message, std::size_t bytes) {
    emulator::Entered entered(open->machine);
    EmulatorProgress progress = emulator::advance(*open);
    if (open->machine.failed) emulator::tell(open->machine.failure, message, bytes);
    return progress;
}

const void* emulator_touched(const EmulatorOpenGrid* open) { return open->machine.touched; }

void emulator_close(EmulatorOpenGrid* open) {
    using namespace emulator;
    std::unique_ptr<EmulatorOpenGrid> closed(open);
    Entered entered(open->machine);
    // What was left in the middle is no overrun.
    bool whole = open->under_way.empty() && open->waiting.empty();
    if (!whole) fail("closed");
    for (Block* block : open->under_way) end(*block);
    observe(&open->grid->ended);
    forget_spent();
    give_back_lanes();
}
