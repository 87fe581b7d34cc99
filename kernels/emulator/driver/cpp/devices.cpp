#include "devices.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "api.h"
#include "settings.h"

namespace software {

namespace {

// What an H100 says, but for the multiprocessors: with four of them grids stay small.
const std::map<int, int>& attributes() {
    static const auto& all = *new std::map<int, int>{
        {1, THREADS_A_BLOCK_MAX},          // threads a block
        {2, 1024},                         // along x
        {3, 1024},                         // along y
        {4, 64},                           // along z
        {5, 0x7fffffff},                   // blocks along x
        {6, 65535},                        // along y
        {7, 65535},                        // along z
        {8, SHARED_BYTES_DEFAULT},         // shared memory a block
        {9, 65536},                        // constant memory
        {10, 32},                          // threads a warp
        {11, 0x7fffffff},                  // pitch
        {12, REGISTERS_A_MULTIPROCESSOR},  // registers a block
        {13, 1980000},                     // clock rate in kHz
        {14, 512},                         // alignment of textures
        {15, 1},                           // copies overlap kernels
        {16, MULTIPROCESSORS},             // multiprocessors
        {17, 0},                           // no limit on a kernel's time
        {18, 0},                           // not integrated
        {19, 1},                           // maps the host's memory
        {20, 0},                           // compute mode: default
        {29, 512},                         // alignment of surfaces
        {31, 1},                           // concurrent kernels
        {32, 1},                           // error correction
        {36, 2619000},                     // memory clock in kHz
        {37, 5120},                        // bits of the memory's bus
        {38, 50 << 20},                    // L2 cache
        {39, THREADS_A_MULTIPROCESSOR_MAX},// threads a multiprocessor
        {40, 3},                           // copy engines
        {41, 1},                           // unified addresses
        {78, 1},                           // priorities of streams
        {79, 1},                           // L1 caches global memory
        {80, 1},                           // and local memory
        {81, SHARED_BYTES_A_MULTIPROCESSOR},
        {82, REGISTERS_A_MULTIPROCESSOR},
        {83, 0},                           // no managed memory
        {89, 0},                           // and none concurrently
        {90, 1},                           // preemption
        {91, 1},                           // registered memory has the host's address
        {95, 1},                           // cooperative launches
        {97, SHARED_BYTES_MAX},            // shared memory that a block may ask for
        {99, 1},                           // registers the host's memory
        {102, settings().shares},          // virtual memory management
        {103, settings().shares},          // handles that are file descriptors
        {106, BLOCKS_A_MULTIPROCESSOR_MAX},
        {111, SHARED_BYTES_RESERVED},
        {115, 1},                          // cuMemAllocAsync
        {116, 0},                          // no RDMA
        {120, 0},                          // no clusters: they are not emulated
    };
    return all;
}

// Functions whose whole answer is a number of a device.
template <class Body> int of_device(const char* name, int ordinal, Body body) {
    return initialised(name, [&](Call&) -> int {
        if (ordinal < 0 || ordinal >= static_cast<int>(devices().size())) return INVALID_DEVICE;
        return body(devices()[ordinal]);
    });
}

int give_uuid(const char* name, Uuid* out, int ordinal) {
    return of_device(name, ordinal, [&](Device& device) -> int {
        if (!out) return INVALID_VALUE;
        const unsigned char bytes[16] = {0xc0, 0x50, 0x27, 0x00, 0x5f, 0x7a, 0x4e, 0x00,
                                         0x80, 0x00, 0x50, 0xf7, 0x3a, 0x4e, 0x00, 0x00};
        std::memcpy(out->bytes, bytes, sizeof bytes);
        out->bytes[15] = static_cast<unsigned char>(device.ordinal);
        return SUCCESS;
    });
}

} // namespace

void Device::use(std::size_t bytes) {
    used += bytes;
    used_max = std::max(used_max, used);
}

std::string Device::name() const { return "Consort software device " + std::to_string(ordinal); }

std::deque<Device>& devices() {
    static auto& all = *[] {
        auto* made = new std::deque<Device>(static_cast<std::size_t>(settings().devices));
        for (std::size_t at = 0; at < made->size(); at++) {
            (*made)[at].ordinal = static_cast<int>(at);
            (*made)[at].memory_bytes = settings().memory_bytes;
        }
        return made;
    }();
    return all;
}

} // namespace software

using namespace software;

API cuDeviceGetCount(int* count) {
    return initialised(__func__, [&](Call&) -> int {
        if (!count) return INVALID_VALUE;
        *count = static_cast<int>(devices().size());
        return SUCCESS;
    });
}

API cuDeviceGet(int* device, int ordinal) {
    return of_device(__func__, ordinal, [&](Device&) -> int {
        if (!device) return INVALID_VALUE;
        *device = ordinal;
        return SUCCESS;
    });
}

API cuDeviceGetName(char* name, int bytes, int ordinal) {
    return of_device(__func__, ordinal, [&](Device& device) -> int {
        if (!name || bytes <= 0) return INVALID_VALUE;
        std::snprintf(name, static_cast<std::size_t>(bytes), "%s", device.name().c_str());
        return SUCCESS;
    });
}

API cuDeviceGetUuid(Uuid* uuid, int ordinal) { return give_uuid(__func__, uuid, ordinal); }
API cuDeviceGetUuid_v2(Uuid* uuid, int ordinal) { return give_uuid(__func__, uuid, ordinal); }

API cuDeviceTotalMem_v2(std::size_t* bytes, int ordinal) {
    return of_device(__func__, ordinal, [&](Device& device) -> int {
        if (!bytes) return INVALID_VALUE;
        *bytes = device.memory_bytes;
        return SUCCESS;
    });
}

API cuDeviceGetPCIBusId(char* id, int bytes, int ordinal) {
    return of_device(__func__, ordinal, [&](Device& device) -> int {
        if (!id || bytes < 13) return INVALID_VALUE;
        std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0", 0x40 + device.ordinal);
        return SUCCESS;
    });
}

API cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
    return of_device(__func__, ordinal, [&](Device& device) -> int {
        constexpr int PCI_BUS = 33, MAJOR = 75, MINOR = 76;
        if (!value) return INVALID_VALUE;
        if (attribute == MAJOR || attribute == MINOR) {
            *value = attribute == MAJOR ? settings().capability / 10 : settings().capability % 10;
        } else if (attribute == PCI_BUS) {
            *value = 0x40 + device.ordinal;
        } else if (auto known = attributes().find(attribute); known != attributes().end()) {
            *value = known->second;
        } else {
            trace("cuDeviceGetAttribute: attribute %d is unknown and answered with 0", attribute);
            *value = 0;
        }
        return SUCCESS;
    });
}

API cuDeviceCanAccessPeer(int* can, int ordinal, int peer) {
    return of_device(__func__, ordinal, [&](Device&) -> int {
        if (!can || peer < 0 || peer >= static_cast<int>(devices().size())) return INVALID_VALUE;
        *can = settings().peers && ordinal != peer;
        return SUCCESS;
    });
}

API cuDeviceGetP2PAttribute(int* value, int attribute, int ordinal, int peer) {
    return of_device(__func__, ordinal, [&](Device&) -> int {
        constexpr int PERFORMANCE_RANK = 1, ATTRIBUTES = 5;
        if (!value || peer < 0 || peer >= static_cast<int>(devices().size()) || peer == ordinal) return INVALID_VALUE;
        if (attribute < 1 || attribute > ATTRIBUTES) return INVALID_VALUE;
        // Every pair is linked alike: rank 0, and everything supported, or nothing.
        *value = settings().peers && attribute != PERFORMANCE_RANK;
        return SUCCESS;
    });
}
