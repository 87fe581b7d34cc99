// What a kernel really touches. The kernels of this library are compiled so that every access to memory is told to
// `__asan_load4_noabort` and its relatives, which are here; those to device memory and to pinned memory are kept, to
// the byte, in maps of bits.
//
// Flags by which grids tell each other that data is ready order what comes before the flag was set before what comes
// after it was seen. (Before the flag: everything that the grid does. A grid that writes after its last flag what its
// peers read is not found here, but by the emulator's race detector.)
#pragma once
#include <memory>
#include <unordered_map>

#include "abi.h"
#include "ranges.h"
#include "work.h"

namespace software {

enum class Access { Read, Write, Atomic };

class Recorder {
public:
    explicit Recorder(Timed& timed) : timed(timed) {}

    void note(Address address, std::size_t bytes, Access access);
    void released(Address flag);
    void acquired(Address flag);
    Touches touches() const;

private:
    // One bit a byte of a page.
    struct Page {
        std::uint64_t bits[3][64] = {};
    };
    struct Cached {
        Address number = 0;
        Page* page = nullptr;
    };

    Page& page(Address number);
    Ranges ranges(Access access) const;

    Timed& timed;
    std::unordered_map<Address, std::unique_ptr<Page>> pages;
    Cached cache[64];
};

// While set, what the device thread's kernels touch goes there.
extern Recorder* recorder;

} // namespace software
