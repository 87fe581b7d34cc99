#include "algorithms.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "refusal.h"

namespace lt {

namespace {

// Tells an algorithm from 64 bytes of anything.
constexpr std::uint32_t MARK = 0x50F7A160;
constexpr std::uint64_t TILE = 64;
constexpr std::uint64_t PROCESSORS = 132;

std::uint64_t chunks_in(std::uint64_t k, std::uint64_t chunk) { return (k + chunk - 1) / chunk; }

bool columns_are_aligned(const Layout& layout, std::uint64_t alignment) {
    std::uint64_t bytes = element_bytes(layout.type);
    bool batches_are = layout.batch_count == 1 || layout.batch_stride * bytes % alignment == 0;
    return layout.ld * bytes % alignment == 0 && batches_are;
}

cublasStatus_t check_types(const Algorithm& algorithm, const Problem& problem) {
    Algorithm wanted = algorithm_for(problem, static_cast<AlgorithmId>(algorithm.id));
    auto types = [](const Algorithm& of) { return std::tuple(of.compute, of.scale, of.a, of.b, of.c, of.d); };
    if (types(algorithm) == types(wanted)) return CUBLAS_STATUS_SUCCESS;
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was found for a problem of other types");
}

cublasStatus_t check_configuration(const Algorithm& algorithm, std::uint64_t k) {
    const Capabilities& can = *capabilities_of(algorithm.id);
    bool tile = algorithm.tile == CUBLASLT_MATMUL_TILE_UNDEFINED || algorithm.tile == can.tile;
    bool stages = algorithm.stages == CUBLASLT_MATMUL_STAGES_UNDEFINED || algorithm.stages == can.stages;
    bool shapes = algorithm.inner_shape == 0 && algorithm.cluster_shape == 0 && algorithm.swizzling == 0;
    if (!tile || !stages || !shapes || algorithm.option > can.option_max)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                      "algorithm %d has no tile %u, stages %u, option %u, swizzling or shapes like these",
                      algorithm.id, algorithm.tile, algorithm.stages, algorithm.option);
    if (algorithm.splits < 1 || algorithm.splits > can.splits_max)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "algorithm %d does not split k into %d", algorithm.id,
                      algorithm.splits);
    bool reduces = algorithm.reduction != CUBLASLT_REDUCTION_SCHEME_NONE;
    bool knows = !(algorithm.reduction & ~can.reductions);
    if (!knows || reduces != (algorithm.splits > 1))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%d splits do not go with reduction scheme %u", algorithm.splits,
                      algorithm.reduction);
    Order order = order_of(algorithm, k);
    if (order.parts > chunks_in(k, order.chunk))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "k = %llu is too little to split into %d",
                      static_cast<unsigned long long>(k), algorithm.splits);
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

const Capabilities* capabilities_of(std::int32_t id) {
    static const Capabilities simple = {
        1, CUBLASLT_REDUCTION_SCHEME_NONE, CUBLASLT_MATMUL_TILE_UNDEFINED, CUBLASLT_MATMUL_STAGES_UNDEFINED, 1, 1};
    static const Capabilities tiled = {
        16, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_MATMUL_TILE_64x64, CUBLASLT_MATMUL_STAGES_64x3, 1, 16};
    return id == SIMPLE ? &simple : id == TILED ? &tiled : nullptr;
}

bool is_one(const Algorithm& algorithm) { return algorithm.mark == MARK && capabilities_of(algorithm.id); }

Algorithm set_up(AlgorithmId id, std::uint32_t compute, std::uint32_t scale, std::uint32_t a, std::uint32_t b,
                 std::uint32_t c, std::uint32_t d) {
    Algorithm made;
    made.mark = MARK;
    made.id = id;
    made.compute = compute;
    made.scale = scale;
    made.a = a;
    made.b = b;
    made.c = c;
    made.d = d;
    return made;
}

Algorithm read(const cublasLtMatmulAlgo_t& opaque) {
    Algorithm algorithm;
    std::memcpy(static_cast<void*>(&algorithm), &opaque, sizeof algorithm);
    return algorithm;
}

cublasLtMatmulAlgo_t written(const Algorithm& algorithm) {
    cublasLtMatmulAlgo_t opaque = {};
    std::memcpy(&opaque, &algorithm, sizeof algorithm);
    return opaque;
}

Algorithm algorithm_for(const Problem& problem, AlgorithmId id) {
    const Operation& operation = problem.operation;
    return set_up(id, operation.compute, operation.scale, problem.a.type, problem.b.type, problem.c.type,
                  problem.d.type);
}

Order order_of(const Algorithm& algorithm, std::uint64_t k) {
    std::uint64_t parts = static_cast<std::uint64_t>(algorithm.splits);
    if (algorithm.id == SIMPLE) return {1, algorithm.option == 0 ? k : 8};
    return {parts, algorithm.option == 0 ? 32u : 16u};
}

std::uint64_t alignment_of(const Algorithm& algorithm, std::uint32_t type) {
    return std::max(capabilities_of(algorithm.id)->alignment_bytes, element_bytes(type));
}

Range part_of(const Order& order, std::uint64_t k, std::uint64_t part) {
    std::uint64_t chunks = chunks_in(k, order.chunk);
    std::uint64_t begin = chunks * part / order.parts * order.chunk;
    std::uint64_t end = chunks * (part + 1) / order.parts * order.chunk;
    return {begin, std::min(end, k)};
}

std::uint64_t implementation_of(const Algorithm& algorithm) {
    // As in the real header: fused multiply-add or half-precision tensor cores, and a 32-bit accumulator.
    constexpr std::uint64_t fma = 0x1, tensor_cores = 0x2, sums_in_32_bits = 0x2 << 8;
    std::uint64_t input = algorithm.a == CUDA_R_16F ? 0x1 : algorithm.a == CUDA_R_16BF ? 0x2 : 0x8;
    if (algorithm.compute == CUBLAS_COMPUTE_32F_FAST_TF32) input = 0x4;
    return (algorithm.id == SIMPLE ? fma : tensor_cores) | sums_in_32_bits | input << 16;
}

cublasStatus_t check(const Algorithm& algorithm, const Problem& problem, Requirements& requirements) {
    if (!is_one(algorithm))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was never initialised, or is not this library's");
    if (cublasStatus_t status = check_types(algorithm, problem)) return status;
    if (cublasStatus_t status = check_configuration(algorithm, problem.k)) return status;
    for (const Layout* layout : {&problem.a, &problem.b, &problem.c, &problem.d}) {
        std::uint64_t alignment = alignment_of(algorithm, layout->type);
        if (!columns_are_aligned(*layout, alignment))
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                          "algorithm %d wants columns and batches aligned to %llu bytes; a leading dimension is %lld",
                          algorithm.id, static_cast<unsigned long long>(alignment),
                          static_cast<long long>(layout->ld));
    }
    std::uint64_t parts = order_of(algorithm, problem.k).parts;
    std::uint64_t results = problem.m * problem.n;
    bool overflows = __builtin_mul_overflow(results, problem.batches * parts * sizeof(float), &results);
    if (overflows) return refuse(CUBLAS_STATUS_INVALID_VALUE, "more results than memory can hold");
    requirements.workspace_bytes = parts > 1 ? results : 0;
    auto tiles = [](std::uint64_t extent) { return (extent + TILE - 1) / TILE; };
    std::uint64_t blocks = tiles(problem.m) * tiles(problem.n) * problem.batches * parts;
    requirements.waves = static_cast<float>(blocks) / PROCESSORS;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace lt
