// Graphs: work whose order is known before it is launched, as often as one likes.
#pragma once
#include <memory>
#include <vector>

#include "contexts.h"
#include "work.h"

namespace software {

struct Completion;

struct Node {
    std::shared_ptr<const Work> work;
    std::shared_ptr<Context> context;
    // Nodes that end before this one begins: of smaller index.
    std::vector<std::size_t> after;
    // The stream that it was captured in.
    std::size_t lane = 0;
};

struct Graph {
    std::vector<Node> nodes;
    std::size_t lanes = 0;
};

// An instantiated graph. A launch that is under way keeps the graph that it was launched with.
struct GraphExec {
    std::shared_ptr<const Graph> graph;
    // The end of the last launch: launches of one of these follow each other.
    std::shared_ptr<Completion> last;
};

} // namespace software
