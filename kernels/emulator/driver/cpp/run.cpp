#include "run.h"

#include <algorithm>

#include "contexts.h"
#include "history.h"
#include "memory.h"
#include "report.h"

namespace software {

namespace {

// The first memory that kernels of a context may not touch, as it belongs to a device whose memory was not opened to
// them; 0 where there is none.
Address out_of_reach(const Context& context, const Touches& touches) {
    int own = context.device->ordinal;
    for (const Ranges* ranges : {&touches.reads, &touches.writes, &touches.atomics})
        for (const Range& each : *ranges) {
            const Allocation* memory = find_memory(each.start);
            if (!memory || memory->of_host()) continue;
            bool mapped = memory->kind == Kind::Mapped;
            bool open = mapped ? memory->accessors.count(own) > 0
                               : memory->device == own || context.peers.count(memory->context) > 0;
            if (!open) return each.start;
        }
    return 0;
}

} // namespace

Run::Run(std::shared_ptr<const Work> work, Stream& stream, Context& context, const Clock& before, std::size_t line,
         std::string place)
    : work(std::move(work)), place(std::move(place)) {
    timed.stream = &stream;
    timed.context = &context;
    timed.moment.line = line;
    timed.moment.clock = before;
    timed.moment.time = timed.moment.clock.tick(line);
}

Outcome Run::begin() {
    Lock lock(driver().mutex);
    trace("%s begins in %s", work->name.c_str(), place.c_str());
    for (const Ranges* ranges : {&work->declared.reads, &work->declared.writes})
        for (const Range& each : *ranges) {
            std::string reason = why_not(each);
            if (reason.empty()) continue;
            violation(work->name + " in " + place + " " + reason);
            return {Outcome::Failed, ILLEGAL_ADDRESS, reason};
        }
    for (Address pointer : work->pointers()) {
        const Allocation* memory = find_memory(pointer);
        if (memory && !memory->live)
            violation(work->name + " in " + place + " is given a pointer to freed memory: " + describe(pointer));
    }
    execution = work->begin(timed);
    return {Outcome::Progressed};
}

Outcome Run::finish() {
    Lock lock(driver().mutex);
    Touches all = work->declared;
    Touches seen = execution->touches();
    Address closed = out_of_reach(*timed.context, seen);
    add(all.reads, seen.reads);
    add(all.writes, seen.writes);
    add(all.atomics, seen.atomics);
    remember(work->name + " in " + place, timed.moment, std::move(all));
    if (!closed) return {Outcome::Done};
    std::string what = work->name + " in " + place + " touches memory that was not opened to it: " + describe(closed);
    violation(what);
    return {Outcome::Failed, ILLEGAL_ADDRESS, what};
}

Outcome Run::step() {
    if (!execution) {
        Outcome outcome = begin();
        if (outcome.step == Outcome::Failed) return outcome;
    }
    Outcome outcome = execution->step();
    return outcome.step == Outcome::Done ? finish() : outcome;
}

} // namespace software
