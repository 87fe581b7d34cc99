//! cuBLASLt: `y = x · weightᵀ + bias` over BF16 matrices, with f32 sums.
//!
//! It thinks in columns: a row-major `[rows][stride]` matrix is its `stride x rows` one. So `y` (`outputs x rows`) is
//! the transposed weight times `x`, and the bias runs along `y`'s columns.

use std::{
    ffi::{CStr, OsStr, c_void},
    path::{Path, PathBuf},
    sync::Arc,
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{self, cublasLtMatmulDescAttributes_t as Describe, cublasLtMatmulPreferenceAttributes_t as Prefer},
};

use super::{Context, Stream};
use crate::cuda::{
    Product,
    device::{CudaError, LibraryFacts},
    dynamic::{self, Library, Scope},
    search::{self, CUBLAS_LT, Place},
    settings::Settings,
};

/// All functions that are called.
const FUNCTIONS: &[&CStr] = &[
    c"cublasLtGetVersion",
    c"cublasLtCreate",
    c"cublasLtDestroy",
    c"cublasLtMatmul",
    c"cublasLtMatmulAlgoGetHeuristic",
    c"cublasLtMatmulDescCreate",
    c"cublasLtMatmulDescDestroy",
    c"cublasLtMatmulDescSetAttribute",
    c"cublasLtMatmulPreferenceCreate",
    c"cublasLtMatmulPreferenceDestroy",
    c"cublasLtMatmulPreferenceSetAttribute",
    c"cublasLtMatrixLayoutCreate",
    c"cublasLtMatrixLayoutDestroy",
];

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_EPILOGUE_BIAS`.
const EPILOGUE_BIAS: u32 = 4;
/// `CUBLAS_STATUS_INVALID_VALUE`, which it also says to alignments that no algorithm takes.
const INVALID_VALUE: u32 = 7;
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 15;

/// The library on one device. Several threads may use it at once.
pub(in crate::cuda::device) struct Matrices {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    facts: LibraryFacts,
}

// SAFETY: by its documentation a handle may be used by several threads.
unsafe impl Send for Matrices {}
// SAFETY: as above.
unsafe impl Sync for Matrices {}

/// How a product is computed.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::cuda::device) struct Algorithm(sys::cublasLtMatmulAlgo_t);

/// What an algorithm is chosen by, besides the shape.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda::device) struct Circumstances {
    /// Bytes that addresses of x, weight and y are multiples of.
    pub(in crate::cuda::device) alignment: [u32; 3],
    pub(in crate::cuda::device) scratch_bytes: usize,
}

/// Finds the library; else says what is wrong with each place.
pub(in crate::cuda::device) fn find(settings: &Settings) -> Result<LibraryFacts, String> {
    let mut looked = String::new();
    for place in search::places(&CUBLAS_LT, settings, Path::new("/")) {
        let candidates: Vec<PathBuf> = match place {
            Place::Loader => CUBLAS_LT.names.iter().map(PathBuf::from).collect(),
            Place::File(file) => vec![dynamic::absolute(&file)],
            Place::Folder(folder) => {
                let files = CUBLAS_LT.names.iter().map(|name| dynamic::absolute(&folder.join(name)));
                files.filter(|file| file.exists()).collect()
            }
        };
        for file in candidates {
            match open(file.as_os_str()) {
                Ok(facts) => return Ok(facts),
                Err(reason) => looked += &format!("\n  {}: {reason}", file.display()),
            }
        }
    }
    Err(format!("no usable cuBLASLt. Looked at:{looked}"))
}

fn open(file: &OsStr) -> Result<LibraryFacts, String> {
    let library = Library::open(file, Scope::Global)?;
    if let Some(missing) = FUNCTIONS.iter().find(|name| library.address(name).is_none()) {
        return Err(format!("it has no {}", missing.to_string_lossy()));
    }
    // SAFETY: opens libraries of cuBLASLt's names and nothing else.
    if !unsafe { sys::is_culib_present() } {
        return Err("loaded, and not found by its name then".to_owned());
    }
    // SAFETY: cudarc has its library, which has the function.
    let version = unsafe { sys::cublasLtGetVersion() };
    let (major, minor, patch) = (version / 10_000, version % 10_000 / 100, version % 100);
    let file = library.file_of(c"cublasLtCreate").unwrap_or_else(|| PathBuf::from(file));
    Ok(LibraryFacts { name: "libcublasLt", file, version: format!("{major}.{minor}.{patch}") })
}

impl Matrices {
    /// `facts` say that the library is there.
    pub(in crate::cuda::device) fn new(
        context: &Arc<Context>,
        facts: LibraryFacts,
    ) -> Result<Matrices, CudaError> {
        let mut made = Ok(std::ptr::null_mut());
        within(context, || made = result::create_handle())?;
        let handle = made.map_err(|error| failure(context, "open cuBLASLt", "cublasLtCreate", error))?;
        Ok(Matrices { context: context.clone(), handle, facts })
    }

    pub(in crate::cuda::device) fn facts(&self) -> &LibraryFacts {
        &self.facts
    }

    /// The best algorithm for products of this shape with `rows` rows; `None` where there is none.
    pub(in crate::cuda::device) fn choose(
        &self,
        product: &Product<'_>,
        rows: usize,
        circumstances: Circumstances,
    ) -> Result<Option<Algorithm>, CudaError> {
        let doing = "choose how to multiply";
        let operands = Operands::new(product, rows).map_err(|error| self.failure(doing, error))?;
        let preference = Preference::new(circumstances).map_err(|error| self.failure(doing, error))?;
        let mut chosen = Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        // SAFETY: a handle, descriptions and a preference that live as long as the call.
        within(&self.context, || unsafe {
            chosen = result::get_matmul_algo_heuristic(
                self.handle,
                operands.description,
                operands.weight,
                operands.x,
                operands.y,
                operands.y,
                preference.0,
            );
        })?;
        match chosen {
            Ok(found) if found.workspaceSize <= circumstances.scratch_bytes => {
                Ok(Some(Algorithm(found.algo)))
            }
            Ok(_) => Ok(None),
            Err(error) if is_refusal(error) => Ok(None),
            Err(error) => Err(self.failure(doing, ("cublasLtMatmulAlgoGetHeuristic", error))),
        }
    }

    /// Enqueues a product; false where the algorithm does not take it.
    ///
    /// # Safety
    /// The views are as long as the shape says, and `scratch_bytes` of the scratch memory start on 256 bytes.
    pub(in crate::cuda::device) unsafe fn multiply(
        &self,
        stream: &Stream,
        product: &Product<'_>,
        algorithm: &Algorithm,
        scratch_bytes: usize,
    ) -> Result<bool, CudaError> {
        let (one, zero) = (1.0f32, 0.0f32);
        let doing = "multiply matrices";
        let operands = Operands::new(product, product.rows).map_err(|error| self.failure(doing, error))?;
        let y = product.y.address() as *mut c_void;
        let mut done = Ok(());
        // SAFETY: descriptions of the operands, scalars of the described type; the rest is the caller's word.
        within(&self.context, || unsafe {
            done = result::matmul(
                self.handle,
                operands.description,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                product.weight.address() as *const c_void,
                operands.weight,
                product.x.address() as *const c_void,
                operands.x,
                y,
                operands.y,
                y,
                operands.y,
                &algorithm.0,
                product.scratch.address() as *mut c_void,
                scratch_bytes,
                stream.handle.cast(),
            );
        })?;
        match done {
            Ok(()) => Ok(true),
            Err(error) if is_refusal(error) => Ok(false),
            Err(error) => {
                // It has no word for a lost context; the driver does.
                self.context.check_alive(doing)?;
                Err(self.failure(doing, ("cublasLtMatmul", error)))
            }
        }
    }

    fn failure(&self, doing: &str, (function, error): (&'static str, CublasError)) -> CudaError {
        failure(&self.context, doing, function, error)
    }
}

impl Drop for Matrices {
    fn drop(&mut self) {
        if self.context.is_abandoned() {
            return;
        }
        let mut done = Ok(());
        self.context.release("cuCtxSetCurrent", || {
            // SAFETY: made by `new`, not used after this.
            done = unsafe { result::destroy_handle(self.handle) };
            cudarc::driver::sys::CUresult::CUDA_SUCCESS
        });
        if let Err(CublasError(status)) = done {
            tracing::warn!(
                device = self.context.label(),
                status = status as u32,
                "could not give cuBLASLt's handle back"
            );
        }
    }
}

/// Calls cuBLASLt with the context current on the thread.
fn within(context: &Context, call: impl FnOnce()) -> Result<(), CudaError> {
    context.call("cuCtxSetCurrent", "use cuBLASLt", || {
        call();
        cudarc::driver::sys::CUresult::CUDA_SUCCESS
    })
}

fn is_refusal(CublasError(status): CublasError) -> bool {
    matches!(status as u32, INVALID_VALUE | NOT_SUPPORTED)
}

fn failure(
    context: &Context,
    doing: &str,
    function: &'static str,
    CublasError(status): CublasError,
) -> CudaError {
    let name = match status as u32 {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        INVALID_VALUE => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => "a status without a name",
    };
    CudaError::Call {
        device: context.label().to_owned(),
        doing: doing.to_owned(),
        function,
        name: name.to_owned(),
        code: status as u32,
    }
}

/// Descriptions of a product and its matrices, null until they are made.
struct Operands {
    description: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
}

impl Operands {
    /// With `rows` rows, whatever the product has.
    fn new(product: &Product<'_>, rows: usize) -> Result<Operands, (&'static str, CublasError)> {
        use sys::{cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F};
        const NONE: Operands = Operands {
            description: std::ptr::null_mut(),
            weight: std::ptr::null_mut(),
            x: std::ptr::null_mut(),
            y: std::ptr::null_mut(),
        };
        let mut made = NONE;
        made.description = result::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F)
            .map_err(|error| ("cublasLtMatmulDescCreate", error))?;
        made.describe(Describe::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if let Some(bias) = product.bias {
            made.describe(Describe::CUBLASLT_MATMUL_DESC_EPILOGUE, &EPILOGUE_BIAS)?;
            made.describe(Describe::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address())?;
        }
        let (outputs, stride) = (product.outputs as u64, product.stride as u64);
        made.weight = layout(sys::cudaDataType::CUDA_R_16BF, stride, outputs)?;
        made.x = layout(sys::cudaDataType::CUDA_R_16BF, stride, rows as u64)?;
        made.y = layout(CUDA_R_32F, outputs, rows as u64)?;
        Ok(made)
    }

    fn describe<T>(&self, attribute: Describe, value: &T) -> Result<(), (&'static str, CublasError)> {
        // SAFETY: a live description; attributes above are set to values of their types.
        unsafe {
            result::set_matmul_desc_attribute(
                self.description,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|error| ("cublasLtMatmulDescSetAttribute", error))
    }
}

/// A matrix without gaps between its columns.
fn layout(
    element: sys::cudaDataType,
    rows: u64,
    columns: u64,
) -> Result<sys::cublasLtMatrixLayout_t, (&'static str, CublasError)> {
    result::create_matrix_layout(element, rows, columns, rows as i64)
        .map_err(|error| ("cublasLtMatrixLayoutCreate", error))
}

impl Drop for Operands {
    fn drop(&mut self) {
        for layout in [self.weight, self.x, self.y] {
            if !layout.is_null() {
                // SAFETY: made by `new`, not used after this. It is host memory: nothing worth a word can fail.
                let _ = unsafe { result::destroy_matrix_layout(layout) };
            }
        }
        if !self.description.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.description) };
        }
    }
}

/// What an algorithm may rely on.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(circumstances: Circumstances) -> Result<Preference, (&'static str, CublasError)> {
        let preference = Preference(
            result::create_matmul_pref().map_err(|error| ("cublasLtMatmulPreferenceCreate", error))?,
        );
        let [x, weight, y] = circumstances.alignment;
        preference
            .set(Prefer::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(circumstances.scratch_bytes as u64))?;
        // Unless told, it takes every address for a multiple of 256.
        preference.set(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &weight)?;
        preference.set(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &x)?;
        preference.set(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &y)?;
        preference.set(Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &y)?;
        Ok(preference)
    }

    fn set<T>(&self, attribute: Prefer, value: &T) -> Result<(), (&'static str, CublasError)> {
        // SAFETY: a live preference; attributes above are set to values of their types.
        unsafe {
            result::set_matmul_pref_attribute(
                self.0,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|error| ("cublasLtMatmulPreferenceSetAttribute", error))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, not used after this.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
