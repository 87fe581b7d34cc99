// What callers do with algorithms besides running them.
#include <cstddef>

#include "algorithms.h"
#include "attributes.h"
#include "handle.h"
#include "refusal.h"

using namespace lt;

namespace {

const Attribute CONFIGURATION[] = {
    {CUBLASLT_ALGO_CONFIG_ID, offsetof(Algorithm, id), sizeof(Algorithm::id), true},
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_TILE_ID, Algorithm, tile),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, Algorithm, splits),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, Algorithm, reduction),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, Algorithm, swizzling),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, Algorithm, option),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_STAGES_ID, Algorithm, stages),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, Algorithm, inner_shape),
    LT_ATTRIBUTE(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, Algorithm, cluster_shape),
};

} // namespace

cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                        cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d,
                                        int wanted, int* ids, int* found) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (cublasStatus_t status = check_handle(handle)) return status;
    if (wanted <= 0 || !ids || !found)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%d algorithms wanted, or nowhere to put them", wanted);
    *found = 0;
    if (!types_are_supported(compute, scale, a, b, c, d)) return CUBLAS_STATUS_SUCCESS;
    for (int id : {TILED, SIMPLE})
        if (*found < wanted) ids[(*found)++] = id;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                      cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int id,
                                      cublasLtMatmulAlgo_t* algorithm) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (cublasStatus_t status = check_handle(handle)) return status;
    if (!algorithm || !capabilities_of(id)) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no algorithm is called %d", id);
    if (!types_are_supported(compute, scale, a, b, c, d))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm for these types");
    *algorithm = written(set_up(static_cast<AlgorithmId>(id), compute, scale, a, b, c, d));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* opaque,
                                                 cublasLtMatmulAlgoCapAttributes_t attribute, void* value,
                                                 std::size_t bytes, std::size_t* size) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (!opaque || !is_one(read(*opaque))) return refuse(CUBLAS_STATUS_INVALID_VALUE, "not an algorithm");
    Algorithm algorithm = read(*opaque);
    const Capabilities& can = *capabilities_of(algorithm.id);
    auto number = [&](std::uint32_t answer) { return give(&answer, sizeof answer, value, bytes, size); };
    switch (attribute) {
    case CUBLASLT_ALGO_CAP_SPLITK_SUPPORT: return number(can.splits_max > 1);
    case CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK: return number(can.reductions);
    case CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT:
    case CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT: return number(1);
    case CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT:
    case CUBLASLT_ALGO_CAP_UPLO_SUPPORT:
    case CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER:
    case CUBLASLT_ALGO_CAP_LD_NEGATIVE: return number(0);
    case CUBLASLT_ALGO_CAP_TILE_IDS: return number(can.tile);
    case CUBLASLT_ALGO_CAP_STAGES_IDS: return number(can.stages);
    case CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX: return number(can.option_max);
    case CUBLASLT_ALGO_CAP_POINTER_MODE_MASK: return number(CUBLASLT_POINTER_MODE_MASK_HOST);
    case CUBLASLT_ALGO_CAP_EPILOGUE_MASK:
        return number(CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_RELU_BIAS | CUBLASLT_EPILOGUE_GELU_BIAS);
    case CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS: {
        std::uint64_t flags = implementation_of(algorithm);
        return give(&flags, sizeof flags, value, bytes, size);
    }
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES: {
        bool of_output = attribute >= CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES;
        return number(static_cast<std::uint32_t>(alignment_of(algorithm, of_output ? algorithm.d : algorithm.a)));
    }
    }
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "capability %u is not known", static_cast<unsigned>(attribute));
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* opaque,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (!opaque || !is_one(read(*opaque))) return refuse(CUBLAS_STATUS_INVALID_VALUE, "not an algorithm");
    Algorithm algorithm = read(*opaque);
    if (cublasStatus_t status = set_attribute(CONFIGURATION, &algorithm, attribute, value, bytes)) return status;
    *opaque = written(algorithm);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* opaque,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                    std::size_t bytes, std::size_t* size) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (!opaque || !is_one(read(*opaque))) return refuse(CUBLAS_STATUS_INVALID_VALUE, "not an algorithm");
    Algorithm algorithm = read(*opaque);
    return get_attribute(CONFIGURATION, &algorithm, attribute, value, bytes, size);
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* opaque,
                                       cublasLtMatmulHeuristicResult_t* result) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (cublasStatus_t status = check_handle(handle)) return status;
    if (!opaque || !result) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no algorithm, or nowhere to put the result");
    Problem problem;
    if (cublasStatus_t status = problem_of(operation, a, b, c, d, problem)) return status;
    Requirements requirements;
    if (cublasStatus_t status = check(read(*opaque), problem, requirements)) return status;
    // Never its algorithm, which may be the very one that is checked.
    result->workspaceSize = requirements.workspace_bytes;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = requirements.waves;
    return CUBLAS_STATUS_SUCCESS;
}
