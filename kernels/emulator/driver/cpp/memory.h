// All memory that work can touch: where each piece is, whose it is, whether it is still there. Under the driver's lock.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "abi.h"
#include "ranges.h"

namespace software {

struct Context;

// Alignment of what cuMemAlloc returns; memory ends where nobody may touch, rounded up to this.
constexpr std::size_t ALIGNMENT = 256;

enum class Kind {
    // Of a device, from cuMemAlloc and its relatives.
    Device,
    // Of the host, from cuMemHostAlloc.
    Pinned,
    // The program's own, from cuMemHostRegister.
    Registered,
    // Mapped by cuMemMap.
    Mapped,
};

struct Allocation {
    Range range;
    Kind kind = Kind::Device;
    // Of the device that holds it; -1 for the host's.
    int device = -1;
    Context* context = nullptr;
    bool live = true;
    // Of mapped memory: the devices that may touch it.
    std::set<int> accessors;
    std::uint64_t number = 0;

    bool of_host() const { return kind == Kind::Pinned || kind == Kind::Registered; }
};

// Takes memory of the context's device; null where it has not so much left.
Allocation* allocate(Context& context, std::size_t bytes);

// Takes pinned memory of the host; null where there is none.
Allocation* allocate_pinned(Context& context, std::size_t bytes);

// Lists memory that is there already.
Allocation* list(Kind kind, const Range& range, int device, Context* context);

// Gives memory back. It stays listed, so that whoever uses it later can be told what it was.
void release(Allocation& allocation);

// Everything that a context which is being destroyed still holds.
void release_all_of(const Context& context);

// The memory, live or freed, that an address is in; null where it never was any.
Allocation* find_memory(Address address);

// Memory whose start is that address, if it is live and of that kind.
Allocation* find_start(Address address, Kind kind);

// Whether all of the bytes are pinned memory of the host.
bool is_pinned(const Range& range);

// For messages: `byte 12 of allocation 3 (256 bytes of device 0)`.
std::string describe(Address address);

// Why work of a device cannot touch bytes: freed, beyond the end; empty where it can. Memory that the driver knows
// nothing of is the host's, and no business of its.
std::string why_not(const Range& range);

} // namespace software
