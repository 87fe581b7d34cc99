// The kernels compiled in, by name.
#pragma once
#include <string>

#include "launch.h"
#include "machine.h"

namespace emulator {

// Null where there is none of this name.
const Kernel* find_kernel(const std::string& name);

// Why no device would take this launch; empty when one would.
std::string refusal(const EmulatorGrid& launch);

} // namespace emulator
