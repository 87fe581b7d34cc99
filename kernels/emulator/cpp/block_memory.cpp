#include "block_memory.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace emulator {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t ALIGNMENT = 1024;
constexpr int POISON = 0xff;

void BlockMemory::take(std::size_t bytes) {
    give_back();
    size = bytes;
#if defined(CONSORT_ASAN) || defined(CONSORT_TSAN)
    // Exact, so that the sanitizer sees the first byte beyond.
    void* exact = nullptr;
    if (posix_memalign(&exact, ALIGNMENT, bytes ? bytes : 1) != 0) std::abort();
    memory = static_cast<unsigned char*>(exact);
    std::memset(memory, POISON, bytes);
#else
    std::size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    mapped = whole + PAGE;
    void* pages = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(static_cast<char*>(pages) + whole, PAGE, PROT_NONE) != 0) {
        std::perror("emulator: no memory for a block");
        std::abort();
    }
    memory = static_cast<unsigned char*>(pages);
    std::memset(memory, POISON, whole);
#endif
}

void BlockMemory::give_back() {
    if (!memory) return;
    if (mapped)
        munmap(memory, mapped);
    else
        std::free(memory);
    memory = nullptr;
    mapped = size = 0;
}

bool BlockMemory::holds(const void* pointer, std::size_t count) const {
    auto at = reinterpret_cast<std::uintptr_t>(pointer), first = reinterpret_cast<std::uintptr_t>(memory);
    return at >= first && at + count <= first + size;
}

bool BlockMemory::intact() const {
    if (!mapped) return true;
    for (std::size_t at = size; at < mapped - PAGE; at++)
        if (memory[at] != POISON) return false;
    return true;
}

} // namespace emulator
