// Ranges of addresses: what a piece of work reads and writes.
#pragma once
#include <string>
#include <vector>

#include "abi.h"

namespace software {

struct Range {
    Address start = 0, end = 0;

    Address bytes() const { return end - start; }
    bool holds(Address address) const { return start <= address && address < end; }
    bool overlaps(const Range& other) const { return start < other.end && other.start < end; }
};

inline Range range(Address start, Address bytes) { return {start, start + bytes}; }

// In ascending order, none touching another.
using Ranges = std::vector<Range>;

// Adds ranges in any order.
void add(Ranges& to, const Ranges& more);

// The first bytes that both hold; empty where there are none.
Range common(const Ranges& one, const Ranges& other);

// What a piece of work touches. Atomic accesses and plain ones exclude each other like writes, atomic ones do not
// exclude atomic ones.
struct Touches {
    Ranges reads, writes, atomics;

    bool empty() const { return reads.empty() && writes.empty() && atomics.empty(); }
};

// Bytes over which two pieces of work that have no order conflict, and how ("writes ... reads"); empty where they do
// not.
struct Conflict {
    Range bytes;
    const char* first = "";
    const char* second = "";
};
Conflict conflict(const Touches& first, const Touches& second);

} // namespace software
