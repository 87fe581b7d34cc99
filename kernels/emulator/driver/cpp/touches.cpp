#include "touches.h"

#include <algorithm>
#include <map>

#include "space.h"

namespace software {

Recorder* recorder = nullptr;

namespace {

// What was ordered before a flag when it was set last. Of the device thread.
std::map<Address, Clock>& flags() {
    static auto& all = *new std::map<Address, Clock>;
    return all;
}

// The ones of a page's bits, as ranges appended to others.
void append(const std::uint64_t (&bits)[64], Address start, Ranges& to) {
    for (std::size_t word = 0; word < 64; word++) {
        std::uint64_t rest = bits[word];
        while (rest) {
            int first = __builtin_ctzll(rest);
            std::uint64_t from = rest >> first;
            int count = ~from ? __builtin_ctzll(~from) : 64;
            Address at = start + word * 64 + static_cast<Address>(first);
            if (!to.empty() && to.back().end == at)
                to.back().end += static_cast<Address>(count);
            else
                to.push_back(range(at, static_cast<Address>(count)));
            if (first + count >= 64) break;
            rest &= ~0ull << (first + count);
        }
    }
}

} // namespace

Recorder::Page& Recorder::page(Address number) {
    Cached& cached = cache[number % 64];
    if (cached.number != number || !cached.page) {
        auto& page = pages[number];
        if (!page) page = std::make_unique<Page>();
        cached = {number, page.get()};
    }
    return *cached.page;
}

void Recorder::note(Address address, std::size_t bytes, Access access) {
    while (bytes) {
        std::uint64_t(&bits)[64] = page(address / PAGE).bits[static_cast<int>(access)];
        std::size_t in_page = address % PAGE, bit = in_page % 64;
        std::size_t count = std::min(bytes, 64 - bit);
        bits[in_page / 64] |= (count == 64 ? ~0ull : (1ull << count) - 1) << bit;
        address += count;
        bytes -= count;
    }
}

void Recorder::released(Address flag) { flags()[flag].merge(timed.moment.clock); }

void Recorder::acquired(Address flag) {
    auto set = flags().find(flag);
    if (set != flags().end()) timed.moment.clock.merge(set->second);
}

Ranges Recorder::ranges(Access access) const {
    std::vector<std::pair<Address, const Page*>> ordered;
    for (const auto& [number, page] : pages) ordered.emplace_back(number, page.get());
    std::sort(ordered.begin(), ordered.end());
    Ranges all;
    for (const auto& [number, page] : ordered) append(page->bits[static_cast<int>(access)], number * PAGE, all);
    return all;
}

Touches Recorder::touches() const { return {ranges(Access::Read), ranges(Access::Write), ranges(Access::Atomic)}; }

namespace {

inline void note(Address address, std::size_t bytes, Access access) {
    if (!recorder) return;
    const static Range all = space();
    if (all.holds(address)) recorder->note(address, bytes, access);
}

} // namespace
} // namespace software

using software::Access;
using software::Address;

// What the compiler calls for each access.
#define ACCESSES(bytes)                                                                                      \
    extern "C" void __asan_load##bytes##_noabort(Address at) { software::note(at, bytes, Access::Read); }    \
    extern "C" void __asan_store##bytes##_noabort(Address at) { software::note(at, bytes, Access::Write); }

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
extern "C" void __asan_loadN_noabort(Address at, std::size_t bytes) { software::note(at, bytes, Access::Read); }
extern "C" void __asan_storeN_noabort(Address at, std::size_t bytes) { software::note(at, bytes, Access::Write); }
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_before_dynamic_init(const char*) {}
extern "C" void __asan_after_dynamic_init() {}

// What the emulator's words for flags and atomic operations call.
namespace emulator {

void atomic_access(const void* pointer, unsigned bytes) {
    software::note(reinterpret_cast<Address>(pointer), bytes, Access::Atomic);
}

void released(const void* flag) {
    if (software::recorder) software::recorder->released(reinterpret_cast<Address>(flag));
}

void acquired(const void* flag) {
    if (software::recorder) software::recorder->acquired(reinterpret_cast<Address>(flag));
}

} // namespace emulator
