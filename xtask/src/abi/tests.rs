use std::{env, process};

use super::*;

/// A header like NVRTC's, with what `change` makes of it.
fn nvrtc_header(change: impl Fn(String) -> String) -> String {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/emulator/driver/cpp/nvrtc/abi.h");
    let text = fs::read_to_string(ours).unwrap();
    change(text.replace("SOFTWARE_LINKAGE nvrtcResult", "extern \"C\" nvrtcResult"))
}

/// What the check of NVRTC says of a header.
fn compared(name: &str, header: &str) -> Result<String> {
    let folder = env::temp_dir().join(format!("consort-xtask-abi-{name}-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    // Another guard than our header's, which is included first.
    fs::write(folder.join("nvrtc.h"), header.replace("#pragma once", "")).unwrap();
    let workspace = Workspace::find().unwrap();
    let result = compare(&workspace, "nvrtc.cpp", std::slice::from_ref(&folder), &folder);
    fs::remove_dir_all(folder).unwrap();
    result
}

#[test]
fn a_header_that_agrees_is_counted() {
    let summary = compared("same", &nvrtc_header(|text| text)).unwrap();
    assert!(summary.starts_with("nvrtc.h: 7 constants, 2 sizes, 0 fields and 11 functions"), "{summary}");
}

#[test]
fn another_value_is_reported_by_its_name() {
    let changed =
        nvrtc_header(|text| text.replace("NVRTC_ERROR_COMPILATION = 6", "NVRTC_ERROR_COMPILATION = 7"));
    let error = compared("value", &changed).unwrap_err().to_string();
    assert!(error.contains("NVRTC_ERROR_COMPILATION has another value"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn another_parameter_is_reported_by_its_function_s_name() {
    let changed = nvrtc_header(|text| text.replace("std::size_t* bytes", "std::size_t* bytes, int more"));
    let error = compared("parameter", &changed).unwrap_err().to_string();
    assert!(error.contains("nvrtcGetCUBINSize takes or returns something else"), "{error}");
    assert!(error.contains("nvrtcGetProgramLogSize takes or returns something else"), "{error}");
    assert_eq!(error.lines().count(), 2, "{error}");
}

#[test]
fn facts_that_are_kept_are_compared_line_by_line_in_any_order() {
    assert_eq!(differences("a = 1\nb = 2\n", "b = 2\na = 1\n"), "");
    assert_eq!(differences("a = 1\nb = 2\n", "a = 1\nb = 3\nc = 4\n"), "- b = 2\n+ b = 3\n+ c = 4");
}
