//! The software libraries' view of CUDA's interfaces against that of cudarc, which is generated from the real headers:
//! whoever calls through the one must find the other.

mod cublaslt;
mod driver;
mod facts;
mod library;

use std::path::PathBuf;

use self::facts::Facts;

fn library_file(name: &str) -> PathBuf {
    consort_software_driver::folder().join(name)
}

/// Functions of the driver that cuda.h has and the bindings have not; `cargo xtask abi` compares them.
const IN_THE_HEADER_ALONE: &[&str] = &[
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cuEventElapsedTime",
    "cuGetProcAddress",
];

/// Functions of the driver that are compared with nothing: of other versions of cuda.h.
const OLD: &[&str] =
    &["cuCtxCreate_v2", "cuCtxCreate_v3", "cuProfilerStart", "cuProfilerStop", "cuStreamGetCaptureInfo_v2"];

/// And those that answer that they are not offered, and look at no parameter.
const NOT_OFFERED: &[&str] = &[
    "cuDestroyExternalMemory",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetMemPool",
    "cuDeviceSetMemPool",
    "cuExternalMemoryGetMappedBuffer",
    "cuImportExternalMemory",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemAdvise",
    "cuMemAdvise_v2",
    "cuMemAllocFromPoolAsync",
    "cuMemAllocManaged",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemPrefetchAsync",
    "cuMemPrefetchAsync_v2",
    "cuOccupancyMaxActiveClusters",
    "cuOccupancyMaxPotentialClusterSize",
    "cuStreamAttachMemAsync",
];

/// Fails with every difference.
fn assert_same(file: &str, library: &Facts, bindings: &Facts) {
    let differences = library.differences(bindings);
    assert!(differences.is_empty(), "{file}:\n{}", differences.join("\n"));
}

/// Functions of the library that its view of itself leaves out.
fn unlisted(file: &str, start: &str, library: &Facts) -> Vec<String> {
    let words = self::library::words(&library_file(file), start);
    words.into_iter().filter(|name| !library.name(name)).collect()
}

#[test]
fn the_software_cublaslt_has_the_interface_of_the_bindings() {
    let file = "libcublasLt.so.13";
    // It calls the driver.
    library::facts(&library_file("libcuda.so.1"), c"software_driver_abi");
    let library = library::facts(&library_file(file), c"software_cublaslt_abi");
    assert!(library.count() > 160, "{}", library.count());
    assert_same(file, &library, &cublaslt::facts());
    assert!(unlisted(file, "cublasLt", &library).is_empty(), "{:?}", unlisted(file, "cublasLt", &library));
}

#[test]
fn the_software_driver_has_the_interface_of_the_bindings() {
    let file = "libcuda.so.1";
    let library = library::facts(&library_file(file), c"software_driver_abi");
    assert!(library.count() > 200, "{}", library.count());
    assert_same(file, &library.without(IN_THE_HEADER_ALONE), &driver::facts());
    let mut known: Vec<&str> = OLD.iter().chain(NOT_OFFERED).copied().collect();
    known.sort_unstable();
    assert_eq!(
        unlisted(file, "cu", &library),
        known,
        "functions missing in cpp/functions.h and cpp/abi_list.h"
    );
}

/// What nccl.h says, written by `cargo xtask abi --facts`.
const NCCL_HEADER: &str = include_str!("../../abi/nccl_facts.txt");

#[test]
fn the_software_nccl_has_the_interface_of_the_header() {
    let file = "libnccl.so.2";
    library::facts(&library_file("libcuda.so.1"), c"software_driver_abi");
    let library = library::facts(&library_file(file), c"software_nccl_abi");
    assert!(library.count() > 35, "{}", library.count());
    assert_same(file, &library, &Facts::of(NCCL_HEADER));
    assert!(unlisted(file, "nccl", &library).is_empty(), "{:?}", unlisted(file, "nccl", &library));
}
