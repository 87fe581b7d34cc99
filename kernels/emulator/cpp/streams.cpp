// Which blocks are under way: those of one grid, or those of several ranks side by side.
#include <algorithm>
#include <map>
#include <utility>

#include "state.h"

namespace emulator {

namespace {

// Rounds in which nothing happened, after which nothing is taken to happen any more: a thread that polls may need a few
// rounds to see what it waits for.
constexpr int IDLE_ROUNDS_MAX = 1000;

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

} // namespace

void run_blocks(const std::vector<std::unique_ptr<Block>>& blocks) {
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

void run_streams(std::vector<Grid>& grids, const std::vector<std::unique_ptr<Block>>& blocks) {
    std::vector<Stream> streams = streams_of(grids, blocks);
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

} // namespace emulator
