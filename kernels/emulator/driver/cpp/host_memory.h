// Pinned memory of the host: how much of it there is.
#pragma once
#include <cstdint>

namespace software {

// Under the driver's lock: what cuMemHostAlloc has given and cuMemFreeHost not taken back, and what only went with its
// context.
std::uint64_t pinned_bytes();
std::uint64_t pinned_left();
void count_pinned(std::int64_t bytes);
void count_pinned_left(std::uint64_t bytes);

} // namespace software
