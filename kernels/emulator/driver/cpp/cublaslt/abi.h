// Our view of cublasLt.h, as of CUDA 13.0: what the software library has, under the names of the real one.
//
// The unit tests hold it against cudarc's bindings; `cargo xtask abi` against the real header where one is at hand.
#pragma once
#include <cstddef>
#include <cstdint>

// The check includes this file in a namespace, beside the real header, and wants no C linkage then.
#ifndef SOFTWARE_LINKAGE
#define SOFTWARE_LINKAGE extern "C" __attribute__((visibility("default")))
#endif

enum cublasStatus_t : unsigned {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
    CUBLAS_STATUS_LICENSE_ERROR = 16,
};

// Types that callers may hand over stay numbers in our structures: any value can come in.
enum cudaDataType_t : unsigned { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
typedef cudaDataType_t cudaDataType;

enum cublasComputeType_t : unsigned {
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
};

enum libraryPropertyType_t : unsigned { MAJOR_VERSION = 0, MINOR_VERSION = 1, PATCH_LEVEL = 2 };
typedef libraryPropertyType_t libraryPropertyType;

enum cublasOperation_t : unsigned { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasFillMode_t : unsigned { CUBLAS_FILL_MODE_FULL = 2 };
enum cublasLtPointerMode_t : unsigned { CUBLASLT_POINTER_MODE_HOST = 0 };
enum cublasLtPointerModeMask_t : unsigned { CUBLASLT_POINTER_MODE_MASK_HOST = 1 };
enum cublasLtOrder_t : unsigned { CUBLASLT_ORDER_COL = 0 };
enum cublasLtBatchMode_t : unsigned { CUBLASLT_BATCH_MODE_STRIDED = 0 };

enum cublasLtEpilogue_t : unsigned {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_RELU = 2,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_RELU_BIAS = 6,
    CUBLASLT_EPILOGUE_GELU = 32,
    CUBLASLT_EPILOGUE_GELU_BIAS = 36,
};

enum cublasLtReductionScheme_t : unsigned {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7,
};

enum cublasLtMatmulTile_t : unsigned { CUBLASLT_MATMUL_TILE_UNDEFINED = 0, CUBLASLT_MATMUL_TILE_64x64 = 15 };
enum cublasLtMatmulStages_t : unsigned { CUBLASLT_MATMUL_STAGES_UNDEFINED = 0, CUBLASLT_MATMUL_STAGES_64x3 = 15 };

enum cublasLtMatrixLayoutAttribute_t : unsigned {
    CUBLASLT_MATRIX_LAYOUT_TYPE = 0,
    CUBLASLT_MATRIX_LAYOUT_ORDER = 1,
    CUBLASLT_MATRIX_LAYOUT_ROWS = 2,
    CUBLASLT_MATRIX_LAYOUT_COLS = 3,
    CUBLASLT_MATRIX_LAYOUT_LD = 4,
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
    CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET = 7,
    CUBLASLT_MATRIX_LAYOUT_BATCH_MODE = 8,
};

enum cublasLtMatmulDescAttributes_t : unsigned {
    CUBLASLT_MATMUL_DESC_COMPUTE_TYPE = 0,
    CUBLASLT_MATMUL_DESC_SCALE_TYPE = 1,
    CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_TRANSC = 5,
    CUBLASLT_MATMUL_DESC_FILL_MODE = 6,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE = 10,
    CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
    CUBLASLT_MATMUL_DESC_C_SCALE_POINTER = 19,
    CUBLASLT_MATMUL_DESC_D_SCALE_POINTER = 20,
    CUBLASLT_MATMUL_DESC_AMAX_D_POINTER = 21,
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};

enum cublasLtMatmulPreferenceAttributes_t : unsigned {
    CUBLASLT_MATMUL_PREF_SEARCH_MODE = 0,
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
    CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT = 9,
    CUBLASLT_MATMUL_PREF_IMPL_MASK = 12,
};

enum cublasLtMatmulSearch_t : unsigned { CUBLASLT_SEARCH_BEST_FIT = 0, CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID = 1 };

enum cublasLtMatmulAlgoCapAttributes_t : unsigned {
    CUBLASLT_ALGO_CAP_SPLITK_SUPPORT = 0,
    CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK = 1,
    CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT = 2,
    CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT = 3,
    CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT = 4,
    CUBLASLT_ALGO_CAP_UPLO_SUPPORT = 5,
    CUBLASLT_ALGO_CAP_TILE_IDS = 6,
    CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX = 7,
    CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER = 10,
    CUBLASLT_ALGO_CAP_POINTER_MODE_MASK = 11,
    CUBLASLT_ALGO_CAP_EPILOGUE_MASK = 12,
    CUBLASLT_ALGO_CAP_STAGES_IDS = 13,
    CUBLASLT_ALGO_CAP_LD_NEGATIVE = 14,
    CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS = 15,
    CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES = 16,
    CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES = 17,
    CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES = 18,
    CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES = 19,
};

enum cublasLtMatmulAlgoConfigAttributes_t : unsigned {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3,
    CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING = 4,
    CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION = 5,
    CUBLASLT_ALGO_CONFIG_STAGES_ID = 6,
    CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID = 7,
    CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID = 8,
};

typedef struct cublasLtContext* cublasLtHandle_t;
typedef struct cublasLtMatmulDescOpaque_t* cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixLayoutOpaque_t* cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulPreferenceOpaque_t* cublasLtMatmulPreference_t;
typedef struct CUstream_st* cudaStream_t;

struct cublasLtMatmulAlgo_t {
    std::uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    std::size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};

SOFTWARE_LINKAGE cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle);
SOFTWARE_LINKAGE cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);
SOFTWARE_LINKAGE const char* cublasLtGetStatusName(cublasStatus_t status);
SOFTWARE_LINKAGE const char* cublasLtGetStatusString(cublasStatus_t status);
SOFTWARE_LINKAGE std::size_t cublasLtGetVersion();
SOFTWARE_LINKAGE std::size_t cublasLtGetCudartVersion();
SOFTWARE_LINKAGE cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int* value);
SOFTWARE_LINKAGE cublasStatus_t cublasLtLoggerSetLevel(int level);
SOFTWARE_LINKAGE cublasStatus_t cublasLtLoggerOpenFile(const char* path);
SOFTWARE_LINKAGE cublasStatus_t cublasLtLoggerForceDisable();

SOFTWARE_LINKAGE cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                                           std::uint64_t rows, std::uint64_t cols, std::int64_t ld);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                                 cublasLtMatrixLayoutAttribute_t attribute,
                                                                 const void* value, std::size_t bytes);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                                 cublasLtMatrixLayoutAttribute_t attribute,
                                                                 void* value, std::size_t bytes, std::size_t* written);

SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                                         cudaDataType_t scale);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                                               cublasLtMatmulDescAttributes_t attribute,
                                                               const void* value, std::size_t bytes);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation,
                                                               cublasLtMatmulDescAttributes_t attribute, void* value,
                                                               std::size_t bytes, std::size_t* written);

SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                     cublasLtMatmulPreferenceAttributes_t attribute,
                                                                     const void* value, std::size_t bytes);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                                     cublasLtMatmulPreferenceAttributes_t attribute,
                                                                     void* value, std::size_t bytes,
                                                                     std::size_t* written);

SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
    cublasLtMatmulHeuristicResult_t* results, int* found);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t compute,
                                                         cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b,
                                                         cudaDataType_t c, cudaDataType_t d, int wanted, int* ids,
                                                         int* found);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute,
                                                       cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b,
                                                       cudaDataType_t c, cudaDataType_t d, int id,
                                                       cublasLtMatmulAlgo_t* algorithm);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                        cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                        cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                        const cublasLtMatmulAlgo_t* algorithm,
                                                        cublasLtMatmulHeuristicResult_t* result);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                                  cublasLtMatmulAlgoCapAttributes_t attribute,
                                                                  void* value, std::size_t bytes,
                                                                  std::size_t* written);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algorithm,
                                                                     cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                                     const void* value, std::size_t bytes);
SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                                     cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                                     void* value, std::size_t bytes,
                                                                     std::size_t* written);

SOFTWARE_LINKAGE cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                               const void* alpha, const void* a, cublasLtMatrixLayout_t aLayout,
                                               const void* b, cublasLtMatrixLayout_t bLayout, const void* beta,
                                               const void* c, cublasLtMatrixLayout_t cLayout, void* d,
                                               cublasLtMatrixLayout_t dLayout, const cublasLtMatmulAlgo_t* algorithm,
                                               void* workspace, std::size_t workspaceBytes, cudaStream_t stream);
