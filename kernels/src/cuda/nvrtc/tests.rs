use std::fs;

use super::*;
use crate::{
    cuda::{image, testing},
    testing::Folder,
};

const SM_80: Arch = Arch::CHECKED[0];

fn at(library: PathBuf) -> Settings {
    Settings { library: Some(library), ..Settings::default() }
}

fn refusal(library: PathBuf) -> String {
    Nvrtc::open(&at(library), SM_80).expect_err("no usable library").to_string()
}

#[test]
fn a_missing_library_says_where_it_was_looked_for_and_what_to_do() {
    let folder = Folder::new("nvrtc-missing");
    let text = refusal(folder.path().join("libnvrtc.so.12"));
    for words in
        ["libnvrtc.so.12", "CONSORT_CUDA_LIB_PATH", "pip install nvidia-cuda-nvrtc-cu12", "12.0 or newer"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let text = refusal(folder.path().to_path_buf());
    assert!(text.contains(&format!("{}: no libnvrtc.so.13", folder.path().display())), "{text}");
}

#[test]
fn a_file_that_is_no_library_is_named_with_the_loader_s_reason() {
    let folder = Folder::new("nvrtc-garbage");
    let file = folder.path().join("libnvrtc.so.12");
    fs::write(&file, "this is no library".repeat(100)).unwrap();
    for library in [folder.path().to_path_buf(), file.clone()] {
        let text = refusal(library);
        assert!(
            text.contains(&format!("{}: ", file.display())) && text.contains("invalid ELF header"),
            "{text}"
        );
    }
}

#[test]
fn an_old_library_and_one_without_functions_are_told_apart() {
    let folder = Folder::new("nvrtc-old");
    let version = |numbers: &str| {
        format!("int nvrtcVersion(int *major, int *minor) {{ {numbers} return *major == 0 ? 1 : 0; }}")
    };
    testing::shared_library(&folder, &version("*major = 11; *minor = 8;"));
    let text = refusal(folder.path().to_path_buf());
    assert!(text.contains("libnvrtc.so.12: version 11.8 is too old, 12.0 is needed"), "{text}");

    let folder = Folder::new("nvrtc-hollow");
    testing::shared_library(&folder, &version("*major = 12; *minor = 0;"));
    let text = refusal(folder.path().to_path_buf());
    assert!(text.contains("it has no nvrtcGetErrorString"), "{text}");

    let folder = Folder::new("nvrtc-mute");
    testing::shared_library(&folder, &version("*major = 0; *minor = 0;"));
    assert!(refusal(folder.path().to_path_buf()).contains("does not say its version"));

    let folder = Folder::new("nvrtc-other");
    testing::shared_library(&folder, "int other(void) { return 0; }");
    assert!(refusal(folder.path().to_path_buf()).contains("it has no nvrtcVersion"));
}

/// What the library answers when nothing goes wrong, and its failures when something does.
const IMPOSTOR: &str = r#"
#include <stddef.h>
int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 3; return 0; }
const char *nvrtcGetErrorString(int status) { return status == 7 ? "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE" : 0; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int *archs) { archs[0] = 80; archs[1] = 90; return 0; }
int nvrtcCreateProgram(void **p, const char *t, const char *n, int c, const char *const *h, const char *const *i)
    { static int program; *p = &program; return 0; }
int nvrtcDestroyProgram(void **p) { *p = 0; return 0; }
int nvrtcCompileProgram(void *p, int count, const char *const *options) { return 7; }
int nvrtcGetProgramLogSize(void *p, size_t *bytes) { *bytes = 4; return 0; }
int nvrtcGetProgramLog(void *p, char *log) { log[0] = 'l'; log[1] = 'o'; log[2] = 'g'; log[3] = 0; return 0; }
int nvrtcGetCUBINSize(void *p, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetCUBIN(void *p, char *cubin) { return 0; }
"#;

#[test]
fn a_failure_that_is_not_the_text_s_names_the_function_and_its_reason() {
    let folder = Folder::new("nvrtc-impostor");
    let nvrtc = Nvrtc::open(&at(testing::shared_library(&folder, IMPOSTOR)), SM_80).unwrap();
    assert_eq!(nvrtc.version(), Version { major: 12, minor: 3 });
    let error = nvrtc
        .compile(&Source { name: "op/kernel.cu", text: "", headers: &[] }, SM_80)
        .expect_err("it fails")
        .to_string();
    assert_eq!(
        error,
        "NVRTC's nvrtcCompileProgram failed for op/kernel.cu: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"
    );
    let error = nvrtc
        .compile(&Source { name: "op/kernel.cu", text: "\0", headers: &[] }, SM_80)
        .expect_err("a NUL")
        .to_string();
    assert_eq!(error, "op/kernel.cu holds a NUL byte");
}

#[test]
fn an_architecture_that_this_version_does_not_know_is_named_with_those_it_knows() {
    let folder = Folder::new("nvrtc-architectures");
    let nvrtc = Nvrtc::open(&at(testing::shared_library(&folder, IMPOSTOR)), SM_80).unwrap();
    let error = nvrtc
        .compile(&Source { name: "op/kernel.cu", text: "", headers: &[] }, Arch::CHECKED[2])
        .expect_err("sm_100a");
    let text = error.to_string();
    assert!(text.starts_with("NVRTC 12.3 at ") && text.contains("libnvrtc.so.12"), "{text}");
    assert!(text.contains("does not compile for sm_100a, only for sm_80, sm_90"), "{text}");
}

#[test]
fn a_library_too_old_for_the_device_hides_no_newer_one() {
    let newer = IMPOSTOR.replace("*minor = 3", "*minor = 9").replace("archs[1] = 90", "archs[1] = 100");
    let (old, new) = (Folder::new("nvrtc-hiding"), Folder::new("nvrtc-hidden"));
    let toolkit = |folder: &Folder, text: &str| {
        let file = testing::shared_library(folder, text);
        let lib64 = folder.path().join("lib64");
        fs::create_dir(&lib64).unwrap();
        fs::rename(file, lib64.join("libnvrtc.so.12")).unwrap();
        folder.path().to_path_buf()
    };
    let toolkits = vec![toolkit(&old, IMPOSTOR), toolkit(&new, &newer)];
    // An NVRTC on the loader's path would come before both.
    let settings = Settings { toolkits, ..Settings::default() };
    let found = |arch| Nvrtc::open(&settings, arch).map(|nvrtc| nvrtc.file().to_path_buf());
    if Nvrtc::open(&Settings::default(), SM_80).is_err() {
        assert!(found(SM_80).unwrap().starts_with(old.path()));
        assert!(found(Arch::CHECKED[2]).unwrap().starts_with(new.path()));
        let text = found("sm_121".parse().unwrap()).expect_err("nobody knows it").to_string();
        assert!(text.starts_with("NVRTC 12.3 at "), "the first is named: {text}");
    }
}

const TEXT: &str = r#"#include "prelude.cuh"
KERNEL(scale, 256, 2, (float* values, float factor, int count)) {
    int at = blockIdx.x * 256 + threadIdx.x;
    if (at < count) values[at] *= factor;
}
KERNEL(spills, 1024, 2, (const float* in, float* out)) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) v[i] = in[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) out[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
"#;

#[test]
fn the_real_compiler_makes_cubins_whose_log_and_image_agree() {
    let Some(settings) = testing::nvrtc_settings() else { return };
    let nvrtc = Nvrtc::open(&settings, SM_80).unwrap();
    for arch in Arch::CHECKED {
        let compiled =
            nvrtc.compile(&Source { name: "op/kernel.cu", text: TEXT, headers: &[] }, arch).unwrap();
        let kernels = image::kernels(&compiled.cubin).unwrap();
        assert_eq!(
            kernels.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>(),
            ["scale", "spills"]
        );
        assert_eq!(
            kernels.iter().map(|kernel| kernel.threads_max).collect::<Vec<_>>(),
            [Some(256), Some(1024)]
        );
        let sizes: Vec<u32> = kernels[0].parameters.iter().map(|parameter| parameter.bytes).collect();
        assert_eq!(sizes, [8, 4, 4]);
        let usage = usage::parse(&compiled.log).unwrap();
        assert_eq!(usage.len(), 2, "{}", compiled.log);
        for usage in usage {
            let kernel = kernels.iter().find(|kernel| kernel.name == usage.function).unwrap();
            assert_eq!(usage.registers, kernel.registers, "{arch} {}", usage.function);
            assert_eq!(usage.stack_frame_bytes, kernel.frame_bytes, "{arch} {}", usage.function);
            assert_eq!(usage.spill_store_bytes > 0, usage.function == "spills", "{arch} {}", usage.function);
        }
    }
}

#[test]
fn the_real_compiler_shows_file_and_line_of_a_mistake() {
    let Some(settings) = testing::nvrtc_settings() else { return };
    let nvrtc = Nvrtc::open(&settings, SM_80).unwrap();
    let text = "#include \"prelude.cuh\"\nKERNEL(wrong, 32, 1, (int* p)) { p[0] = no_such_name; }\n";
    let error = nvrtc
        .compile(&Source { name: "op/kernel.cu", text, headers: &[] }, SM_80)
        .expect_err("a mistake")
        .to_string();
    for words in ["refuses op/kernel.cu for sm_80", "op/kernel.cu(2): error", "no_such_name"] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn a_compiler_is_found_whatever_it_compiles_for() {
    let folder = Folder::new("nvrtc-any");
    let settings = at(testing::shared_library(&folder, IMPOSTOR));
    assert!(Nvrtc::open(&settings, Arch::of_device(12, 0).unwrap()).is_err());
    let found = Nvrtc::find(&settings).unwrap();
    assert_eq!(found.architectures(), Ok(vec![80, 90]));
    let missing = Nvrtc::find(&at(folder.path().join("nothing"))).unwrap_err();
    assert!(matches!(missing, NvrtcError::NotFound { .. }), "{missing}");
}
