#include "modules.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>

#include "api.h"
#include "capture.h"
#include "launch.h"
#include "settings.h"

namespace software {

namespace {

const char PRETEND[] = "CONSORT SOFTWARE CUBIN\n";
const char ELF[] = "\177ELF";

bool starts_with(const unsigned char* image, const char* head) {
    for (; *head; image++, head++)
        if (*image != static_cast<unsigned char>(*head)) return false;
    return true;
}

// A device of compute capability X.Y runs what was compiled for X.Z with Z <= Y, and what is for X.Y alone.
bool runs(int architecture, bool exact) {
    int capability = settings().capability;
    if (exact) return architecture == capability;
    return architecture / 10 == capability / 10 && architecture <= capability;
}

// A line of a pretend image, of bounded length, since an image does not tell where it ends.
std::string line_of(const unsigned char*& at) {
    constexpr std::size_t BYTES_MAX = 4096;
    std::string line;
    while (line.size() < BYTES_MAX && *at && *at != '\n') line += static_cast<char>(*at++);
    if (*at == '\n') at++;
    return line;
}

// Head, a name, and an architecture like `sm_90a`.
int load_pretend(const unsigned char* image, Module&) {
    image += sizeof PRETEND - 1;
    line_of(image);
    std::string architecture = line_of(image);
    int number = 0;
    char suffix = 0;
    if (std::sscanf(architecture.c_str(), "sm_%d%c", &number, &suffix) < 1) return INVALID_IMAGE;
    return runs(number, suffix == 'a') ? SUCCESS : NO_BINARY_FOR_GPU;
}

std::string joined(const std::vector<std::uint32_t>& numbers) {
    std::string text;
    for (std::uint32_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
    return text;
}

// The emulator runs another build of the same text: what differs was compiled from another one.
void compare(const std::string& name, const Compiled& compiled) {
    const Emulated* kernel = emulated(name);
    if (!kernel || kernel->parameter_bytes == compiled.parameter_bytes) return;
    violation("kernel " + name + " has parameters of " + joined(compiled.parameter_bytes) +
              " bytes in the cubin, and of " + joined(kernel->parameter_bytes) + " in the emulator: it is out of date");
}

int load_cubin(const unsigned char* image, Module& module) {
    std::optional<Cubin> cubin = read_cubin(image);
    if (!cubin) return INVALID_IMAGE;
    if (!runs(cubin->architecture, cubin->exact)) return NO_BINARY_FOR_GPU;
    for (const auto& [name, compiled] : cubin->kernels) compare(name, compiled);
    module.kernels = std::move(cubin->kernels);
    return SUCCESS;
}

int load(const char* name, void** out, const unsigned char* image) {
    return in_context(name, [&](Call& call, Context&) -> int {
        if (!out || !image) return INVALID_VALUE;
        if (int result = refuse_while_capturing()) return result;
        auto module = std::make_shared<Module>();
        module->context = call.context;
        int result = starts_with(image, PRETEND) ? load_pretend(image, *module)
                     : starts_with(image, ELF)   ? load_cubin(image, *module)
                                                 : int(INVALID_IMAGE);
        if (!result) *out = handles<Module>().add(module);
        return result;
    });
}

std::map<std::string, Emulated> read_registry() {
    std::map<std::string, Emulated> all;
    const std::uint32_t* bytes = nullptr;
    std::uint32_t parameters = 0, threads = 0;
    const char* name = nullptr;
    for (std::size_t at = 0; emulator_kernel(at, &name, &bytes, &parameters, &threads); at++)
        all[name] = {name, {bytes, bytes + parameters}, static_cast<int>(threads)};
    return all;
}

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Numbers stand at multiples of their size, structures of pointers at multiples of eight.
std::size_t alignment_of(std::uint32_t bytes) {
    for (std::size_t alignment : {8, 4, 2})
        if (bytes % alignment == 0) return alignment;
    return 1;
}

} // namespace

const Emulated* emulated(const std::string& name) {
    static const auto& all = *new std::map<std::string, Emulated>(read_registry());
    auto found = all.find(name);
    return found == all.end() ? nullptr : &found->second;
}

std::vector<std::size_t> Function::offsets() const {
    std::vector<std::size_t> all;
    std::size_t next = 0;
    for (std::uint32_t bytes : kernel->parameter_bytes) {
        next = round_up(next, alignment_of(bytes));
        all.push_back(next);
        next += bytes;
    }
    return all;
}

std::size_t Function::parameters_bytes() const {
    return kernel->parameter_bytes.empty() ? 0 : offsets().back() + kernel->parameter_bytes.back();
}

int Function::blocks_a_multiprocessor(int threads, std::size_t dynamic_shared_bytes) const {
    int warps = (threads + 31) / 32;
    int blocks = std::min(BLOCKS_A_MULTIPROCESSOR_MAX, THREADS_A_MULTIPROCESSOR_MAX / (32 * std::max(warps, 1)));
    std::size_t shared = dynamic_shared_bytes + static_cast<std::size_t>(compiled.shared_bytes + SHARED_BYTES_RESERVED);
    blocks = std::min(blocks, static_cast<int>(SHARED_BYTES_A_MULTIPROCESSOR / shared));
    if (!compiled.registers) return blocks;
    // Registers are given to warps in pieces of 256.
    std::size_t of_a_warp = round_up(static_cast<std::size_t>(compiled.registers) * 32, 256);
    return std::min(blocks, static_cast<int>(REGISTERS_A_MULTIPROCESSOR / (of_a_warp * warps)));
}

} // namespace software

using namespace software;

API cuModuleLoadData(void** out, const void* image) {
    return load(__func__, out, static_cast<const unsigned char*>(image));
}

API cuModuleLoadDataEx(void** out, const void* image, unsigned, int*, void**) {
    return load(__func__, out, static_cast<const unsigned char*>(image));
}

API cuModuleLoad(void** out, const char* path) {
    std::FILE* file = path ? std::fopen(path, "rb") : nullptr;
    if (!file) return FILE_NOT_FOUND;
    std::vector<unsigned char> image;
    unsigned char piece[65536];
    while (std::size_t count = std::fread(piece, 1, sizeof piece, file))
        image.insert(image.end(), piece, piece + count);
    std::fclose(file);
    image.resize(image.size() + 64);
    return load(__func__, out, image.data());
}

API cuModuleUnload(void* module) { return destroyed<Module>(__func__, module); }

API cuModuleGetFunction(void** out, void* handle, const char* name) {
    return with<Module>(__func__, handle, [&](Call&, const std::shared_ptr<Module>& module) -> int {
        if (!out || !name) return INVALID_VALUE;
        auto function = std::make_shared<Function>();
        function->context = module->context;
        if (module->kernels) {
            auto found = module->kernels->find(name);
            if (found == module->kernels->end()) return NOT_FOUND;
            function->compiled = found->second;
        }
        function->kernel = emulated(name);
        if (!function->kernel) {
            trace("cuModuleGetFunction: the emulator has no kernel %s", name);
            return NOT_FOUND;
        }
        function->dynamic_shared_bytes_max = SHARED_BYTES_DEFAULT - function->compiled.shared_bytes;
        *out = handles<Function>().add(function);
        return SUCCESS;
    });
}

// No kernel has variables of its own.
API cuModuleGetGlobal_v2(Address*, std::size_t*, void* handle, const char*) {
    return with<Module>(__func__, handle, [](Call&, const std::shared_ptr<Module>&) -> int { return NOT_FOUND; });
}
