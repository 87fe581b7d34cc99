// What the environment asks for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace software {

// When work runs that was put into a stream.
enum class Order {
    // When somebody waits for it, or after a while: what was not waited for has not happened yet.
    Lazy,
    // At once.
    Eager,
    // After a time drawn by chance.
    Random,
};

struct Settings {
    int devices = 1;
    // Memory of each device.
    std::size_t memory_bytes = std::size_t(1) << 30;
    Order order = Order::Lazy;
    std::uint64_t seed = 1;
    // After which work runs although nobody waits for it.
    int lag_ms = 20;
    // Least time that a graph takes on its device.
    int graph_ms = 0;
    // Compute capability, as 90 for 9.0.
    int capability = 90;
    // Whether memory can be shared with other processes.
    bool shares = true;
    // Whether the devices' kernels can use each other's memory.
    bool peers = true;
    std::string faults;
    bool trace = false;
    // Whether a violation ends the process.
    bool strict = true;
    // Where the report goes when the process ends; `%p` stands for its number.
    std::string report;
};

// Read once, from CONSORT_SOFTWARE_DRIVER_*. A value that cannot be read ends the process: a test must not run in
// another way than it was told to.
const Settings& settings();

} // namespace software
