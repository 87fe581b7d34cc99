// The addresses of all memory that kernels see: one large piece of the process's address space, handed out from the
// bottom to the top and never twice, so that a stale pointer points to nothing for ever. Between any two pieces lie
// pages that nobody may touch.
#pragma once
#include <cstddef>

#include "abi.h"
#include "ranges.h"

namespace software {

constexpr std::size_t PAGE = 4096;

inline std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Where it is. The same for the whole process.
const Range& space();

// Addresses for so many bytes, not accessible yet; 0 when all are used up. Under the driver's lock.
Address take_addresses(std::size_t bytes, std::size_t alignment);

// Makes whole pages accessible and fills them with ones: NaN as a float and as BF16. Pages that nobody writes to share
// one copy of the pattern.
bool open_pages(const Range& pages);

// Makes whole pages inaccessible and gives back what was in them.
void close_pages(const Range& pages);

} // namespace software
