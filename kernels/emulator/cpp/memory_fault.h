// A thread of a kernel that touches memory which is not there ends its launch with a fault, not the process.
#pragma once

namespace emulator {

// From now on, for the whole process. Faults outside kernels go to whoever handled them before.
void watch_for_memory_faults();

} // namespace emulator
