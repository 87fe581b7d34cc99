// What callers describe a multiplication with. Any number may come in: fields are judged where they are used.
#pragma once
#include <memory>

#include "abi.h"

namespace lt {

struct Layout {
    std::uint32_t type = CUDA_R_32F;
    std::int32_t order = CUBLASLT_ORDER_COL;
    std::uint64_t rows = 0, cols = 0;
    std::int64_t ld = 0;
    std::int32_t batch_count = 1;
    std::uint32_t batch_mode = CUBLASLT_BATCH_MODE_STRIDED;
    std::int64_t batch_stride = 0, plane_offset = 0;

    bool operator==(const Layout&) const = default;
};

struct Operation {
    std::int32_t compute = CUBLAS_COMPUTE_32F, scale = CUDA_R_32F, pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    std::int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N, transpose_c = CUBLAS_OP_N;
    std::int32_t fill_mode = CUBLAS_FILL_MODE_FULL;
    std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    std::uint64_t bias = 0;
    std::int64_t bias_batch_stride = 0;
    // The output's type, unless it is set.
    std::int32_t bias_type = -1;
    // A hint: nothing depends on it.
    std::int32_t sm_count_target = 0;
    std::uint64_t a_scale = 0, b_scale = 0, c_scale = 0, d_scale = 0, d_largest = 0;
    std::int8_t fast_accumulation = 0;
};

struct Preference {
    std::uint32_t search_mode = CUBLASLT_SEARCH_BEST_FIT;
    std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    std::uint64_t workspace_bytes_max = 0;
    std::uint32_t alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;
    float waves_max = 0;
    std::uint64_t implementations = ~0ull;
};

// Null for a handle that is none, or no longer.
std::shared_ptr<Layout> layout_of(cublasLtMatrixLayout_t handle);
std::shared_ptr<Operation> operation_of(cublasLtMatmulDesc_t handle);
std::shared_ptr<Preference> preference_of(cublasLtMatmulPreference_t handle);

} // namespace lt
