// A compiler that compiles nothing: the emulator has the kernels already, compiled from the same texts.
//
// It refuses what could not be one of them, and otherwise answers an image that the software driver loads as a module
// of every kernel of the emulator.
#include "compiler.h"

#include <algorithm>

namespace nvrtc {

namespace {

const char IMAGE_HEAD[] = "CONSORT SOFTWARE CUBIN\n";
const char PRELUDE[] = "prelude.cuh";

bool starts_with(const std::string& text, const std::string& start) {
    return text.compare(0, start.size(), start) == 0;
}

// The file that a line includes, if it includes one.
std::optional<std::string> included_by(const std::string& line) {
    std::size_t at = line.find_first_not_of(" \t");
    if (at == std::string::npos || line.compare(at, 8, "#include") != 0) return std::nullopt;
    std::size_t open = line.find('"', at + 8);
    std::size_t close = open == std::string::npos ? open : line.find('"', open + 1);
    if (close == std::string::npos) {
        std::size_t name = line.find_first_not_of(" \t", at + 8);
        return name == std::string::npos ? "" : line.substr(name);
    }
    return line.substr(open + 1, close - open - 1);
}

// A complaint in the compiler's form, with the line where it arises.
std::string complaint(const Program& program, std::size_t line, const std::string& what) {
    return program.name + "(" + std::to_string(line) + "): error: " + what + "\n";
}

bool has_header(const Program& program, const std::string& name) {
    return std::find(program.headers.begin(), program.headers.end(), name) != program.headers.end();
}

// What is wrong with the text; empty if nothing is.
std::string complaints_about(const Program& program) {
    bool prelude = false, kernel = false;
    std::string found;
    std::size_t number = 0;
    for (std::size_t at = 0; at < program.text.size(); number++) {
        std::size_t end = std::min(program.text.find('\n', at), program.text.size());
        std::string line = program.text.substr(at, end - at);
        at = end + 1;
        if (std::optional<std::string> file = included_by(line)) {
            prelude |= *file == PRELUDE;
            if (!has_header(program, *file))
                found += complaint(program, number + 1, "cannot open source file \"" + *file + "\"");
        }
        kernel |= line.substr(0, line.find("//")).find("KERNEL(") != std::string::npos;
    }
    if (!prelude) found += complaint(program, 1, "the text does not include prelude.cuh");
    if (!kernel) found += complaint(program, 1, "the text defines no kernel: KERNEL( stands nowhere");
    return found;
}

// The value of `--gpu-architecture=sm_90a`, if it is one of ours.
std::optional<std::string> architecture_of(const std::string& option) {
    const std::string start = "--gpu-architecture=";
    if (!starts_with(option, start + "sm_")) return std::nullopt;
    std::string value = option.substr(start.size());
    for (int number : architectures()) {
        std::string plain = "sm_" + std::to_string(number);
        if (value == plain || (number >= 90 && value == plain + "a")) return value;
    }
    return std::nullopt;
}

bool is_known_option(const std::string& option) {
    return starts_with(option, "--std=") || starts_with(option, "--ptxas-options=");
}

} // namespace

const std::vector<int>& architectures() {
    static const std::vector<int> numbers = {80, 86, 89, 90, 100, 120};
    return numbers;
}

Outcome compile(Program& program, const std::vector<std::string>& options) {
    program.image.clear();
    program.log.clear();
    std::optional<std::string> architecture;
    for (const std::string& option : options) {
        if (starts_with(option, "--gpu-architecture=")) architecture = architecture_of(option);
        bool known = is_known_option(option) || architecture_of(option);
        if (!known) {
            program.log = "nvrtc: error: invalid value or option: " + option + "\n";
            return Outcome::OptionIsWrong;
        }
    }
    if (!architecture) {
        program.log = "nvrtc: error: no --gpu-architecture: the software driver wants to know it\n";
        return Outcome::OptionIsWrong;
    }
    program.log = complaints_about(program);
    if (!program.log.empty()) return Outcome::TextIsWrong;
    program.image = IMAGE_HEAD + program.name + "\n" + *architecture + "\n";
    return Outcome::Compiled;
}

} // namespace nvrtc
