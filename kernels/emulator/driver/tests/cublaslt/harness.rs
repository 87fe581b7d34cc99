//! cuBLASLt as cudarc gives it, with owners for what has to be destroyed.
#![allow(unsafe_code)]

use std::{
    ffi::{CString, c_void},
    os::unix::ffi::OsStrExt,
    ptr,
    sync::Arc,
};

use crate::matrix::{Matrix, Read};
use cudarc::{
    cublaslt::{
        CudaBlasLT, Matmul, MatmulConfig,
        result::{self, CublasError},
        sys::{self, cublasLtMatmulDescAttributes_t as Attribute},
    },
    driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut},
};

pub(crate) use sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtMatmulAlgo_t as Algorithm,
    cublasLtMatmulAlgoConfigAttributes_t as Config, cublasLtMatmulHeuristicResult_t as Proposal,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayoutAttribute_t as LayoutAttribute,
    cublasStatus_t as Status, cudaDataType_t as Type,
};

/// A handle on the context's device, with a stream and a workspace.
pub(crate) struct Lt {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) handle: sys::cublasLtHandle_t,
    pub(crate) workspace: CudaSlice<u8>,
}

impl Lt {
    pub(crate) fn new() -> Lt {
        load("libcuda.so.1");
        load("libcublasLt.so.13");
        let context = CudaContext::new(0).expect("a device");
        // SAFETY: tests order their streams themselves, and the driver sees where they do not.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().expect("a stream");
        let workspace = stream.alloc_zeros(4 << 20).expect("room for a workspace");
        let handle = result::create_handle().expect("a handle");
        Lt { context, stream, handle, workspace }
    }

    /// The matrix's elements on the device.
    pub(crate) fn upload(&self, matrix: &Matrix) -> CudaSlice<u8> {
        self.stream.clone_htod(&matrix.bytes()).expect("room for a matrix")
    }

    /// What has become of a matrix.
    pub(crate) fn download(&self, like: &Matrix, from: &CudaSlice<u8>) -> Matrix {
        like.read(&self.stream.clone_dtoh(from).expect("the work before it went well"))
    }

    /// At most `wanted` algorithms for a problem.
    pub(crate) fn proposals(&self, problem: &Problem, wanted: usize) -> Result<Vec<Proposal>, Status> {
        // SAFETY: zeros are a value of this structure.
        let mut results = vec![unsafe { std::mem::zeroed::<Proposal>() }; wanted];
        let mut found = 0;
        // SAFETY: open descriptors, and room for as many results as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                problem.operation,
                problem.a,
                problem.b,
                problem.d,
                problem.d,
                problem.preference,
                wanted as i32,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        accepted(status)?;
        results.truncate(found as usize);
        Ok(results)
    }

    /// Whether an algorithm fits a problem, and the workspace that it needs.
    pub(crate) fn check(&self, problem: &Problem, algorithm: &Algorithm) -> Result<usize, Status> {
        // SAFETY: zeros are a value of this structure.
        let mut result = unsafe { std::mem::zeroed::<Proposal>() };
        // SAFETY: open descriptors.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                problem.operation,
                problem.a,
                problem.b,
                problem.d,
                problem.d,
                algorithm,
                &mut result,
            )
        };
        accepted(status).map(|()| result.workspaceSize)
    }

    /// Enqueues `d = alpha * a * b + beta * c` at these addresses.
    pub(crate) fn multiply_at(&self, problem: &Problem, at: At<'_>) -> Result<(), Status> {
        let factors = (at.alpha, at.beta);
        // SAFETY: open descriptors; the addresses are the test's business, and the software driver checks them.
        unsafe {
            result::matmul(
                self.handle,
                problem.operation,
                (&raw const factors.0).cast(),
                (&raw const factors.1).cast(),
                at.a as *const c_void,
                problem.a,
                at.b as *const c_void,
                problem.b,
                at.c as *const c_void,
                problem.d,
                at.d as *mut c_void,
                problem.d,
                at.algorithm.map_or(ptr::null(), ptr::from_ref),
                at.workspace.0 as *mut c_void,
                at.workspace.1,
                self.stream.cu_stream().cast(),
            )
        }
        .map_err(|CublasError(status)| status)
    }

    /// The same on matrices, with `alpha` = 1 and `beta` = 0.
    pub(crate) fn multiply(
        &self,
        problem: &Problem,
        (a, b, d): (&CudaSlice<u8>, &CudaSlice<u8>, &mut CudaSlice<u8>),
        algorithm: Option<&Algorithm>,
    ) -> Result<(), Status> {
        let workspace = (address(&self.workspace), self.workspace.len());
        let at = At {
            alpha: 1.0,
            a: address(a),
            b: address(b),
            beta: 0.0,
            c: 0,
            d: address_mut(d),
            algorithm,
            workspace,
        };
        self.multiply_at(problem, at)
    }
}

/// Loads a software library by its path, so that the bindings get it when they ask for it by name.
fn load(name: &str) {
    let path = consort_software_driver::folder().join(name);
    let path = CString::new(path.as_os_str().as_bytes()).expect("paths hold no NUL");
    // SAFETY: a C string; the library's constructors set up nothing but itself.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "{path:?} cannot be loaded");
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and nobody has it afterwards.
        unsafe { result::destroy_handle(self.handle) }.expect("the handle is open");
    }
}

/// Addresses and factors of one call.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) alpha: f32,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) beta: f32,
    pub(crate) c: u64,
    pub(crate) d: u64,
    pub(crate) algorithm: Option<&'a Algorithm>,
    pub(crate) workspace: (u64, usize),
}

/// Where memory lies. That its stream is the harness's only one orders all uses.
pub(crate) fn address(memory: &CudaSlice<u8>) -> u64 {
    memory.device_ptr(memory.stream()).0
}

pub(crate) fn address_mut(memory: &mut CudaSlice<u8>) -> u64 {
    let stream = memory.stream().clone();
    memory.device_ptr_mut(&stream).0
}

/// The descriptors of a multiplication; C's layout is D's.
pub(crate) struct Problem {
    pub(crate) operation: sys::cublasLtMatmulDesc_t,
    pub(crate) a: sys::cublasLtMatrixLayout_t,
    pub(crate) b: sys::cublasLtMatrixLayout_t,
    pub(crate) d: sys::cublasLtMatrixLayout_t,
    pub(crate) preference: sys::cublasLtMatmulPreference_t,
}

impl Problem {
    /// With a workspace of 4 MiB allowed.
    pub(crate) fn new((a, read_a): (&Matrix, Read), (b, read_b): (&Matrix, Read), d: &Matrix) -> Problem {
        let problem = Problem {
            operation: result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F)
                .expect("memory"),
            a: layout(a),
            b: layout(b),
            d: layout(d),
            preference: result::create_matmul_pref().expect("memory"),
        };
        let operation = |read| i32::from(read == Read::Transposed);
        problem.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(read_a));
        problem.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(read_b));
        problem.prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(4u64 << 20));
        problem
    }

    /// Sets an attribute of the operation; `T` is its type.
    pub(crate) fn set<T>(&self, attribute: Attribute, value: &T) {
        // SAFETY: an open descriptor, and a value of the size that is told.
        unsafe {
            result::set_matmul_desc_attribute(
                self.operation,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .expect("the attribute has this size");
    }

    /// Sets an attribute of the preference.
    pub(crate) fn prefer<T>(&self, attribute: Preference, value: &T) {
        // SAFETY: as above.
        unsafe {
            result::set_matmul_pref_attribute(
                self.preference,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .expect("the attribute has this size");
    }

    /// Adds a bias for each row of D, and perhaps an activation.
    pub(crate) fn finish_with(&self, epilogue: Epilogue, bias: Option<u64>) {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue);
        if let Some(bias) = bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias);
        }
    }

    pub(crate) fn compute_in(&self, compute: Compute) {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, &compute);
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and nobody has them afterwards.
        unsafe {
            let layouts = [self.a, self.b, self.d].map(|layout| result::destroy_matrix_layout(layout));
            let others =
                [result::destroy_matmul_desc(self.operation), result::destroy_matmul_pref(self.preference)];
            assert!(layouts.iter().chain(&others).all(Result::is_ok));
        }
    }
}

fn layout(of: &Matrix) -> sys::cublasLtMatrixLayout_t {
    let layout = result::create_matrix_layout(of.kind, of.rows as u64, of.columns as u64, of.leading as i64)
        .expect("memory");
    set_layout(layout, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(of.batches as i32));
    set_layout(layout, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &(of.stride() as i64));
    layout
}

/// Sets an attribute of a layout.
pub(crate) fn set_layout<T>(layout: sys::cublasLtMatrixLayout_t, attribute: LayoutAttribute, value: &T) {
    // SAFETY: an open descriptor, and a value of the size that is told.
    unsafe {
        result::set_matrix_layout_attribute(layout, attribute, ptr::from_ref(value).cast(), size_of::<T>())
    }
    .expect("the attribute has this size");
}

/// Changes an algorithm's configuration.
pub(crate) fn configure<T>(algorithm: &mut Algorithm, attribute: Config, value: &T) -> Result<(), Status> {
    // SAFETY: a value of the size that is told.
    accepted(unsafe {
        sys::cublasLtMatmulAlgoConfigSetAttribute(
            algorithm,
            attribute,
            ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    })
}

/// Reads a number of an algorithm's configuration.
pub(crate) fn configured(algorithm: &Algorithm, attribute: Config) -> i32 {
    let (mut value, mut written) = (0i32, 0);
    // SAFETY: room for four bytes.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            (&raw mut value).cast(),
            4,
            &mut written,
        )
    };
    assert_eq!((accepted(status), written), (Ok(()), 4));
    value
}

/// A newly initialised algorithm for BF16 matrices with an f32 result.
pub(crate) fn initialised(lt: &Lt, id: i32) -> Result<Algorithm, Status> {
    let mut algorithm = Algorithm { data: [0; 8] };
    // SAFETY: an open handle.
    let status = unsafe {
        sys::cublasLtMatmulAlgoInit(
            lt.handle,
            Compute::CUBLAS_COMPUTE_32F,
            Type::CUDA_R_32F,
            Type::CUDA_R_16BF,
            Type::CUDA_R_16BF,
            Type::CUDA_R_32F,
            Type::CUDA_R_32F,
            id,
            &mut algorithm,
        )
    };
    accepted(status).map(|()| algorithm)
}

/// All algorithms for BF16 matrices with an f32 result.
pub(crate) fn ids(lt: &Lt) -> Vec<i32> {
    let (mut ids, mut found) = ([0; 16], 0);
    // SAFETY: an open handle, and room for as many numbers as are asked for.
    let status = unsafe {
        sys::cublasLtMatmulAlgoGetIds(
            lt.handle,
            Compute::CUBLAS_COMPUTE_32F,
            Type::CUDA_R_32F,
            Type::CUDA_R_16BF,
            Type::CUDA_R_16BF,
            Type::CUDA_R_32F,
            Type::CUDA_R_32F,
            ids.len() as i32,
            ids.as_mut_ptr(),
            &mut found,
        )
    };
    assert_eq!(accepted(status), Ok(()));
    ids[..found as usize].to_vec()
}

/// cudarc's own way to multiply, with a bias.
pub(crate) fn own_matmul(
    blas: &CudaBlasLT,
    config: MatmulConfig,
    (a, b, c): (&CudaSlice<f32>, &CudaSlice<f32>, &mut CudaSlice<f32>),
    bias: &CudaSlice<f32>,
) -> Result<(), CublasError> {
    // SAFETY: the software driver checks every address.
    unsafe { blas.matmul(config, a, b, c, Some(bias), None) }
}

pub(crate) fn accepted(status: Status) -> Result<(), Status> {
    if status == Status::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(status) }
}
