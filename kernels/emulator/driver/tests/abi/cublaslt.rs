//! What cublasLt.h says, as cudarc's bindings have it.

use cudarc::cublaslt::sys;

use super::facts::{self, Facts, constants, functions, offsets, sizes};

/// The facts that the software library states about itself, in the bindings' words.
pub(super) fn facts() -> Facts {
    let mut facts = Facts::default();
    constants(&mut facts);
    sizes(&mut facts);
    functions(&mut facts);
    facts
}

fn constants(facts: &mut Facts) {
    constants!(
        facts,
        sys::cublasStatus_t {
            CUBLAS_STATUS_SUCCESS,
            CUBLAS_STATUS_NOT_INITIALIZED,
            CUBLAS_STATUS_ALLOC_FAILED,
            CUBLAS_STATUS_INVALID_VALUE,
            CUBLAS_STATUS_ARCH_MISMATCH,
            CUBLAS_STATUS_MAPPING_ERROR,
            CUBLAS_STATUS_EXECUTION_FAILED,
            CUBLAS_STATUS_INTERNAL_ERROR,
            CUBLAS_STATUS_NOT_SUPPORTED,
            CUBLAS_STATUS_LICENSE_ERROR,
        }
    );
    constants!(facts, sys::cudaDataType_t { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF });
    constants!(
        facts,
        sys::cublasComputeType_t {
            CUBLAS_COMPUTE_32F,
            CUBLAS_COMPUTE_32F_PEDANTIC,
            CUBLAS_COMPUTE_32F_FAST_TF32,
        }
    );
    constants!(facts, sys::libraryPropertyType_t { MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL });
    constants!(facts, sys::cublasLtPointerMode_t { CUBLASLT_POINTER_MODE_HOST });
    constants!(facts, sys::cublasLtPointerModeMask_t { CUBLASLT_POINTER_MODE_MASK_HOST });
    constants!(facts, sys::cublasLtOrder_t { CUBLASLT_ORDER_COL });
    constants!(facts, sys::cublasLtBatchMode_t { CUBLASLT_BATCH_MODE_STRIDED });
    constants!(
        facts,
        sys::cublasLtEpilogue_t {
            CUBLASLT_EPILOGUE_DEFAULT,
            CUBLASLT_EPILOGUE_RELU,
            CUBLASLT_EPILOGUE_BIAS,
            CUBLASLT_EPILOGUE_RELU_BIAS,
            CUBLASLT_EPILOGUE_GELU,
            CUBLASLT_EPILOGUE_GELU_BIAS,
        }
    );
    constants!(
        facts,
        sys::cublasLtReductionScheme_t {
            CUBLASLT_REDUCTION_SCHEME_NONE,
            CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
            CUBLASLT_REDUCTION_SCHEME_MASK,
        }
    );
    constants!(
        facts,
        sys::cublasLtMatmulTile_t { CUBLASLT_MATMUL_TILE_UNDEFINED, CUBLASLT_MATMUL_TILE_64x64 }
    );
    constants!(
        facts,
        sys::cublasLtMatmulStages_t { CUBLASLT_MATMUL_STAGES_UNDEFINED, CUBLASLT_MATMUL_STAGES_64x3 }
    );
    constants!(
        facts,
        sys::cublasLtMatrixLayoutAttribute_t {
            CUBLASLT_MATRIX_LAYOUT_TYPE,
            CUBLASLT_MATRIX_LAYOUT_ORDER,
            CUBLASLT_MATRIX_LAYOUT_ROWS,
            CUBLASLT_MATRIX_LAYOUT_COLS,
            CUBLASLT_MATRIX_LAYOUT_LD,
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
            CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET,
            CUBLASLT_MATRIX_LAYOUT_BATCH_MODE,
        }
    );
    constants!(
        facts,
        sys::cublasLtMatmulDescAttributes_t {
            CUBLASLT_MATMUL_DESC_COMPUTE_TYPE,
            CUBLASLT_MATMUL_DESC_SCALE_TYPE,
            CUBLASLT_MATMUL_DESC_POINTER_MODE,
            CUBLASLT_MATMUL_DESC_TRANSA,
            CUBLASLT_MATMUL_DESC_TRANSB,
            CUBLASLT_MATMUL_DESC_TRANSC,
            CUBLASLT_MATMUL_DESC_FILL_MODE,
            CUBLASLT_MATMUL_DESC_EPILOGUE,
            CUBLASLT_MATMUL_DESC_BIAS_POINTER,
            CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE,
            CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
            CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            CUBLASLT_MATMUL_DESC_C_SCALE_POINTER,
            CUBLASLT_MATMUL_DESC_D_SCALE_POINTER,
            CUBLASLT_MATMUL_DESC_AMAX_D_POINTER,
            CUBLASLT_MATMUL_DESC_FAST_ACCUM,
            CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
        }
    );
    constants!(
        facts,
        sys::cublasLtMatmulPreferenceAttributes_t {
            CUBLASLT_MATMUL_PREF_SEARCH_MODE,
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT,
            CUBLASLT_MATMUL_PREF_IMPL_MASK,
        }
    );
    constants!(
        facts,
        sys::cublasLtMatmulSearch_t { CUBLASLT_SEARCH_BEST_FIT, CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID }
    );
    constants!(
        facts,
        sys::cublasLtMatmulAlgoCapAttributes_t {
            CUBLASLT_ALGO_CAP_SPLITK_SUPPORT,
            CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK,
            CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT,
            CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT,
            CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT,
            CUBLASLT_ALGO_CAP_UPLO_SUPPORT,
            CUBLASLT_ALGO_CAP_TILE_IDS,
            CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX,
            CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER,
            CUBLASLT_ALGO_CAP_POINTER_MODE_MASK,
            CUBLASLT_ALGO_CAP_EPILOGUE_MASK,
            CUBLASLT_ALGO_CAP_STAGES_IDS,
            CUBLASLT_ALGO_CAP_LD_NEGATIVE,
            CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS,
            CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES,
        }
    );
    constants!(
        facts,
        sys::cublasLtMatmulAlgoConfigAttributes_t {
            CUBLASLT_ALGO_CONFIG_ID,
            CUBLASLT_ALGO_CONFIG_TILE_ID,
            CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
            CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
            CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
            CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
            CUBLASLT_ALGO_CONFIG_STAGES_ID,
            CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
            CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
        }
    );
    // Of cublas_api.h, which the bindings of cuBLASLt leave out.
    for (name, value) in
        [("CUBLAS_OP_N", 0), ("CUBLAS_OP_T", 1), ("CUBLAS_OP_C", 2), ("CUBLAS_FILL_MODE_FULL", 2)]
    {
        facts.constant(name, value);
    }
}

fn sizes(facts: &mut Facts) {
    sizes!(
        facts,
        sys {
            cublasStatus_t,
            cudaDataType_t,
            cublasComputeType_t,
            libraryPropertyType_t,
            cublasLtPointerMode_t,
            cublasLtPointerModeMask_t,
            cublasLtOrder_t,
            cublasLtBatchMode_t,
            cublasLtEpilogue_t,
            cublasLtReductionScheme_t,
            cublasLtMatmulTile_t,
            cublasLtMatmulStages_t,
            cublasLtMatrixLayoutAttribute_t,
            cublasLtMatmulDescAttributes_t,
            cublasLtMatmulPreferenceAttributes_t,
            cublasLtMatmulSearch_t,
            cublasLtMatmulAlgoCapAttributes_t,
            cublasLtMatmulAlgoConfigAttributes_t,
            cublasLtHandle_t,
            cublasLtMatmulDesc_t,
            cublasLtMatrixLayout_t,
            cublasLtMatmulPreference_t,
            cudaStream_t,
            cublasLtMatmulAlgo_t,
            cublasLtMatmulHeuristicResult_t,
        }
    );
    // Of cublas_api.h, too: enumerations of C.
    facts.size("cublasOperation_t", size_of::<core::ffi::c_uint>());
    facts.size("cublasFillMode_t", size_of::<core::ffi::c_uint>());
    offsets!(facts, sys::cublasLtMatmulAlgo_t { data });
    offsets!(
        facts,
        sys::cublasLtMatmulHeuristicResult_t { algo, workspaceSize, state, wavesCount, reserved }
    );
}

fn functions(facts: &mut Facts) {
    functions!(
        facts,
        sys,
        parameters_0 { cublasLtGetVersion, cublasLtGetCudartVersion, cublasLtLoggerForceDisable }
    );
    functions!(
        facts,
        sys,
        parameters_1 {
            cublasLtCreate,
            cublasLtDestroy,
            cublasLtGetStatusName,
            cublasLtGetStatusString,
            cublasLtLoggerSetLevel,
            cublasLtLoggerOpenFile,
            cublasLtMatrixLayoutDestroy,
            cublasLtMatmulDescDestroy,
            cublasLtMatmulPreferenceCreate,
            cublasLtMatmulPreferenceDestroy,
        }
    );
    functions!(facts, sys, parameters_2 { cublasLtGetProperty });
    functions!(facts, sys, parameters_3 { cublasLtMatmulDescCreate });
    functions!(
        facts,
        sys,
        parameters_4 {
            cublasLtMatrixLayoutSetAttribute,
            cublasLtMatmulDescSetAttribute,
            cublasLtMatmulPreferenceSetAttribute,
            cublasLtMatmulAlgoConfigSetAttribute,
        }
    );
    functions!(
        facts,
        sys,
        parameters_5 {
            cublasLtMatrixLayoutCreate,
            cublasLtMatrixLayoutGetAttribute,
            cublasLtMatmulDescGetAttribute,
            cublasLtMatmulPreferenceGetAttribute,
            cublasLtMatmulAlgoCapGetAttribute,
            cublasLtMatmulAlgoConfigGetAttribute,
        }
    );
    functions!(facts, sys, parameters_8 { cublasLtMatmulAlgoCheck });
    functions!(facts, sys, parameters_9 { cublasLtMatmulAlgoInit });
    functions!(facts, sys, parameters_10 { cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulAlgoGetIds });
    functions!(facts, sys, parameters_16 { cublasLtMatmul });
}
