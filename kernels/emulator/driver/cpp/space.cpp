#include "space.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace software {

namespace {

constexpr std::size_t SPACE_BYTES_MAX = std::size_t(1) << 44;
constexpr std::size_t SPACE_BYTES_MIN = std::size_t(1) << 33;
constexpr int POISON = 0xff;

// Up to so many bytes are filled; larger memory maps the pattern again and again, so that only pages that are written
// to take room.
constexpr std::size_t PATTERN_BYTES = std::size_t(16) << 20;

constexpr int NOBODY = PROT_NONE, EVERYBODY = PROT_READ | PROT_WRITE;
constexpr int ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

Range reserve() {
    for (std::size_t bytes = SPACE_BYTES_MAX; bytes >= SPACE_BYTES_MIN; bytes /= 2) {
        void* start = mmap(nullptr, bytes, NOBODY, ANONYMOUS, -1, 0);
        if (start != MAP_FAILED) return range(reinterpret_cast<Address>(start), bytes);
    }
    std::perror("software driver: no addresses for device memory");
    std::abort();
}

// A file of ones; -1 where there can be none.
int pattern() {
    static const int file = [] {
        int made = memfd_create("consort-poison", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, PATTERN_BYTES) != 0) return -1;
        void* bytes = mmap(nullptr, PATTERN_BYTES, EVERYBODY, MAP_SHARED, made, 0);
        if (bytes == MAP_FAILED) return -1;
        std::memset(bytes, POISON, PATTERN_BYTES);
        munmap(bytes, PATTERN_BYTES);
        return made;
    }();
    return file;
}

void* at(Address address) { return reinterpret_cast<void*>(address); }

bool map_pattern(const Range& pages) {
    for (Address start = pages.start; start < pages.end; start += PATTERN_BYTES) {
        std::size_t bytes = std::min<std::size_t>(PATTERN_BYTES, pages.end - start);
        if (mmap(at(start), bytes, EVERYBODY, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, pattern(), 0) == MAP_FAILED)
            return false;
    }
    return true;
}

} // namespace

const Range& space() {
    static const Range& all = *new Range(reserve());
    return all;
}

Address take_addresses(std::size_t bytes, std::size_t alignment) {
    static Address next = space().start;
    Address start = round_up(next + PAGE, std::max(alignment, PAGE));
    if (bytes > space().bytes() || start + round_up(bytes, PAGE) + PAGE > space().end) return 0;
    next = start + round_up(bytes, PAGE);
    return start;
}

bool open_pages(const Range& pages) {
    if (pages.bytes() > PATTERN_BYTES && pattern() >= 0) return map_pattern(pages);
    if (mprotect(at(pages.start), pages.bytes(), EVERYBODY) != 0) return false;
    std::memset(at(pages.start), POISON, pages.bytes());
    return true;
}

void close_pages(const Range& pages) {
    if (mmap(at(pages.start), pages.bytes(), NOBODY, ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        std::perror("software driver: cannot close freed memory");
        std::abort();
    }
}

} // namespace software
