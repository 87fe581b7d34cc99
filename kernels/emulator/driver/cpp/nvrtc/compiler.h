// What the pretend compiler does with a text.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace nvrtc {

// A text, and what its compilation left.
struct Program {
    std::string name;
    std::string text;
    std::vector<std::string> headers;
    std::string image;
    std::string log;
};

enum class Outcome { Compiled, TextIsWrong, OptionIsWrong };

// Makes `program.image`, or says in `program.log` why not.
Outcome compile(Program& program, const std::vector<std::string>& options);

// Compute capabilities, times ten, that it takes.
const std::vector<int>& architectures();

} // namespace nvrtc
