#include "descriptors.h"

#include "../living.h"
#include "attributes.h"
#include "refusal.h"

namespace lt {

namespace {

const Attribute LAYOUT_ATTRIBUTES[] = {
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch_count),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, batch_stride),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, Layout, plane_offset),
    LT_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, Layout, batch_mode),
};

const Attribute OPERATION_ATTRIBUTES[] = {
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Operation, compute),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Operation, scale),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_POINTER_MODE, Operation, pointer_mode),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSA, Operation, transpose_a),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSB, Operation, transpose_b),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSC, Operation, transpose_c),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_FILL_MODE, Operation, fill_mode),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE, Operation, epilogue),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Operation, bias),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, Operation, bias_batch_stride),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Operation, sm_count_target),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, Operation, a_scale),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, Operation, b_scale),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, Operation, c_scale),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, Operation, d_scale),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, Operation, d_largest),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_FAST_ACCUM, Operation, fast_accumulation),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Operation, bias_type),
};

const Attribute PREFERENCE_ATTRIBUTES[] = {
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search_mode),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace_bytes_max),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reductions),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, alignment_a),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, alignment_b),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, alignment_c),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, alignment_d),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, waves_max),
    LT_ATTRIBUTE(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, implementations),
};

template <class Handle, class Object> cublasStatus_t create(const char* function, Handle* handle, Object object) {
    if (cublasStatus_t status = begin_call(function)) return status;
    if (!handle) return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: nowhere to put the descriptor", function);
    *handle = living<Handle, Object>().add(object);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object, class Handle> cublasStatus_t destroy(const char* function, Handle handle) {
    if (cublasStatus_t status = begin_call(function)) return status;
    if (living<Handle, Object>().remove(handle)) return CUBLAS_STATUS_SUCCESS;
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: no such descriptor, or it was destroyed before", function);
}

template <class Object, class Handle>
cublasStatus_t set(const char* function, std::span<const Attribute> known, Handle handle, unsigned id,
                   const void* value, std::size_t bytes) {
    if (cublasStatus_t status = begin_call(function)) return status;
    std::shared_ptr<Object> object = living<Handle, Object>().find(handle);
    if (!object) return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: no such descriptor, or destroyed", function);
    return set_attribute(known, object.get(), id, value, bytes);
}

template <class Object, class Handle>
cublasStatus_t get(const char* function, std::span<const Attribute> known, Handle handle, unsigned id, void* value,
                   std::size_t bytes, std::size_t* written) {
    if (cublasStatus_t status = begin_call(function)) return status;
    std::shared_ptr<Object> object = living<Handle, Object>().find(handle);
    if (!object) return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: no such descriptor, or destroyed", function);
    return get_attribute(known, object.get(), id, value, bytes, written);
}

} // namespace

std::shared_ptr<Layout> layout_of(cublasLtMatrixLayout_t handle) {
    return living<cublasLtMatrixLayout_t, Layout>().find(handle);
}

std::shared_ptr<Operation> operation_of(cublasLtMatmulDesc_t handle) {
    return living<cublasLtMatmulDesc_t, Operation>().find(handle);
}

std::shared_ptr<Preference> preference_of(cublasLtMatmulPreference_t handle) {
    return living<cublasLtMatmulPreference_t, Preference>().find(handle);
}

} // namespace lt

using namespace lt;

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t cols, std::int64_t ld) {
    Layout made;
    made.type = type;
    made.rows = rows;
    made.cols = cols;
    made.ld = ld;
    return create(__func__, layout, made);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy<Layout>(__func__, layout); }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t bytes) {
    return set<Layout>(__func__, LAYOUT_ATTRIBUTES, layout, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, void* value,
                                                std::size_t bytes, std::size_t* written) {
    return get<Layout>(__func__, LAYOUT_ATTRIBUTES, layout, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    Operation made;
    made.compute = static_cast<std::int32_t>(compute);
    made.scale = static_cast<std::int32_t>(scale);
    return create(__func__, operation, made);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    return destroy<Operation>(__func__, operation);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
    return set<Operation>(__func__, OPERATION_ATTRIBUTES, operation, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              void* value, std::size_t bytes, std::size_t* written) {
    return get<Operation>(__func__, OPERATION_ATTRIBUTES, operation, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return create(__func__, preference, Preference());
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy<Preference>(__func__, preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
    return set<Preference>(__func__, PREFERENCE_ATTRIBUTES, preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, void* value,
                                                    std::size_t bytes, std::size_t* written) {
    return get<Preference>(__func__, PREFERENCE_ATTRIBUTES, preference, attribute, value, bytes, written);
}
