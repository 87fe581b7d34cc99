// libnvrtc.so.12: the functions, over the pretend compiler.
#include <algorithm>
#include <cstring>

#include "../living.h"
#include "abi.h"
#include "compiler.h"

namespace {

Living<nvrtcProgram, nvrtc::Program>& programs() { return living<nvrtcProgram, nvrtc::Program>(); }

template <class Read> nvrtcResult with_program(nvrtcProgram handle, const void* out, Read read) {
    std::shared_ptr<nvrtc::Program> program = programs().find(handle);
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    if (!out) return NVRTC_ERROR_INVALID_INPUT;
    return read(*program);
}

} // namespace

const char* nvrtcGetErrorString(nvrtcResult result) {
    switch (result) {
    case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
    case NVRTC_ERROR_OUT_OF_MEMORY: return "NVRTC_ERROR_OUT_OF_MEMORY";
    case NVRTC_ERROR_PROGRAM_CREATION_FAILURE: return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case NVRTC_ERROR_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case NVRTC_ERROR_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case NVRTC_ERROR_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
    }
    return "NVRTC_ERROR unknown";
}

nvrtcResult nvrtcVersion(int* major, int* minor) {
    if (!major || !minor) return NVRTC_ERROR_INVALID_INPUT;
    *major = 12;
    *minor = 9;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    if (!count) return NVRTC_ERROR_INVALID_INPUT;
    *count = static_cast<int>(nvrtc::architectures().size());
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int* numbers) {
    if (!numbers) return NVRTC_ERROR_INVALID_INPUT;
    std::copy(nvrtc::architectures().begin(), nvrtc::architectures().end(), numbers);
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* text, const char* name, int headerCount,
                               const char* const* headers, const char* const* includeNames) {
    bool headers_missing = headerCount > 0 && (!headers || !includeNames);
    if (!program || !text || headerCount < 0 || headers_missing) return NVRTC_ERROR_INVALID_INPUT;
    nvrtc::Program made;
    made.text = text;
    made.name = name ? name : "default_program";
    for (int i = 0; i < headerCount; i++) {
        if (!headers[i] || !includeNames[i]) return NVRTC_ERROR_INVALID_INPUT;
        made.headers.push_back(includeNames[i]);
    }
    *program = programs().add(std::move(made));
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
    if (!program || !programs().remove(*program)) return NVRTC_ERROR_INVALID_PROGRAM;
    *program = nullptr;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram handle, int optionCount, const char* const* options) {
    std::shared_ptr<nvrtc::Program> program = programs().find(handle);
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    if (optionCount < 0 || (optionCount > 0 && !options)) return NVRTC_ERROR_INVALID_INPUT;
    std::vector<std::string> given;
    for (int i = 0; i < optionCount; i++) {
        if (!options[i]) return NVRTC_ERROR_INVALID_INPUT;
        given.push_back(options[i]);
    }
    switch (nvrtc::compile(*program, given)) {
    case nvrtc::Outcome::Compiled: return NVRTC_SUCCESS;
    case nvrtc::Outcome::TextIsWrong: return NVRTC_ERROR_COMPILATION;
    case nvrtc::Outcome::OptionIsWrong: return NVRTC_ERROR_INVALID_OPTION;
    }
    return NVRTC_ERROR_INVALID_INPUT;
}

nvrtcResult nvrtcGetCUBINSize(nvrtcProgram handle, std::size_t* bytes) {
    return with_program(handle, bytes, [&](const nvrtc::Program& program) {
        *bytes = program.image.size();
        return NVRTC_SUCCESS;
    });
}

nvrtcResult nvrtcGetCUBIN(nvrtcProgram handle, char* cubin) {
    return with_program(handle, cubin, [&](const nvrtc::Program& program) {
        std::memcpy(cubin, program.image.data(), program.image.size());
        return NVRTC_SUCCESS;
    });
}

// The log counts its final NUL.
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram handle, std::size_t* bytes) {
    return with_program(handle, bytes, [&](const nvrtc::Program& program) {
        *bytes = program.log.size() + 1;
        return NVRTC_SUCCESS;
    });
}

nvrtcResult nvrtcGetProgramLog(nvrtcProgram handle, char* log) {
    return with_program(handle, log, [&](const nvrtc::Program& program) {
        std::memcpy(log, program.log.c_str(), program.log.size() + 1);
        return NVRTC_SUCCESS;
    });
}
