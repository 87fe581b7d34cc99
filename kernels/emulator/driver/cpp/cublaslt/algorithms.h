// The ways to multiply, as callers keep them: 64 bytes that say which one and how it is set up.
//
// Two algorithms, each with two variants, and the second may split k. All of them yield other last bits, as on a
// device, and none looks at m or n: a row's result depends on the algorithm and on k alone.
#pragma once
#include <vector>

#include "abi.h"
#include "problem.h"

namespace lt {

enum AlgorithmId : std::int32_t {
    // Each sum in one go, or in short runs. Takes operands at any address.
    SIMPLE = 0,
    // Sums over tiles of k as tensor cores make them. Wants everything aligned to 16 bytes.
    TILED = 1,
};

// What lies in the caller's cublasLtMatmulAlgo_t.
struct Algorithm {
    std::uint32_t mark = 0;
    std::int32_t id = SIMPLE;
    std::uint32_t compute = 0, scale = 0, a = 0, b = 0, c = 0, d = 0;
    std::uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
    std::int32_t splits = 1;
    std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    std::uint32_t swizzling = 0, option = 0;
    std::uint32_t stages = CUBLASLT_MATMUL_STAGES_UNDEFINED;
    std::uint16_t inner_shape = 0, cluster_shape = 0;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

// What an algorithm can do.
struct Capabilities {
    std::int32_t splits_max;
    std::uint32_t reductions;
    std::uint32_t tile, stages;
    std::uint32_t option_max;
    std::uint64_t alignment_bytes;
};

// Null for numbers that name none.
const Capabilities* capabilities_of(std::int32_t id);

// Whether these bytes are an algorithm of this library.
bool is_one(const Algorithm& algorithm);

Algorithm set_up(AlgorithmId id, std::uint32_t compute, std::uint32_t scale, std::uint32_t a, std::uint32_t b,
                 std::uint32_t c, std::uint32_t d);

// A newly set up one for matrices of `problem`'s types.
Algorithm algorithm_for(const Problem& problem, AlgorithmId id);

Algorithm read(const cublasLtMatmulAlgo_t& opaque);
cublasLtMatmulAlgo_t written(const Algorithm& algorithm);

// In which order the products of one sum are added: k is cut into `parts`, those into chunks of `chunk`; a chunk's
// products are added up from zero, its sum goes to the part's, the parts' sums are added last.
struct Order {
    std::uint64_t parts, chunk;
};
Order order_of(const Algorithm& algorithm, std::uint64_t k);

// The products of one part: `begin <= i < end`.
struct Range {
    std::uint64_t begin, end;
};
Range part_of(const Order& order, std::uint64_t k, std::uint64_t part);

// The alignment in bytes that an algorithm wants of operands of a type: address, columns and batches.
std::uint64_t alignment_of(const Algorithm& algorithm, std::uint32_t type);

// Numerical implementation flags, as CUBLASLT_MATMUL_PREF_IMPL_MASK selects by them.
std::uint64_t implementation_of(const Algorithm& algorithm);

struct Requirements {
    std::uint64_t workspace_bytes = 0;
    float waves = 0;
};

// Whether an algorithm fits a problem, addresses aside. INVALID_VALUE for what is no algorithm or is one for other
// types, NOT_SUPPORTED for a configuration that it does not have or a layout that it cannot read.
cublasStatus_t check(const Algorithm& algorithm, const Problem& problem, Requirements& requirements);

// Those that fit, the presumably fastest first, at most `wanted`.
struct Choice {
    Algorithm algorithm;
    Requirements requirements;
};
std::vector<Choice> choose(const Problem& problem, const Preference& preference, std::size_t wanted);

} // namespace lt
