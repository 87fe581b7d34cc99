// Every name of abi.h that can be compared with another view of the same interface.
#pragma once

#define NVRTC_ABI_CONSTANTS(NAME)              \
    NAME(NVRTC_SUCCESS)                        \
    NAME(NVRTC_ERROR_OUT_OF_MEMORY)            \
    NAME(NVRTC_ERROR_PROGRAM_CREATION_FAILURE) \
    NAME(NVRTC_ERROR_INVALID_INPUT)            \
    NAME(NVRTC_ERROR_INVALID_PROGRAM)          \
    NAME(NVRTC_ERROR_INVALID_OPTION)           \
    NAME(NVRTC_ERROR_COMPILATION)

#define NVRTC_ABI_TYPES(NAME) \
    NAME(nvrtcResult)         \
    NAME(nvrtcProgram)

#define NVRTC_ABI_FIELDS(NAME)

#define NVRTC_ABI_FUNCTIONS(NAME)   \
    NAME(nvrtcGetErrorString)       \
    NAME(nvrtcVersion)              \
    NAME(nvrtcGetNumSupportedArchs) \
    NAME(nvrtcGetSupportedArchs)    \
    NAME(nvrtcCreateProgram)        \
    NAME(nvrtcDestroyProgram)       \
    NAME(nvrtcCompileProgram)       \
    NAME(nvrtcGetCUBINSize)         \
    NAME(nvrtcGetCUBIN)             \
    NAME(nvrtcGetProgramLogSize)    \
    NAME(nvrtcGetProgramLog)
