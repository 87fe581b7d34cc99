// What can be put into a stream or a graph.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "clock.h"
#include "ranges.h"

namespace software {

struct Context;
struct Stream;

struct Outcome {
    enum Step {
        Done,
        // Something happened, and there is more to do.
        Progressed,
        // Nothing can happen before something else has.
        Blocked,
        // With a result that stays on the context.
        Failed,
    } step;
    int result = SUCCESS;
    std::string message = {};
};

// One execution of a piece of work. Stepped by the device thread, without the driver's lock.
class Execution {
public:
    virtual ~Execution() = default;
    virtual Outcome step() = 0;
    // What it has really touched, when it is done, beyond what the work declares. Under the driver's lock.
    virtual Touches touches() { return {}; }
};

// How an execution stands in time: it may learn, from flags in memory, that other work is ordered before it.
struct Timed {
    Stream* stream = nullptr;
    Context* context = nullptr;
    Moment moment;
};

// A piece of work, as it was enqueued or captured. It never changes, and may be executed many times.
class Work {
public:
    explicit Work(std::string name) : name(std::move(name)) {}
    virtual ~Work() = default;
    // An execution that has not begun. `timed` outlives it. Under the driver's lock.
    virtual std::unique_ptr<Execution> begin(Timed& timed) const = 0;
    // Pointers that the work was given without telling how far they reach.
    virtual std::vector<Address> pointers() const { return {}; }
    // Whether another can take its place in an instantiated graph.
    virtual std::string kind() const { return name; }

    const std::string name;
    // What it touches for certain.
    Touches declared;
};

// Work done in one go.
class SimpleWork : public Work {
public:
    SimpleWork(std::string name, Touches touches, std::function<void()> body, std::string what)
        : Work(std::move(name)), body(std::move(body)), what(std::move(what)) {
        declared = std::move(touches);
    }
    std::unique_ptr<Execution> begin(Timed& timed) const override;
    std::string kind() const override { return what; }

private:
    std::function<void()> body;
    std::string what;
};

} // namespace software
