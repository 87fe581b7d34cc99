// Reads and writes of the kernel's own memory that the machine does for a thread. A file of its own, because it is
// compiled with the sanitizers that kernels are compiled with, and the machine is not.
#include "machine.h"

namespace emulator {

struct alignas(16) Sixteen {
    std::uint64_t words[2];
};

void access_copy_16(void* destination, const void* source, bool valid) {
    *static_cast<Sixteen*>(destination) = valid ? *static_cast<const Sixteen*>(source) : Sixteen{};
}

void access_matrix_row(std::uint16_t (&out)[8], const void* row) {
    for (int at = 0; at < 8; at++) out[at] = static_cast<const std::uint16_t*>(row)[at];
}

} // namespace emulator
