// What the other software libraries ask of the software driver: work on a stream, in order with everything else.
#pragma once
#include <cstddef>
#include <cstdint>
extern "C" {
struct SoftwareExtent { std::uint64_t address, bytes; std::uint32_t writes; };
struct SoftwareOperation {
    const char* name;
    // Called on the device thread until it returns nonzero. `state` is zero when an execution begins; a captured
    // operation is executed at each replay.
    int (*poll)(void* closure, std::uint64_t state[4]);
    void* closure;
    void (*drop)(void* closure);
    const SoftwareExtent* extents;
    std::size_t extent_count;
};
// Returns a CUresult. The operation, closure included, belongs to the driver from then on, also after an error.
int software_driver_enqueue(void* stream, const SoftwareOperation* operation);
// The device of the calling thread's current context, or -1.
int software_driver_current_device();
// Counts one call of a function for CONSORT_SOFTWARE_DRIVER_FAULTS; returns 0, or the code to fail with.
int software_driver_count_call(const char* function);
// The same for what may also be told never to end: `*hangs` is not zero then.
int software_driver_count_call_or_hang(const char* function, int* hangs);
}
