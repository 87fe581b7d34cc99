use std::fs;

use super::*;
use crate::cuda::sources::Header;
use crate::{cuda::testing, testing::Folder};

const SM_80: Arch = Arch::CHECKED[0];
const SOURCE: Source = Source {
    name: "op/kernel.cu",
    text: "#include \"prelude.cuh\"\nKERNEL(one, 32, 1, (int* p)) { p[threadIdx.x] = 1; }\n",
    headers: &[],
};

#[test]
fn a_built_in_cubin_serves_its_own_text_and_architecture_only() {
    let digest: &'static str = SOURCE.digest().leak();
    let table = [Embedded { source: "op/kernel.cu", arch: "sm_80", digest, bytes: b"cubin" }];
    assert_eq!(embedded(&table, &SOURCE, SM_80), Some(&b"cubin"[..]));
    assert_eq!(embedded(&table, &SOURCE, Arch::CHECKED[1]), None);
    assert_eq!(embedded(&table, &Source { text: "edited", ..SOURCE }, SM_80), None);
    assert_eq!(embedded(&table, &Source { name: "other/kernel.cu", ..SOURCE }, SM_80), None);
}

#[test]
fn a_device_runs_the_newest_built_in_cubin_of_its_family() {
    let digest: &'static str = SOURCE.digest().leak();
    let built = |arch, bytes| Embedded { source: "op/kernel.cu", arch, digest, bytes };
    let table =
        [built("sm_80", b"80"), built("sm_86", b"86"), built("sm_100a", b"100a"), built("sm_120", b"120")];
    let of_device = |major, minor| embedded(&table, &SOURCE, Arch::of_device(major, minor).unwrap());
    assert_eq!(of_device(8, 0), Some(&b"80"[..]));
    assert_eq!(of_device(8, 6), Some(&b"86"[..]));
    assert_eq!(of_device(8, 9), Some(&b"86"[..]));
    assert_eq!(of_device(12, 1), Some(&b"120"[..]));
    assert_eq!(of_device(10, 3), None, "one of the accelerated architectures runs on no other device");
    assert_eq!(of_device(9, 0), None);
}

#[test]
fn everything_that_a_cubin_depends_on_is_in_its_key() {
    let other_text = Source { text: "edited", ..SOURCE };
    const HEADER: Header = Header { name: "op/op.cuh", text: "constexpr int ONE = 1;" };
    let other_headers = Source { headers: &[HEADER], ..SOURCE };
    let other_name = Source { name: "other/kernel.cu", ..SOURCE };
    let mut keys = vec![
        key("NVRTC 12.9", &SOURCE, SM_80),
        key("NVRTC 13.5", &SOURCE, SM_80),
        key("NVRTC 12.9", &SOURCE, Arch::CHECKED[1]),
        key("NVRTC 12.9", &other_text, SM_80),
        key("NVRTC 12.9", &other_name, SM_80),
        key("NVRTC 12.9", &other_headers, SM_80),
    ];
    assert_eq!(keys[0], key("NVRTC 12.9", &SOURCE, SM_80));
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 6);
}

#[test]
fn without_a_compiler_the_reason_is_told_each_time() {
    let folder = Folder::new("cubins-missing");
    let cubins = Cubins::new(Settings { library: Some(folder.path().join("none")), ..Settings::default() });
    for _ in 0..2 {
        let error = cubins.cubin(&SOURCE, SM_80).expect_err("no compiler").to_string();
        assert!(error.contains("CONSORT_CUDA_LIB_PATH"), "{error}");
    }
}

#[test]
fn a_text_is_compiled_once_and_again_when_its_file_is_damaged() {
    let Some(settings) = testing::nvrtc_settings() else { return };
    let folder = Folder::new("cubins-cache");
    let settings = Settings { cache: Some(folder.path().to_path_buf()), ..settings };
    let first = Cubins::new(settings.clone()).cubin(&SOURCE, SM_80).unwrap();
    assert_eq!(first.origin, Origin::Compiler);
    let again = Cubins::new(settings.clone()).cubin(&SOURCE, SM_80).unwrap();
    assert!(again == Cubin { origin: Origin::Cache, ..first.clone() });

    let file = fs::read_dir(folder.path().join("cubins")).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let anew = Cubins::new(settings.clone()).cubin(&SOURCE, SM_80).unwrap();
    assert_eq!(anew.origin, Origin::Compiler);
    assert!(anew.bytes == first.bytes, "one compiler makes the same bytes of one text");
    assert_eq!(Cubins::new(settings).cubin(&SOURCE, SM_80).unwrap().origin, Origin::Cache);
}

#[test]
fn a_build_embeds_all_of_its_texts_or_none() {
    for arch in embedded_architectures() {
        let arch: Arch = arch.parse().unwrap();
        for source in crate::cuda::sources::SOURCES {
            assert!(embedded(EMBEDDED, source, arch).is_some(), "{} for {arch}", source.name);
        }
    }
}
