// Which work is ordered before which: vector clocks.
//
// Every stream is a line of time of its own, and so is every stream of a captured graph. The host is not: what one of
// its threads has seen counts as seen by all, because the driver cannot know how they tell each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace software {

class Clock {
public:
    // What is ordered before either.
    void merge(const Clock& other);
    // What is ordered before both.
    void meet(const Clock& other);
    std::uint64_t tick(std::size_t line);
    std::uint64_t at(std::size_t line) const { return line < times.size() ? times[line] : 0; }

private:
    std::vector<std::uint64_t> times;
};

// One piece of work in time: the clock holds what is ordered before it, and itself.
struct Moment {
    std::size_t line = 0;
    std::uint64_t time = 0;
    Clock clock;
};

inline bool ordered(const Moment& first, const Clock& then) { return first.time <= then.at(first.line); }

// A line of time that nobody else uses. Under the driver's lock.
std::size_t new_line();

} // namespace software
