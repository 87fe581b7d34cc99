// One execution of a piece of work, with its place in time, watched: in a stream, or in a graph.
#pragma once
#include <memory>
#include <string>

#include "driver.h"
#include "work.h"

namespace software {

class Run {
public:
    // `before` is what is ordered before it, `line` its line of time, `place` where it runs, for messages.
    Run(std::shared_ptr<const Work> work, Stream& stream, Context& context, const Clock& before, std::size_t line,
        std::string place);

    // By the device thread, without the driver's lock.
    Outcome step();

    const Clock& clock() const { return timed.moment.clock; }
    bool began() const { return execution != nullptr; }

private:
    // Whether what it needs is there.
    Outcome begin();
    // Compares what was touched with what nothing orders before or after it.
    Outcome finish();

    std::shared_ptr<const Work> work;
    std::string place;
    Timed timed;
    std::unique_ptr<Execution> execution;
};

} // namespace software
