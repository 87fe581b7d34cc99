//! The pretend compiler, through the product's own way to cubins.

use consort_kernels::cuda::{
    arch::Arch,
    cubins::{Cubins, Origin},
    nvrtc::NvrtcError,
    settings::Settings,
    sources::{SOURCES, Source},
};

/// Only the software libraries, and no cache.
fn cubins() -> Cubins {
    let folder = consort_software_driver::folder().to_path_buf();
    Cubins::new(Settings { library: Some(folder), ..Settings::default() })
}

#[test]
fn software_driver_compiles_every_text_for_every_released_architecture() {
    let cubins = cubins();
    for source in SOURCES {
        for arch in Arch::RELEASED {
            let cubin = cubins.compiled(source, arch).unwrap();
            let image = format!("CONSORT SOFTWARE CUBIN\n{}\n{arch}\n", source.name);
            assert_eq!(String::from_utf8_lossy(&cubin.bytes), image);
            assert_eq!((cubin.log.as_str(), cubin.origin), ("", Origin::Compiler));
        }
    }
    let compiler = cubins.compiler(Arch::CHECKED[0]).unwrap();
    assert_eq!(compiler.version().to_string(), "12.9");
    assert!(compiler.file().starts_with(consort_software_driver::folder()), "{compiler:?}");
}

#[test]
fn software_driver_refuses_texts_that_are_no_kernels_and_says_why() {
    let prelude = "#include \"prelude.cuh\"\n";
    let kernel = "KERNEL(one, 32, 1, (int n)) {}\n";
    let text = |parts: [&str; 3]| -> &'static str { parts.concat().leak() };
    for (text, complaint) in [
        (text(["", kernel, ""]), "nobody/kernel.cu(1): error: the text does not include prelude.cuh"),
        (text([prelude, "int x;\n", "// KERNEL("]), "nobody/kernel.cu(1): error: the text defines no kernel"),
        (
            text([prelude, "#include \"other.cuh\"\n", kernel]),
            "nobody/kernel.cu(2): error: cannot open source file \"other.cuh\"",
        ),
        (
            text([prelude, "#include <cuda.h>\n", kernel]),
            "nobody/kernel.cu(2): error: cannot open source file \"<cuda.h>\"",
        ),
    ] {
        let source = Source { name: "nobody/kernel.cu", text, headers: &[] };
        let error = cubins().compiled(&source, Arch::CHECKED[0]).unwrap_err();
        let NvrtcError::Refused { log, .. } = &error else { panic!("{error}") };
        assert!(log.starts_with(complaint), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
    }
    let source = Source { name: "nobody/kernel.cu", text: text([prelude, kernel, ""]), headers: &[] };
    assert!(cubins().compiled(&source, Arch::CHECKED[0]).is_ok());
}

#[test]
fn software_driver_knows_no_architecture_that_its_nvrtc_s_version_does_not() {
    let arch: Arch = "sm_103a".parse().unwrap();
    let error = cubins().compiled(&SOURCES[0], arch).unwrap_err();
    assert!(matches!(&error, NvrtcError::Arch { known, .. } if known.ends_with("sm_100, sm_120")), "{error}");
}
