#include "clock.h"

#include <algorithm>

namespace software {

void Clock::merge(const Clock& other) {
    if (times.size() < other.times.size()) times.resize(other.times.size());
    for (std::size_t line = 0; line < other.times.size(); line++)
        times[line] = std::max(times[line], other.times[line]);
}

void Clock::meet(const Clock& other) {
    for (std::size_t line = 0; line < times.size(); line++) times[line] = std::min(times[line], other.at(line));
}

std::uint64_t Clock::tick(std::size_t line) {
    if (times.size() <= line) times.resize(line + 1);
    return ++times[line];
}

std::size_t new_line() {
    static std::size_t lines = 0;
    return lines++;
}

} // namespace software
