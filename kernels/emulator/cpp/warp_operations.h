// What the operations of a warp make of what its lanes bring.
#pragma once
#include "machine.h"

namespace emulator {

// One place a lane.
using Lanes = unsigned char[32][LANE_BYTES];

const char* name_of(Collective what);

// Fills `result` from `brought`; `line` is for messages.
void complete_collective(Collective what, int line, const Lanes& brought, Lanes& result);

} // namespace emulator
