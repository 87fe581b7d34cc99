// A block's dynamic shared memory: poisoned, so that what was never written is seen (all ones are NaN as BF16 and as
// float), and followed by memory that nobody may touch.
#pragma once
#include <cstddef>

namespace emulator {

class BlockMemory {
public:
    BlockMemory() = default;
    BlockMemory(const BlockMemory&) = delete;
    BlockMemory& operator=(const BlockMemory&) = delete;
    ~BlockMemory() { give_back(); }

    void take(std::size_t bytes);
    void give_back();

    unsigned char* start() const { return memory; }
    std::size_t bytes() const { return size; }
    bool holds(const void* pointer, std::size_t count) const;

    // Whether the bytes between the end and the untouchable page are as they were.
    bool intact() const;

private:
    unsigned char* memory = nullptr;
    std::size_t size = 0;
    std::size_t mapped = 0;
};

} // namespace emulator
