#include "problem.h"

#include <climits>

#include "refusal.h"

namespace lt {

namespace {

constexpr auto INVALID = CUBLAS_STATUS_INVALID_VALUE;
constexpr auto UNSUPPORTED = CUBLAS_STATUS_NOT_SUPPORTED;

// No device has this much memory, and offsets below it cannot overflow.
constexpr std::int64_t BYTES_MAX = std::int64_t(1) << 47;

// Whether the last element of the last batch lies within any memory at all.
bool fits_memory(const Layout& layout) {
    std::int64_t columns, batches, elements, bytes;
    bool overflows = __builtin_mul_overflow(static_cast<std::int64_t>(layout.cols), layout.ld, &columns);
    overflows |= __builtin_mul_overflow(std::int64_t(layout.batch_count), layout.batch_stride, &batches);
    overflows |= __builtin_add_overflow(columns, batches, &elements);
    overflows |= __builtin_mul_overflow(elements, std::int64_t(4), &bytes);
    return !overflows && bytes < BYTES_MAX;
}

cublasStatus_t check_layout(const char* name, const Layout& layout) {
    if (layout.order != CUBLASLT_ORDER_COL)
        return refuse(UNSUPPORTED, "%s is in memory order %d: only column-major is done", name, layout.order);
    if (layout.batch_mode != CUBLASLT_BATCH_MODE_STRIDED || layout.plane_offset != 0)
        return refuse(UNSUPPORTED, "%s has a batch mode or planes that are not done", name);
    if (layout.rows == 0 || layout.cols == 0) return refuse(INVALID, "%s is empty", name);
    if (layout.rows > INT_MAX || layout.cols > INT_MAX)
        return refuse(UNSUPPORTED, "%s has more rows or columns than an int counts", name);
    if (layout.ld < static_cast<std::int64_t>(layout.rows))
        return refuse(INVALID, "%s has columns of %llu rows, but leading dimension %lld", name,
                      static_cast<unsigned long long>(layout.rows), static_cast<long long>(layout.ld));
    if (layout.batch_count < 1 || layout.batch_stride < 0)
        return refuse(INVALID, "%s has batch count %d and batch stride %lld", name, layout.batch_count,
                      static_cast<long long>(layout.batch_stride));
    if (!fits_memory(layout)) return refuse(INVALID, "%s is larger than any memory", name);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_layouts(const Problem& problem) {
    const std::pair<const char*, const Layout*> all[] = {
        {"A", &problem.a}, {"B", &problem.b}, {"C", &problem.c}, {"D", &problem.d}};
    for (auto [name, layout] : all) {
        if (cublasStatus_t status = check_layout(name, *layout)) return status;
        if (layout->batch_count != problem.d.batch_count)
            return refuse(INVALID, "%s has batch count %d, D has %d", name, layout->batch_count,
                          problem.d.batch_count);
    }
    const Layout& d = problem.d;
    // A device would write one matrix over the other, in whatever order.
    if (d.batch_count > 1 && d.batch_stride < static_cast<std::int64_t>(d.cols - 1) * d.ld + std::int64_t(d.rows))
        return refuse(INVALID, "D's batches overlap: stride %lld", static_cast<long long>(d.batch_stride));
    return CUBLAS_STATUS_SUCCESS;
}

// Sets m, n, k from A and B, and holds C and D against them.
cublasStatus_t set_shape(Problem& problem) {
    problem.m = problem.a_transposed ? problem.a.cols : problem.a.rows;
    problem.k = problem.a_transposed ? problem.a.rows : problem.a.cols;
    problem.n = problem.b_transposed ? problem.b.rows : problem.b.cols;
    std::uint64_t k_of_b = problem.b_transposed ? problem.b.cols : problem.b.rows;
    if (problem.k != k_of_b)
        return refuse(INVALID, "op(A) has %llu columns, op(B) %llu rows", static_cast<unsigned long long>(problem.k),
                      static_cast<unsigned long long>(k_of_b));
    for (const Layout* layout : {&problem.c, &problem.d})
        if (layout->rows != problem.m || layout->cols != problem.n)
            return refuse(INVALID, "%s is %llu by %llu, the product %llu by %llu", layout == &problem.c ? "C" : "D",
                          static_cast<unsigned long long>(layout->rows), static_cast<unsigned long long>(layout->cols),
                          static_cast<unsigned long long>(problem.m), static_cast<unsigned long long>(problem.n));
    return CUBLAS_STATUS_SUCCESS;
}

bool is_operation(std::int32_t value) {
    return value == CUBLAS_OP_N || value == CUBLAS_OP_T || value == CUBLAS_OP_C;
}

cublasStatus_t check_operation(const Operation& operation, std::uint32_t output) {
    if (!is_operation(operation.transpose_a) || !is_operation(operation.transpose_b))
        return refuse(INVALID, "operations %d and %d on A and B", operation.transpose_a, operation.transpose_b);
    if (operation.transpose_c != CUBLAS_OP_N) return refuse(UNSUPPORTED, "C is never transposed");
    if (operation.pointer_mode != CUBLASLT_POINTER_MODE_HOST)
        return refuse(UNSUPPORTED, "pointer mode %d: only factors on the host are done", operation.pointer_mode);
    if (operation.fill_mode != CUBLAS_FILL_MODE_FULL) return refuse(UNSUPPORTED, "only full matrices are done");
    if (operation.a_scale || operation.b_scale || operation.c_scale || operation.d_scale || operation.d_largest)
        return refuse(INVALID, "scales and maxima are for 8-bit types");
    if (operation.fast_accumulation) return refuse(INVALID, "fast accumulation is for 8-bit types");
    switch (operation.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_GELU: return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_BIAS: break;
    default: return refuse(UNSUPPORTED, "epilogue %u is not done", operation.epilogue);
    }
    if (operation.bias_type != -1 && operation.bias_type != static_cast<std::int32_t>(output))
        return refuse(UNSUPPORTED, "a bias of type %d for an output of type %u", operation.bias_type, output);
    if (operation.bias_batch_stride < 0 || operation.bias_batch_stride > BYTES_MAX / INT_MAX)
        return refuse(INVALID, "a bias with batch stride %lld", static_cast<long long>(operation.bias_batch_stride));
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

std::uint64_t element_bytes(std::uint32_t type) {
    switch (type) {
    case CUDA_R_32F: return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    default: return 0;
    }
}

bool has_bias(const Operation& operation) { return operation.epilogue & CUBLASLT_EPILOGUE_BIAS; }

bool types_are_supported(std::uint32_t compute, std::uint32_t scale, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                         std::uint32_t d) {
    if (element_bytes(a) == 0 || a != b || c != d || scale != CUDA_R_32F) return false;
    switch (compute) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC: return d == a || d == CUDA_R_32F;
    // Numbers of 16 bits are exact in TF32 already.
    case CUBLAS_COMPUTE_32F_FAST_TF32: return a == CUDA_R_32F && d == CUDA_R_32F;
    default: return false;
    }
}

cublasStatus_t problem_of(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                          cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Problem& problem) {
    auto described = operation_of(operation);
    auto a_layout = layout_of(a), b_layout = layout_of(b), c_layout = layout_of(c), d_layout = layout_of(d);
    if (!described || !a_layout || !b_layout || !c_layout || !d_layout)
        return refuse(INVALID, "a descriptor is null, or was destroyed");
    problem.operation = *described;
    problem.a = *a_layout;
    problem.b = *b_layout;
    problem.c = *c_layout;
    problem.d = *d_layout;
    if (!types_are_supported(described->compute, described->scale, problem.a.type, problem.b.type, problem.c.type,
                             problem.d.type))
        return refuse(UNSUPPORTED, "compute type %d, scale type %d for A, B, C, D of types %u, %u, %u, %u",
                      described->compute, described->scale, problem.a.type, problem.b.type, problem.c.type,
                      problem.d.type);
    if (cublasStatus_t status = check_operation(*described, problem.d.type)) return status;
    if (cublasStatus_t status = check_layouts(problem)) return status;
    // Conjugation changes no real number.
    problem.a_transposed = described->transpose_a != CUBLAS_OP_N;
    problem.b_transposed = described->transpose_b != CUBLAS_OP_N;
    problem.batches = static_cast<std::uint64_t>(problem.d.batch_count);
    return set_shape(problem);
}

} // namespace lt
