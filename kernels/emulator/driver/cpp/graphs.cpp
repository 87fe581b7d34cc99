#include "graphs.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "api.h"
#include "capture.h"
#include "run.h"
#include "settings.h"

namespace software {

namespace {

class GraphExecution : public Execution {
public:
    GraphExecution(std::shared_ptr<const Graph> launched, Timed& timed)
        : graph(std::move(launched)), timed(timed), start(timed.moment.clock), runs(graph->nodes.size()),
          done(graph->nodes.size()) {
        auto& lines = timed.stream->graph_lines;
        while (lines.size() < graph->lanes) lines.push_back(new_line());
    }

    // One node goes on by one step. Of those that could, it is the one that a program expects least, which may be the
    // one captured last. The whole takes at least as long as the settings say: the device does, not who launched it.
    Outcome step() override {
        bool left = false;
        for (std::size_t node : in_order()) {
            if (done[node]) continue;
            left = true;
            if (!ready(node)) continue;
            Outcome outcome = run(node).step();
            if (outcome.step == Outcome::Blocked) continue;
            if (outcome.step == Outcome::Failed) return outcome;
            if (outcome.step == Outcome::Done) end(node);
            return {Outcome::Progressed};
        }
        // Other devices go on meanwhile.
        bool early = std::chrono::steady_clock::now() < began + std::chrono::milliseconds(settings().graph_ms);
        return {left || early ? Outcome::Blocked : Outcome::Done};
    }

private:
    std::vector<std::size_t> in_order() {
        std::vector<std::size_t> order(graph->nodes.size());
        for (std::size_t at = 0; at < order.size(); at++) order[at] = at;
        if (settings().order == Order::Lazy) std::reverse(order.begin(), order.end());
        if (settings().order == Order::Random) {
            chance = chance * 6364136223846793005ull + settings().seed * 2 + 1;
            if (!order.empty()) std::rotate(order.begin(), order.begin() + (chance >> 33) % order.size(), order.end());
        }
        return order;
    }

    bool ready(std::size_t node) const {
        const auto& after = graph->nodes[node].after;
        return std::all_of(after.begin(), after.end(), [&](std::size_t other) { return done[other]; });
    }

    Run& run(std::size_t node) {
        if (runs[node]) return *runs[node];
        const Node& made = graph->nodes[node];
        Clock before = start;
        for (std::size_t other : made.after) before.merge(clocks[other]);
        std::size_t line = timed.stream->graph_lines[made.lane];
        std::string place = "node " + std::to_string(node) + " of a graph in " + name_of(*timed.stream);
        runs[node] = std::make_unique<Run>(made.work, *timed.stream, *made.context, before, line, place);
        return *runs[node];
    }

    void end(std::size_t node) {
        done[node] = true;
        if (clocks.size() < runs.size()) clocks.resize(runs.size());
        clocks[node] = runs[node]->clock();
        timed.moment.clock.merge(clocks[node]);
        runs[node] = nullptr;
    }

    std::shared_ptr<const Graph> graph;
    Timed& timed;
    const Clock start;
    const std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
    std::vector<std::unique_ptr<Run>> runs;
    std::vector<Clock> clocks;
    std::vector<bool> done;
    std::uint64_t chance = 1;
};

class GraphWork : public Work {
public:
    explicit GraphWork(std::shared_ptr<const Graph> graph)
        : Work("a graph of " + std::to_string(graph->nodes.size()) + " nodes"), graph(std::move(graph)) {}

    std::unique_ptr<Execution> begin(Timed& timed) const override {
        return std::make_unique<GraphExecution>(graph, timed);
    }

    std::vector<Address> pointers() const override {
        std::vector<Address> all;
        for (const Node& node : graph->nodes) {
            std::vector<Address> given = node.work->pointers();
            all.insert(all.end(), given.begin(), given.end());
            for (const Ranges* ranges : {&node.work->declared.reads, &node.work->declared.writes})
                for (const Range& each : *ranges) all.push_back(each.start);
        }
        return all;
    }

private:
    std::shared_ptr<const Graph> graph;
};

// Flags of an instantiation that exist, and one that is not offered: launches from the device.
constexpr std::uint64_t FLAGS = 0xf, DEVICE_LAUNCH = 4;

int instantiate(const char* name, void** out, void* handle, std::uint64_t flags) {
    return with<Graph>(name, handle, [&](Call&, const std::shared_ptr<Graph>& graph) -> int {
        if (!out || flags & ~FLAGS || flags & DEVICE_LAUNCH) return INVALID_VALUE;
        // As a graph, it can be changed later; what was instantiated stays.
        *out = handles<GraphExec>().add(
            std::make_shared<GraphExec>(GraphExec{std::make_shared<const Graph>(*graph), nullptr}));
        return SUCCESS;
    });
}

enum UpdateResult : std::uint32_t { UPDATED = 0, TOPOLOGY_CHANGED = 2, KIND_CHANGED = 3 };

UpdateResult compare(const Graph& before, const Graph& after) {
    if (before.nodes.size() != after.nodes.size()) return TOPOLOGY_CHANGED;
    for (std::size_t at = 0; at < after.nodes.size(); at++) {
        if (before.nodes[at].after != after.nodes[at].after) return TOPOLOGY_CHANGED;
        if (before.nodes[at].work->kind() != after.nodes[at].work->kind()) return KIND_CHANGED;
    }
    return UPDATED;
}

} // namespace
} // namespace software

using namespace software;

API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags) {
    return instantiate(__func__, out, graph, flags);
}

API cuGraphLaunch(void* exec, void* handle) {
    return on_stream(__func__, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        std::shared_ptr<GraphExec> launched = handles<GraphExec>().find(exec);
        if (!launched) return INVALID_HANDLE;
        // A graph within a graph is not offered.
        if (stream->capture) {
            invalidate(*stream->capture);
            return CAPTURE_UNSUPPORTED;
        }
        bool is_behind = launched->last && !launched->last->done;
        if (is_behind && launched->last != stream->last) enqueue_wait(stream, launched->last);
        int result = enqueue(stream, std::make_shared<GraphWork>(launched->graph), call.hangs);
        if (result) return result;
        count_graph_launch(is_behind);
        launched->last = stream->last;
        return SUCCESS;
    });
}

API cuGraphUpload(void* exec, void* handle) {
    return on_stream(__func__, handle, [&](Call&, const std::shared_ptr<Stream>&) -> int {
        return handles<GraphExec>().find(exec) ? SUCCESS : INVALID_HANDLE;
    });
}

API cuGraphExecUpdate_v2(void* exec, void* graph, GraphUpdateInfo* info) {
    return with<GraphExec>(__func__, exec, [&](Call&, const std::shared_ptr<GraphExec>& updated) -> int {
        std::shared_ptr<Graph> newer = handles<Graph>().find(graph);
        if (!newer) return INVALID_HANDLE;
        UpdateResult result = compare(*updated->graph, *newer);
        if (info) *info = {result, nullptr, nullptr};
        if (result != UPDATED) return GRAPH_EXEC_UPDATE_FAILURE;
        updated->graph = std::make_shared<const Graph>(*newer);
        return SUCCESS;
    });
}

API cuGraphGetNodes(void* graph, void** nodes, std::size_t* count) {
    return with<Graph>(__func__, graph, [&](Call&, const std::shared_ptr<Graph>& asked) -> int {
        if (!count) return INVALID_VALUE;
        std::size_t all = asked->nodes.size();
        if (nodes) {
            // A node's handle is good for nothing but to tell nodes apart.
            for (std::size_t at = 0; at < *count; at++)
                nodes[at] = at < all ? reinterpret_cast<void*>(at + 1) : nullptr;
            all = std::min(all, *count);
        }
        *count = all;
        return SUCCESS;
    });
}

API cuGraphDestroy(void* graph) { return destroyed<Graph>(__func__, graph); }
API cuGraphExecDestroy(void* exec) { return destroyed<GraphExec>(__func__, exec); }
