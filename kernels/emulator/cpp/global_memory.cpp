// Global memory: ends where nobody may touch, or exactly where the sanitizer looks.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t ALIGNMENT = 16;
constexpr unsigned char SLACK = 0xa5;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

} // namespace

extern "C" {

unsigned char* emulator_memory_take(std::size_t bytes) {
#if defined(CONSORT_ASAN) || defined(CONSORT_TSAN)
    void* exact = nullptr;
    return posix_memalign(&exact, ALIGNMENT, bytes ? bytes : 1) == 0 ? static_cast<unsigned char*>(exact) : nullptr;
#else
    std::size_t used = round_up(bytes, ALIGNMENT), whole = round_up(used, PAGE);
    void* pages = mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    auto* end = static_cast<unsigned char*>(pages) + whole;
    if (mprotect(end, PAGE, PROT_NONE) != 0) return nullptr;
    std::memset(end - (used - bytes), SLACK, used - bytes);
    return end - used;
#endif
}

int emulator_memory_intact(const unsigned char* start, std::size_t bytes) {
#if !defined(CONSORT_ASAN) && !defined(CONSORT_TSAN)
    for (std::size_t at = bytes; at < round_up(bytes, ALIGNMENT); at++)
        if (start[at] != SLACK) return 0;
#endif
    (void)start, (void)bytes;
    return 1;
}

void emulator_memory_give_back(unsigned char* start, std::size_t bytes) {
#if defined(CONSORT_ASAN) || defined(CONSORT_TSAN)
    (void)bytes;
    std::free(start);
#else
    std::size_t used = round_up(bytes, ALIGNMENT), whole = round_up(used, PAGE);
    munmap(start + used - whole, whole + PAGE);
#endif
}

} // extern "C"
