// What a kernel says of itself, and how many of its blocks fit.
#include <algorithm>

#include "api.h"
#include "modules.h"
#include "settings.h"

using namespace software;

namespace {

enum FunctionAttribute {
    THREADS_MAX = 0,
    SHARED_BYTES = 1,
    CONSTANT_BYTES = 2,
    LOCAL_BYTES = 3,
    REGISTERS = 4,
    PTX_VERSION = 5,
    BINARY_VERSION = 6,
    DYNAMIC_SHARED_BYTES_MAX = 8,
    CARVEOUT = 9,
};

int blocks(const char* name, int* out, void* handle, int threads, std::size_t shared_bytes) {
    return with<Function>(name, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (!out || threads <= 0) return INVALID_VALUE;
        bool fits = threads <= function->kernel->threads_max &&
                    shared_bytes <= static_cast<std::size_t>(function->dynamic_shared_bytes_max);
        *out = fits ? function->blocks_a_multiprocessor(threads, shared_bytes) : 0;
        return SUCCESS;
    });
}

using SharedOfBlock = std::size_t (*)(int threads);

// The block of most threads on a multiprocessor, the largest of those.
int best_block(const char* name, int* grid, int* block, void* handle, SharedOfBlock shared_of, std::size_t shared_bytes,
               int limit) {
    return with<Function>(name, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (!grid || !block) return INVALID_VALUE;
        int most = function->kernel->threads_max, best = 0, best_blocks = 0;
        if (limit > 0) most = std::min(most, limit);
        for (int threads = most / 32 * 32; threads > 0; threads -= 32) {
            std::size_t shared = shared_of ? shared_of(threads) : shared_bytes;
            int count = function->blocks_a_multiprocessor(threads, shared);
            if (count * threads > best * best_blocks) best = threads, best_blocks = count;
        }
        *block = best;
        *grid = best_blocks * MULTIPROCESSORS;
        return SUCCESS;
    });
}

} // namespace

API cuFuncGetAttribute(int* value, int attribute, void* handle) {
    return with<Function>(__func__, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (!value) return INVALID_VALUE;
        switch (attribute) {
        case THREADS_MAX: *value = function->kernel->threads_max; break;
        case SHARED_BYTES: *value = function->compiled.shared_bytes; break;
        case REGISTERS: *value = function->compiled.registers; break;
        case PTX_VERSION:
        case BINARY_VERSION: *value = settings().capability; break;
        case DYNAMIC_SHARED_BYTES_MAX: *value = function->dynamic_shared_bytes_max; break;
        case CONSTANT_BYTES:
        case LOCAL_BYTES: *value = 0; break;
        case CARVEOUT: *value = -1; break;
        default: trace("cuFuncGetAttribute: attribute %d is unknown and answered with 0", attribute); *value = 0;
        }
        return SUCCESS;
    });
}

API cuFuncSetAttribute(void* handle, int attribute, int value) {
    return with<Function>(__func__, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (attribute == CARVEOUT) return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
        if (attribute != DYNAMIC_SHARED_BYTES_MAX) return INVALID_VALUE;
        if (value < 0 || value > SHARED_BYTES_MAX - function->compiled.shared_bytes) return INVALID_VALUE;
        function->dynamic_shared_bytes_max = value;
        return SUCCESS;
    });
}

API cuFuncSetCacheConfig(void* handle, int) {
    return with<Function>(__func__, handle, [](Call&, const std::shared_ptr<Function>&) -> int { return SUCCESS; });
}

API cuFuncGetParamInfo(void* handle, std::size_t index, std::size_t* offset, std::size_t* bytes) {
    return with<Function>(__func__, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (!offset || index >= function->kernel->parameter_bytes.size()) return INVALID_VALUE;
        *offset = function->offsets()[index];
        if (bytes) *bytes = function->kernel->parameter_bytes[index];
        return SUCCESS;
    });
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* handle, int threads, std::size_t shared_bytes) {
    return blocks(__func__, out, handle, threads, shared_bytes);
}

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, void* handle, int threads, std::size_t shared_bytes,
                                                         unsigned) {
    return blocks(__func__, out, handle, threads, shared_bytes);
}

API cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void* handle, SharedOfBlock shared_of,
                                     std::size_t shared_bytes, int limit) {
    return best_block(__func__, grid, block, handle, shared_of, shared_bytes, limit);
}

API cuOccupancyMaxPotentialBlockSizeWithFlags(int* grid, int* block, void* handle, SharedOfBlock shared_of,
                                              std::size_t shared_bytes, int limit, unsigned) {
    return best_block(__func__, grid, block, handle, shared_of, shared_bytes, limit);
}

API cuOccupancyAvailableDynamicSMemPerBlock(std::size_t* bytes, void* handle, int blocks, int) {
    return with<Function>(__func__, handle, [&](Call&, const std::shared_ptr<Function>& function) -> int {
        if (!bytes || blocks <= 0) return INVALID_VALUE;
        int share = SHARED_BYTES_A_MULTIPROCESSOR / blocks - SHARED_BYTES_RESERVED - function->compiled.shared_bytes;
        *bytes = static_cast<std::size_t>(std::clamp(share, 0, SHARED_BYTES_MAX - function->compiled.shared_bytes));
        return SUCCESS;
    });
}
