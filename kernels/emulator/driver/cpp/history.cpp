#include "history.h"

#include <algorithm>
#include <list>
#include <utility>

#include "memory.h"
#include "report.h"
#include "streams.h"

namespace software {

namespace {

struct Entry {
    std::string name;
    Moment moment;
    Touches touches;
};

std::list<Entry>& history() {
    static auto& all = *new std::list<Entry>;
    return all;
}

// Entries after which the list is gone through, to drop those that everything else is ordered after.
constexpr std::size_t ENTRIES_BETWEEN_PRUNING = 64;

void prune() {
    static std::size_t added = 0;
    if (++added % ENTRIES_BETWEEN_PRUNING) return;
    Clock floor = settled();
    history().remove_if([&](const Entry& entry) { return ordered(entry.moment, floor); });
}

} // namespace

void remember(const std::string& name, const Moment& moment, Touches touches) {
    if (touches.empty()) return;
    for (const Entry& entry : history()) {
        if (ordered(entry.moment, moment.clock) || ordered(moment, entry.moment.clock)) continue;
        Conflict found = conflict(entry.touches, touches);
        if (!found.bytes.bytes()) continue;
        violation("no order: " + entry.name + " " + found.first + ", and " + name + " " + found.second + " " +
                  std::to_string(found.bytes.bytes()) + " bytes at " + describe(found.bytes.start) +
                  "; one must wait for the other");
    }
    history().push_back({name, moment, std::move(touches)});
    prune();
}

std::string unordered_toucher(const Range& range, const Clock& clock) {
    Touches all;
    all.writes.push_back(range);
    for (const Entry& entry : history())
        if (!ordered(entry.moment, clock) && conflict(entry.touches, all).bytes.bytes()) return entry.name;
    return "";
}

void forget_history(const Range& gone) {
    for (Entry& entry : history())
        for (Ranges* ranges : {&entry.touches.reads, &entry.touches.writes, &entry.touches.atomics})
            std::erase_if(*ranges, [&](const Range& each) { return each.overlaps(gone); });
}

} // namespace software
