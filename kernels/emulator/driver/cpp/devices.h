// The devices: what they hold and what they say of themselves.
#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <string>

namespace software {

struct Context;

struct Device {
    int ordinal = 0;
    std::size_t memory_bytes = 0;
    // Bytes taken now and at most, and those that were only given back because their context was destroyed.
    std::size_t used = 0, used_max = 0, left = 0;
    std::shared_ptr<Context> primary;
    int primary_holders = 0;

    void use(std::size_t bytes);
    void give_back(std::size_t bytes) { used -= bytes; }
    std::string name() const;
};

// Under the driver's lock, but for their number and the numbers that never change.
std::deque<Device>& devices();

constexpr int MULTIPROCESSORS = 4;
constexpr int THREADS_A_MULTIPROCESSOR_MAX = 2048;
constexpr int THREADS_A_BLOCK_MAX = 1024;
constexpr int BLOCKS_A_MULTIPROCESSOR_MAX = 32;
constexpr int REGISTERS_A_MULTIPROCESSOR = 65536;
// Shared memory: what a block may have unasked, what it may ask for, what a multiprocessor has, what each block loses.
constexpr int SHARED_BYTES_DEFAULT = 48 << 10;
constexpr int SHARED_BYTES_MAX = 227 << 10;
constexpr int SHARED_BYTES_A_MULTIPROCESSOR = 228 << 10;
constexpr int SHARED_BYTES_RESERVED = 1 << 10;

} // namespace software
