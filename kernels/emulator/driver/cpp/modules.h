// Modules and their kernels.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi.h"
#include "contexts.h"

namespace software {

// A kernel as the emulator has it.
struct Emulated {
    const char* name = nullptr;
    std::vector<std::uint32_t> parameter_bytes;
    int threads_max = 0;
};

// Null where the emulator has none of this name.
const Emulated* emulated(const std::string& name);

// A kernel as a cubin tells of it.
struct Compiled {
    std::vector<std::uint32_t> parameter_bytes;
    int registers = 0;
    int shared_bytes = 0;
};

struct Module {
    std::shared_ptr<Context> context;
    // Kernels of a cubin; nothing where the image stands for all that the emulator has.
    std::optional<std::map<std::string, Compiled>> kernels;
};

struct Function {
    std::shared_ptr<Context> context;
    const Emulated* kernel = nullptr;
    Compiled compiled;
    int dynamic_shared_bytes_max = 0;

    // Where parameters start in a buffer of all of them, and its bytes.
    std::vector<std::size_t> offsets() const;
    std::size_t parameters_bytes() const;
    // Blocks that a multiprocessor can hold.
    int blocks_a_multiprocessor(int threads, std::size_t dynamic_shared_bytes) const;
};

// ---- cubin.cpp ----

struct Cubin {
    // As 90 for sm_90.
    int architecture = 0;
    // Compiled for this architecture alone, not for later ones of its family.
    bool exact = false;
    std::map<std::string, Compiled> kernels;
};

// Reads an ELF image; nothing where it is no cubin.
std::optional<Cubin> read_cubin(const unsigned char* image);

} // namespace software
