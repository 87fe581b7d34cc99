// The one thread that executes all work of all devices: the emulator's threads cannot move from one thread of the
// operating system to another.
#pragma once

namespace software {

// Under the driver's lock, once.
void start_device_thread();

} // namespace software
