// Our view of nvrtc.h: what kernels are compiled through. Held against the real header by `cargo xtask abi`.
#pragma once
#include <cstddef>
#include <cstdint>

// The check includes this file in a namespace, beside the real header, and wants no C linkage then.
#ifndef SOFTWARE_LINKAGE
#define SOFTWARE_LINKAGE extern "C" __attribute__((visibility("default")))
#endif

enum nvrtcResult : unsigned {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_OUT_OF_MEMORY = 1,
    NVRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

typedef struct _nvrtcProgram* nvrtcProgram;

SOFTWARE_LINKAGE const char* nvrtcGetErrorString(nvrtcResult result);
SOFTWARE_LINKAGE nvrtcResult nvrtcVersion(int* major, int* minor);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetNumSupportedArchs(int* numArchs);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetSupportedArchs(int* supportedArchs);
SOFTWARE_LINKAGE nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* text, const char* name,
                                                int headerCount, const char* const* headers,
                                                const char* const* includeNames);
SOFTWARE_LINKAGE nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program);
SOFTWARE_LINKAGE nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int optionCount, const char* const* options);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* bytes);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, std::size_t* bytes);
SOFTWARE_LINKAGE nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log);
