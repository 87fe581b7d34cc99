// Every name of abi.h that can be compared with another view of the same interface.
#pragma once

#define CUBLASLT_ABI_CONSTANTS(NAME)                    \
    NAME(CUBLAS_STATUS_SUCCESS)                         \
    NAME(CUBLAS_STATUS_NOT_INITIALIZED)                 \
    NAME(CUBLAS_STATUS_ALLOC_FAILED)                    \
    NAME(CUBLAS_STATUS_INVALID_VALUE)                   \
    NAME(CUBLAS_STATUS_ARCH_MISMATCH)                   \
    NAME(CUBLAS_STATUS_MAPPING_ERROR)                   \
    NAME(CUBLAS_STATUS_EXECUTION_FAILED)                \
    NAME(CUBLAS_STATUS_INTERNAL_ERROR)                  \
    NAME(CUBLAS_STATUS_NOT_SUPPORTED)                   \
    NAME(CUBLAS_STATUS_LICENSE_ERROR)                   \
    NAME(CUDA_R_32F)                                    \
    NAME(CUDA_R_16F)                                    \
    NAME(CUDA_R_16BF)                                   \
    NAME(CUBLAS_COMPUTE_32F)                            \
    NAME(CUBLAS_COMPUTE_32F_PEDANTIC)                   \
    NAME(CUBLAS_COMPUTE_32F_FAST_TF32)                  \
    NAME(MAJOR_VERSION)                                 \
    NAME(MINOR_VERSION)                                 \
    NAME(PATCH_LEVEL)                                   \
    NAME(CUBLAS_OP_N)                                   \
    NAME(CUBLAS_OP_T)                                   \
    NAME(CUBLAS_OP_C)                                   \
    NAME(CUBLAS_FILL_MODE_FULL)                         \
    NAME(CUBLASLT_POINTER_MODE_HOST)                    \
    NAME(CUBLASLT_POINTER_MODE_MASK_HOST)               \
    NAME(CUBLASLT_ORDER_COL)                            \
    NAME(CUBLASLT_BATCH_MODE_STRIDED)                   \
    NAME(CUBLASLT_EPILOGUE_DEFAULT)                     \
    NAME(CUBLASLT_EPILOGUE_RELU)                        \
    NAME(CUBLASLT_EPILOGUE_BIAS)                        \
    NAME(CUBLASLT_EPILOGUE_RELU_BIAS)                   \
    NAME(CUBLASLT_EPILOGUE_GELU)                        \
    NAME(CUBLASLT_EPILOGUE_GELU_BIAS)                   \
    NAME(CUBLASLT_REDUCTION_SCHEME_NONE)                \
    NAME(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)        \
    NAME(CUBLASLT_REDUCTION_SCHEME_MASK)                \
    NAME(CUBLASLT_MATMUL_TILE_UNDEFINED)                \
    NAME(CUBLASLT_MATMUL_TILE_64x64)                    \
    NAME(CUBLASLT_MATMUL_STAGES_UNDEFINED)              \
    NAME(CUBLASLT_MATMUL_STAGES_64x3)                   \
    NAME(CUBLASLT_MATRIX_LAYOUT_TYPE)                   \
    NAME(CUBLASLT_MATRIX_LAYOUT_ORDER)                  \
    NAME(CUBLASLT_MATRIX_LAYOUT_ROWS)                   \
    NAME(CUBLASLT_MATRIX_LAYOUT_COLS)                   \
    NAME(CUBLASLT_MATRIX_LAYOUT_LD)                     \
    NAME(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)            \
    NAME(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)   \
    NAME(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET)           \
    NAME(CUBLASLT_MATRIX_LAYOUT_BATCH_MODE)             \
    NAME(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE)             \
    NAME(CUBLASLT_MATMUL_DESC_SCALE_TYPE)               \
    NAME(CUBLASLT_MATMUL_DESC_POINTER_MODE)             \
    NAME(CUBLASLT_MATMUL_DESC_TRANSA)                   \
    NAME(CUBLASLT_MATMUL_DESC_TRANSB)                   \
    NAME(CUBLASLT_MATMUL_DESC_TRANSC)                   \
    NAME(CUBLASLT_MATMUL_DESC_FILL_MODE)                \
    NAME(CUBLASLT_MATMUL_DESC_EPILOGUE)                 \
    NAME(CUBLASLT_MATMUL_DESC_BIAS_POINTER)             \
    NAME(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE)        \
    NAME(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET)          \
    NAME(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER)          \
    NAME(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER)          \
    NAME(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER)          \
    NAME(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER)          \
    NAME(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER)           \
    NAME(CUBLASLT_MATMUL_DESC_FAST_ACCUM)               \
    NAME(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE)           \
    NAME(CUBLASLT_MATMUL_PREF_SEARCH_MODE)              \
    NAME(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)      \
    NAME(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)    \
    NAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)    \
    NAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES)    \
    NAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES)    \
    NAME(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)    \
    NAME(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT)          \
    NAME(CUBLASLT_MATMUL_PREF_IMPL_MASK)                \
    NAME(CUBLASLT_SEARCH_BEST_FIT)                      \
    NAME(CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID)            \
    NAME(CUBLASLT_ALGO_CAP_SPLITK_SUPPORT)              \
    NAME(CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK)       \
    NAME(CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT)       \
    NAME(CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT)       \
    NAME(CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT) \
    NAME(CUBLASLT_ALGO_CAP_UPLO_SUPPORT)                \
    NAME(CUBLASLT_ALGO_CAP_TILE_IDS)                    \
    NAME(CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX)           \
    NAME(CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER)         \
    NAME(CUBLASLT_ALGO_CAP_POINTER_MODE_MASK)           \
    NAME(CUBLASLT_ALGO_CAP_EPILOGUE_MASK)               \
    NAME(CUBLASLT_ALGO_CAP_STAGES_IDS)                  \
    NAME(CUBLASLT_ALGO_CAP_LD_NEGATIVE)                 \
    NAME(CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS)        \
    NAME(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES)       \
    NAME(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES)       \
    NAME(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES)       \
    NAME(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES)       \
    NAME(CUBLASLT_ALGO_CONFIG_ID)                       \
    NAME(CUBLASLT_ALGO_CONFIG_TILE_ID)                  \
    NAME(CUBLASLT_ALGO_CONFIG_SPLITK_NUM)               \
    NAME(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)         \
    NAME(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)            \
    NAME(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)            \
    NAME(CUBLASLT_ALGO_CONFIG_STAGES_ID)                \
    NAME(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID)           \
    NAME(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)

#define CUBLASLT_ABI_TYPES(NAME)               \
    NAME(cublasStatus_t)                       \
    NAME(cudaDataType_t)                       \
    NAME(cublasComputeType_t)                  \
    NAME(libraryPropertyType_t)                \
    NAME(cublasOperation_t)                    \
    NAME(cublasFillMode_t)                     \
    NAME(cublasLtPointerMode_t)                \
    NAME(cublasLtPointerModeMask_t)            \
    NAME(cublasLtOrder_t)                      \
    NAME(cublasLtBatchMode_t)                  \
    NAME(cublasLtEpilogue_t)                   \
    NAME(cublasLtReductionScheme_t)            \
    NAME(cublasLtMatmulTile_t)                 \
    NAME(cublasLtMatmulStages_t)               \
    NAME(cublasLtMatrixLayoutAttribute_t)      \
    NAME(cublasLtMatmulDescAttributes_t)       \
    NAME(cublasLtMatmulPreferenceAttributes_t) \
    NAME(cublasLtMatmulSearch_t)               \
    NAME(cublasLtMatmulAlgoCapAttributes_t)    \
    NAME(cublasLtMatmulAlgoConfigAttributes_t) \
    NAME(cublasLtHandle_t)                     \
    NAME(cublasLtMatmulDesc_t)                 \
    NAME(cublasLtMatrixLayout_t)               \
    NAME(cublasLtMatmulPreference_t)           \
    NAME(cudaStream_t)                         \
    NAME(cublasLtMatmulAlgo_t)                 \
    NAME(cublasLtMatmulHeuristicResult_t)

#define CUBLASLT_ABI_FIELDS(NAME)                        \
    NAME(cublasLtMatmulAlgo_t, data)                     \
    NAME(cublasLtMatmulHeuristicResult_t, algo)          \
    NAME(cublasLtMatmulHeuristicResult_t, workspaceSize) \
    NAME(cublasLtMatmulHeuristicResult_t, state)         \
    NAME(cublasLtMatmulHeuristicResult_t, wavesCount)    \
    NAME(cublasLtMatmulHeuristicResult_t, reserved)

#define CUBLASLT_ABI_FUNCTIONS(NAME)           \
    NAME(cublasLtCreate)                       \
    NAME(cublasLtDestroy)                      \
    NAME(cublasLtGetStatusName)                \
    NAME(cublasLtGetStatusString)              \
    NAME(cublasLtGetVersion)                   \
    NAME(cublasLtGetCudartVersion)             \
    NAME(cublasLtGetProperty)                  \
    NAME(cublasLtLoggerSetLevel)               \
    NAME(cublasLtLoggerOpenFile)               \
    NAME(cublasLtLoggerForceDisable)           \
    NAME(cublasLtMatrixLayoutCreate)           \
    NAME(cublasLtMatrixLayoutDestroy)          \
    NAME(cublasLtMatrixLayoutSetAttribute)     \
    NAME(cublasLtMatrixLayoutGetAttribute)     \
    NAME(cublasLtMatmulDescCreate)             \
    NAME(cublasLtMatmulDescDestroy)            \
    NAME(cublasLtMatmulDescSetAttribute)       \
    NAME(cublasLtMatmulDescGetAttribute)       \
    NAME(cublasLtMatmulPreferenceCreate)       \
    NAME(cublasLtMatmulPreferenceDestroy)      \
    NAME(cublasLtMatmulPreferenceSetAttribute) \
    NAME(cublasLtMatmulPreferenceGetAttribute) \
    NAME(cublasLtMatmulAlgoGetHeuristic)       \
    NAME(cublasLtMatmulAlgoGetIds)             \
    NAME(cublasLtMatmulAlgoInit)               \
    NAME(cublasLtMatmulAlgoCheck)              \
    NAME(cublasLtMatmulAlgoCapGetAttribute)    \
    NAME(cublasLtMatmulAlgoConfigSetAttribute) \
    NAME(cublasLtMatmulAlgoConfigGetAttribute) \
    NAME(cublasLtMatmul)
