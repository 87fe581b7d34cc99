// Launches: what a device would refuse is refused here; the rest becomes work that the emulator does.
#include <cstring>

#include "api.h"
#include "capture.h"
#include "launch.h"
#include "memory.h"
#include "modules.h"
#include "settings.h"
#include "space.h"
#include "touches.h"

namespace software {

namespace {

struct Shape {
    std::uint32_t grid[3], block[3];
    std::uint32_t shared_bytes;

    std::uint64_t threads() const { return std::uint64_t(block[0]) * block[1] * block[2]; }
    std::uint64_t blocks() const { return std::uint64_t(grid[0]) * grid[1] * grid[2]; }
};

// Copies of the arguments, each at the start of words of its own.
using Arguments = std::vector<std::vector<std::uint64_t>>;

EmulatorSettings emulation() {
    static std::uint64_t launches = 0;
    enum { ASCENDING, DESCENDING, SHUFFLED };
    enum { LATE, AT_ONCE, BY_CHANCE };
    std::uint64_t seed = settings().seed + ++launches;
    switch (settings().order) {
    case Order::Lazy: return {DESCENDING, LATE, seed, 1};
    case Order::Eager: return {ASCENDING, AT_ONCE, seed, 1};
    case Order::Random: return {SHUFFLED, BY_CHANCE, seed, 1};
    }
    return {};
}

// The emulator's grid, opened by the first step.
class KernelExecution : public Execution {
public:
    KernelExecution(const Emulated& kernel, const Shape& shape, const Arguments& arguments, Timed& timed)
        : kernel(kernel), shape(shape), arguments(arguments), seen(timed), rank(timed.context->device->ordinal),
          settings(emulation()) {}

    ~KernelExecution() override {
        if (grid) emulator_close(grid);
    }

    Outcome step() override {
        char message[1024] = "";
        if (!grid && !open(message, sizeof message)) return {Outcome::Failed, LAUNCH_FAILED, message};
        recorder = &seen;
        int progress = EMULATOR_PROGRESSED;
        for (int round = 0; round < ROUNDS && progress == EMULATOR_PROGRESSED; round++)
            progress = emulator_advance(grid, message, sizeof message);
        recorder = nullptr;
        switch (progress) {
        case EMULATOR_DONE: return {Outcome::Done};
        case EMULATOR_PROGRESSED: return {Outcome::Progressed};
        case EMULATOR_BLOCKED: return {Outcome::Blocked};
        case EMULATOR_MEMORY_FAULT: return memory_fault(message);
        default: return {Outcome::Failed, LAUNCH_FAILED, message};
        }
    }

    Touches touches() override { return seen.touches(); }

private:
    // Rounds of the emulator before other work has its turn.
    static constexpr int ROUNDS = 32;

    bool open(char* message, std::size_t bytes) {
        std::vector<void*> pointers;
        for (const auto& argument : arguments) pointers.push_back(const_cast<std::uint64_t*>(argument.data()));
        EmulatorGrid launch{};
        launch.kernel = kernel.name;
        std::memcpy(launch.grid, shape.grid, sizeof launch.grid);
        std::memcpy(launch.threads, shape.block, sizeof launch.threads);
        launch.rank = static_cast<std::uint32_t>(rank);
        launch.shared_bytes = shape.shared_bytes;
        launch.arguments = pointers.data();
        launch.argument_bytes = kernel.parameter_bytes.data();
        launch.argument_count = pointers.size();
        grid = emulator_open(&launch, &settings, message, bytes);
        return grid != nullptr;
    }

    Outcome memory_fault(const std::string& message) const {
        Lock lock(driver().mutex);
        auto address = reinterpret_cast<Address>(emulator_touched(grid));
        const Allocation* memory = find_memory(address);
        if (memory && !memory->live)
            violation(std::string("kernel ") + kernel.name + " touches freed memory: " + describe(address));
        return {Outcome::Failed, ILLEGAL_ADDRESS, message + ": " + describe(address)};
    }

    const Emulated& kernel;
    const Shape& shape;
    const Arguments& arguments;
    Recorder seen;
    int rank;
    EmulatorSettings settings;
    EmulatorOpenGrid* grid = nullptr;
};

class KernelWork : public Work {
public:
    KernelWork(const Emulated& kernel, const Shape& shape, Arguments arguments)
        : Work(std::string("kernel ") + kernel.name), kernel(kernel), shape(shape), arguments(std::move(arguments)) {}

    std::unique_ptr<Execution> begin(Timed& timed) const override {
        return std::make_unique<KernelExecution>(kernel, shape, arguments, timed);
    }

    // Whatever looks like an address of device memory is one, in a structure, too.
    std::vector<Address> pointers() const override {
        std::vector<Address> found;
        for (const auto& argument : arguments)
            for (std::uint64_t word : argument)
                if (space().holds(word)) found.push_back(word);
        return found;
    }

private:
    const Emulated& kernel;
    Shape shape;
    Arguments arguments;
};

// Arguments come as a pointer to each, or as one buffer of all of them, whose size must be right.
int read_arguments(const Function& function, void* const* each, void* const* extra, Arguments& out) {
    const void* END = nullptr;
    const auto *BUFFER = reinterpret_cast<const void*>(1), *SIZE = reinterpret_cast<const void*>(2);
    const unsigned char* buffer = nullptr;
    std::size_t bytes = 0;
    for (; extra && *extra != END; extra += 2) {
        if (*extra == BUFFER) buffer = static_cast<const unsigned char*>(extra[1]);
        if (*extra == SIZE) bytes = *static_cast<const std::size_t*>(extra[1]);
    }
    const auto& sizes = function.kernel->parameter_bytes;
    if (each && buffer) return INVALID_VALUE;
    if (!each && !buffer) return sizes.empty() ? SUCCESS : INVALID_VALUE;
    if (buffer && bytes != function.parameters_bytes()) {
        trace("kernel %s has %zu bytes of parameters, the launch gives %zu", function.kernel->name,
              function.parameters_bytes(), bytes);
        return INVALID_VALUE;
    }
    std::vector<std::size_t> offsets = function.offsets();
    for (std::size_t at = 0; at < sizes.size(); at++) {
        const void* from = buffer ? buffer + offsets[at] : each[at];
        if (!from) return INVALID_VALUE;
        out.emplace_back((sizes[at] + 7) / 8);
        std::memcpy(out.back().data(), from, sizes[at]);
    }
    return SUCCESS;
}

// What no device would take.
int refuse(const Function& function, const Shape& shape, bool cooperative) {
    for (int axis = 0; axis < 3; axis++)
        if (!shape.grid[axis] || !shape.block[axis]) return INVALID_VALUE;
    if (shape.grid[0] > 0x7fffffff || shape.grid[1] > 65535 || shape.grid[2] > 65535) return INVALID_VALUE;
    if (shape.block[2] > 64 || shape.threads() > THREADS_A_BLOCK_MAX) return INVALID_VALUE;
    if (shape.threads() > static_cast<std::uint64_t>(function.kernel->threads_max)) return INVALID_VALUE;
    if (shape.shared_bytes > static_cast<std::uint32_t>(function.dynamic_shared_bytes_max)) {
        trace("kernel %s: %u bytes of dynamic shared memory, %d allowed (cuFuncSetAttribute allows more)",
              function.kernel->name, shape.shared_bytes, function.dynamic_shared_bytes_max);
        return INVALID_VALUE;
    }
    int threads = static_cast<int>(shape.threads());
    int resident = function.blocks_a_multiprocessor(threads, shape.shared_bytes);
    if (resident == 0) return LAUNCH_OUT_OF_RESOURCES;
    bool too_large = cooperative && shape.blocks() > static_cast<std::uint64_t>(resident) * MULTIPROCESSORS;
    return too_large ? COOPERATIVE_LAUNCH_TOO_LARGE : SUCCESS;
}

int launch(const char* name, void* handle, const Shape& shape, void* stream, void** each, void** extra,
           bool cooperative) {
    return on_stream(name, stream, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        std::shared_ptr<Function> function = handles<Function>().find(handle);
        // Kernels and streams are of one context, which must be the current one.
        bool alike = function && function->context == stream->context && stream->context == call.context;
        if (!alike) return INVALID_HANDLE;
        if (int result = refuse(*function, shape, cooperative)) return result;
        Arguments arguments;
        if (int result = read_arguments(*function, each, extra, arguments)) return result;
        auto work = std::make_shared<KernelWork>(*function->kernel, shape, std::move(arguments));
        int result = enqueue(stream, work, call.hangs);
        if (!result && !stream->capture) count_launch();
        return result;
    });
}

} // namespace
} // namespace software

using namespace software;

API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra) {
    return launch(__func__, function, {{gx, gy, gz}, {bx, by, bz}, shared_bytes}, stream, arguments, extra, false);
}

API cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared_bytes, void* stream, void** arguments) {
    return launch(__func__, function, {{gx, gy, gz}, {bx, by, bz}, shared_bytes}, stream, arguments, nullptr, true);
}

API cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    constexpr std::uint32_t COOPERATIVE = 2;
    if (!config) return INVALID_VALUE;
    bool cooperative = false;
    // Clusters are not emulated; other attributes only hint.
    constexpr std::uint32_t CLUSTER_DIMENSION = 4;
    for (std::uint32_t at = 0; at < config->attribute_count; at++) {
        if (config->attributes[at].id == CLUSTER_DIMENSION) return NOT_SUPPORTED;
        cooperative |= config->attributes[at].id == COOPERATIVE && config->attributes[at].value[0];
    }
    Shape shape{};
    std::memcpy(shape.grid, config->grid, sizeof shape.grid);
    std::memcpy(shape.block, config->block, sizeof shape.block);
    shape.shared_bytes = config->shared_bytes;
    return launch(__func__, function, shape, config->stream, arguments, extra, cooperative);
}
