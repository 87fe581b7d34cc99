#include "ranges.h"

#include <algorithm>
#include <initializer_list>

namespace software {

void add(Ranges& to, const Ranges& more) {
    to.insert(to.end(), more.begin(), more.end());
    std::sort(to.begin(), to.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
    Ranges merged;
    for (const Range& each : to) {
        if (!merged.empty() && each.start <= merged.back().end)
            merged.back().end = std::max(merged.back().end, each.end);
        else
            merged.push_back(each);
    }
    to = std::move(merged);
}

Range common(const Ranges& one, const Ranges& other) {
    auto a = one.begin(), b = other.begin();
    while (a != one.end() && b != other.end()) {
        if (a->overlaps(*b)) return {std::max(a->start, b->start), std::min(a->end, b->end)};
        if (a->end <= b->end)
            ++a;
        else
            ++b;
    }
    return {};
}

Conflict conflict(const Touches& first, const Touches& second) {
    struct Kind {
        const Ranges& ranges;
        const char* verb;
        enum { Read, Write, Atomic } what;
    };
    const Kind mine[] = {{first.writes, "writes", Kind::Write},
                         {first.reads, "reads", Kind::Read},
                         {first.atomics, "changes atomically", Kind::Atomic}};
    const Kind others[] = {{second.writes, "writes", Kind::Write},
                           {second.reads, "reads", Kind::Read},
                           {second.atomics, "changes atomically", Kind::Atomic}};
    for (const Kind& a : mine)
        for (const Kind& b : others) {
            if (a.what == b.what && a.what != Kind::Write) continue;
            Range bytes = common(a.ranges, b.ranges);
            if (bytes.bytes()) return {bytes, a.verb, b.verb};
        }
    return {};
}

} // namespace software
