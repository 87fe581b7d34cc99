#include "registry.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>

namespace emulator {

namespace {

std::map<std::string, Kernel>& kernels() {
    // Never destroyed: a launch may be under way when the process ends.
    static auto& all = *new std::map<std::string, Kernel>;
    return all;
}

} // namespace

void register_kernel(const Kernel& kernel) {
    if (!kernels().emplace(kernel.name, kernel).second) {
        std::fprintf(stderr, "emulator: two kernels are named %s\n", kernel.name);
        std::abort();
    }
}

const Kernel* find_kernel(const std::string& name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : &found->second;
}

// What a multiprocessor of compute capability 9.0 and 10.0 gives a block at most.
constexpr std::size_t SHARED_BYTES_MAX = 227 << 10;

std::string refusal(const EmulatorGrid& launch) {
    const Kernel* found = find_kernel(launch.kernel);
    if (!found) return "there is no kernel of this name";
    const Kernel& kernel = *found;
    for (auto blocks : launch.grid)
        if (blocks == 0) return "a grid without blocks";
    if (launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.grid[0] > 0x7fffffff) return "a grid too large";
    std::uint64_t threads = std::uint64_t(launch.threads[0]) * launch.threads[1] * launch.threads[2];
    if (threads == 0 || threads > kernel.threads_max)
        return std::to_string(threads) + " threads a block, where the kernel allows 1 to " +
               std::to_string(kernel.threads_max);
    if (launch.shared_bytes > SHARED_BYTES_MAX)
        return std::to_string(launch.shared_bytes) + " bytes of shared memory, more than " +
               std::to_string(SHARED_BYTES_MAX);
    if (launch.argument_count != kernel.parameters)
        return std::to_string(launch.argument_count) + " arguments for " + std::to_string(kernel.parameters) +
               " parameters";
    for (unsigned at = 0; at < kernel.parameters; at++)
        if (launch.argument_bytes[at] != kernel.parameter_bytes[at])
            return "argument " + std::to_string(at) + " has " + std::to_string(launch.argument_bytes[at]) +
                   " bytes, the parameter " + std::to_string(kernel.parameter_bytes[at]);
    return "";
}

const Kernel* kernel_at(std::size_t at) {
    auto& all = kernels();
    return at < all.size() ? &std::next(all.begin(), static_cast<std::ptrdiff_t>(at))->second : nullptr;
}

} // namespace emulator

int emulator_kernel(std::size_t at, const char** name, const std::uint32_t** parameter_bytes, std::uint32_t* parameters,
                    std::uint32_t* threads_max) {
    const emulator::Kernel* kernel = emulator::kernel_at(at);
    if (!kernel) return 0;
    *name = kernel->name;
    *parameter_bytes = kernel->parameter_bytes;
    *parameters = kernel->parameters;
    *threads_max = kernel->threads_max;
    return 1;
}
