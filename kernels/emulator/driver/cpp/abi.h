// The part of CUDA's binary interface that the software driver offers: numbers and layouts as `cuda.h` has them.
#pragma once
#include <cstddef>
#include <cstdint>

// A function of the interface. Everything else in the library is hidden. (Whoever compares this file with the real
// header includes it in a namespace, and wants no C linkage then.)
#ifndef API
#define API extern "C" __attribute__((visibility("default"))) int
#endif

namespace software {

// An address that a kernel or a copy uses: of device memory, or of pinned memory of the host.
using Address = std::uint64_t;

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    FILE_NOT_FOUND = 301,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    GRAPH_EXEC_UPDATE_FAILURE = 910,
};

enum StreamFlags : unsigned { STREAM_NON_BLOCKING = 1 };
enum EventFlags : unsigned { EVENT_DISABLE_TIMING = 2 };
enum CaptureStatus : int { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_STATUS_INVALIDATED };
enum CaptureMode : int { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum HostRegisterFlags : unsigned { HOST_PORTABLE = 1, HOST_DEVICE_MAP = 2 };

struct Uuid {
    unsigned char bytes[16];
};
static_assert(sizeof(Uuid) == 16);

struct LaunchAttribute {
    std::uint32_t id;
    char pad[4];
    char value[64];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
    std::uint32_t grid[3];
    std::uint32_t block[3];
    std::uint32_t shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    std::uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

struct MemoryLocation {
    std::uint32_t type;
    std::int32_t id;
};

struct MemoryProperties {
    std::uint32_t type;
    std::uint32_t handle_types;
    MemoryLocation location;
    void* win32_data;
    struct {
        unsigned char compression, rdma;
        std::uint16_t usage;
        unsigned char reserved[4];
    } flags;
};
static_assert(sizeof(MemoryProperties) == 32 && offsetof(MemoryProperties, win32_data) == 16);

struct MemoryAccess {
    MemoryLocation location;
    std::uint32_t flags;
};
static_assert(sizeof(MemoryAccess) == 12);

enum MemoryLocationType : std::uint32_t { LOCATION_DEVICE = 1 };
enum MemoryType : std::uint32_t { MEMORY_PINNED = 1 };
enum MemoryHandleType : std::uint32_t { HANDLE_POSIX_FILE = 1 };
enum MemoryAccessFlags : std::uint32_t { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

struct GraphUpdateInfo {
    std::uint32_t result;
    void* error_node;
    void* error_from_node;
};
static_assert(sizeof(GraphUpdateInfo) == 24);

} // namespace software

// Declared in one place, so that a definition with other parameters does not compile.
#include "functions.h"
