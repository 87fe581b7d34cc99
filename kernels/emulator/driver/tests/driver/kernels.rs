//! Kernels, from images to launches.
#![allow(unsafe_code)]

use std::{ffi::CString, ptr};

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{result, sys};

use crate::support::*;

#[test]
fn software_driver_runs_a_kernel_by_name_in_every_order() {
    for order in ORDERS {
        let test = "kernels::software_driver_runs_a_kernel_by_name_in_every_order";
        let report = in_child_reported(test, &[(ORDER, order)], || {
            let context = device(0);
            let stream = context.new_stream().expect("a stream");
            let swiglu = Swiglu::new(72, 3);
            let input = swiglu.input(1);
            let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
            upload(from, &input);
            swiglu.launch(&stream, from, to).expect("a launch");
            stream.synchronize().expect("the kernel ends well");
            swiglu.check(&input, &download(to, 3 * 72));
            free(from);
            free(to);
        });
        let Some(report) = report else { return };
        assert_eq!((report.violations, report.launches, report.leaked_bytes()), (0, 1, 0), "{order}");
    }
}

#[test]
fn software_driver_refuses_images_and_names_it_does_not_know() {
    in_child("kernels::software_driver_refuses_images_and_names_it_does_not_know", &[], || {
        let _context = device(0);
        let load = |image: &[u8]| {
            // SAFETY: zero-terminated.
            unsafe { result::module::load_data(image.as_ptr().cast()) }.map(|module| module as usize)
        };
        assert_eq!(code(load(b".version 8.0\n\0").map(drop)), 200, "CUDA_ERROR_INVALID_IMAGE");
        let blackwell = load(b"CONSORT SOFTWARE CUBIN\nname.cu\nsm_100a\n\0");
        assert_eq!(code(blackwell.map(drop)), 209, "CUDA_ERROR_NO_BINARY_FOR_GPU");
        let hopper = load(b"CONSORT SOFTWARE CUBIN\nname.cu\nsm_90a\n\0").expect("our own architecture");
        let name = CString::new("no_such_kernel").expect("no zeros");
        // SAFETY: a module.
        let missing = unsafe { result::module::get_function(hopper as sys::CUmodule, name) };
        assert_eq!(code(missing.map(drop)), 500, "CUDA_ERROR_NOT_FOUND");
    });
}

#[test]
fn software_driver_refuses_launches_that_no_device_takes() {
    in_child("kernels::software_driver_refuses_launches_that_no_device_takes", &[], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let norm = function("rms_norm_1");
        let launch = |grid, block, shared| {
            // SAFETY: refused before any argument is read.
            code(unsafe { result::launch_kernel(norm, grid, block, shared, stream.cu_stream(), &mut []) })
        };
        assert_eq!(launch((1, 1, 1), (1024, 1, 1), 0), 1, "more threads than its launch bounds");
        assert_eq!(launch((0, 1, 1), (32, 1, 1), 0), 1, "no block");
        assert_eq!(launch((1, 65536, 1), (32, 1, 1), 0), 1, "too large a grid");
        assert_eq!(launch((1, 1, 1), (32, 1, 1), (48 << 10) + 4), 1, "shared memory that was not asked for");
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function.
        unsafe {
            assert_eq!(sys::cuFuncSetAttribute(norm, attribute, 232_449) as u32, 1, "more than there is");
            assert_eq!(sys::cuFuncSetAttribute(norm, attribute, 232_448) as u32, 0);
        }
        let mut blocks = 0;
        // SAFETY: a function.
        let asked =
            unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, norm, 512, 100 << 10) };
        assert_eq!((asked as u32, blocks), (0, 2), "two times 101 KiB in 228");
    });
}

#[test]
fn software_driver_refuses_arguments_of_a_wrong_size() {
    in_child("kernels::software_driver_refuses_arguments_of_a_wrong_size", &[], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = function("swiglu_silu");
        let launch = |bytes: usize| {
            let (mut buffer, mut bytes) = ([0u8; 64], bytes);
            let mut extra = [
                ptr::without_provenance_mut(1),
                buffer.as_mut_ptr().cast(),
                ptr::without_provenance_mut(2),
                (&raw mut bytes).cast(),
                ptr::null_mut(),
            ];
            let (stream, none) = (stream.cu_stream(), ptr::null_mut());
            // SAFETY: the driver reads no more than the kernel's parameters have.
            unsafe {
                sys::cuLaunchKernel(swiglu, 1, 1, 1, 32, 1, 1, 0, stream, none, extra.as_mut_ptr()) as u32
            }
        };
        // A pointer, two numbers, a pointer, a number.
        assert_eq!(launch(28), 0, "the sum is over no rows");
        assert_eq!(launch(24), 1);
        assert_eq!(launch(32), 1);
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: a function.
        unsafe {
            assert_eq!(sys::cuFuncGetParamInfo(swiglu, 3, &mut offset, &mut bytes) as u32, 0);
            assert_eq!(
                sys::cuFuncGetParamInfo(swiglu, 5, &mut offset, &mut bytes) as u32,
                1,
                "there are five"
            );
        }
        assert_eq!((offset, bytes), (16, 8));
        stream.synchronize().expect("done");
    });
}
