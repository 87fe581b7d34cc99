use super::*;
use crate::testing::Folder;

/// A folder as the chore writes it, with one text and cubins for two architectures.
fn written(name: &str) -> (Folder, Manifest, Vec<(String, String)>) {
    let folder = Folder::new(name);
    let digests = vec![("op/kernel.cu".to_owned(), digest(["prelude", "text"]))];
    let mut manifest =
        Manifest { compiler: "NVRTC 12.9".to_owned(), texts: digests.clone(), entries: Vec::new() };
    for arch in ["sm_80", "sm_90a"] {
        let (file, bytes) = (format!("op-kernel.{arch}.cubin"), format!("cubin for {arch}"));
        fs::write(folder.path().join(&file), &bytes).unwrap();
        let (source, sha256) = ("op/kernel.cu".to_owned(), sha256(bytes.as_bytes()));
        manifest.entries.push(Entry { source, arch: arch.to_owned(), file, sha256 });
    }
    manifest.write(folder.path()).unwrap();
    (folder, manifest, digests)
}

#[track_caller]
fn assert_stale(result: Result<(), ManifestError>, words: &str) {
    let error = result.expect_err(words).to_string();
    assert!(error.contains(words) && error.contains("cargo xtask cubins"), "{error}");
}

#[test]
fn a_written_manifest_is_read_back_and_fits_its_texts() {
    let (folder, manifest, digests) = written("manifest-roundtrip");
    assert_eq!(Manifest::read(folder.path()).unwrap(), manifest);
    manifest.check(folder.path(), &digests).unwrap();
}

#[test]
fn the_table_holds_one_element_for_each_cubin_with_the_digest_of_its_text() {
    let (folder, manifest, digests) = written("manifest-table");
    let table = manifest.table(folder.path());
    assert_eq!(table.matches("Embedded {").count(), 2);
    assert_eq!(table.matches(&format!("digest: {:?}", digests[0].1)).count(), 2);
    for arch in ["sm_80", "sm_90a"] {
        let path = folder.path().join(format!("op-kernel.{arch}.cubin"));
        let element = format!("arch: {arch:?}, digest: {:?}, bytes: include_bytes!({path:?})", digests[0].1);
        assert!(table.contains(&element), "{table}");
    }
    assert_eq!(Manifest::default().table(Path::new("")), "&[\n]");
}

#[test]
fn cubins_of_another_text_prelude_or_set_of_texts_are_refused() {
    let (folder, manifest, mut digests) = written("manifest-stale");
    assert_ne!(digest(["prelude", "text"]), digest(["prelude ", "text"]));
    assert_ne!(digest(["prelude", "text"]), digest(["preludet", "ext"]));
    digests[0].1 = digest(["prelude", "edited"]);
    assert_stale(manifest.check(folder.path(), &digests), "op/kernel.cu");
    assert_stale(manifest.check(folder.path(), &[]), "which is gone");
    digests[0].0 = "new/kernel.cu".to_owned();
    assert_stale(manifest.check(folder.path(), &digests), "no cubins of new/kernel.cu");
}

#[test]
fn a_missing_or_changed_cubin_is_refused() {
    let (folder, mut manifest, digests) = written("manifest-cubins");
    fs::write(folder.path().join("op-kernel.sm_80.cubin"), "other").unwrap();
    assert_stale(manifest.check(folder.path(), &digests), "op-kernel.sm_80.cubin is not the file");
    fs::remove_file(folder.path().join("op-kernel.sm_80.cubin")).unwrap();
    let error = manifest.check(folder.path(), &digests).expect_err("a file is gone").to_string();
    assert!(error.contains("op-kernel.sm_80.cubin"), "{error}");
    manifest.texts.push(("second/kernel.cu".to_owned(), "d".to_owned()));
    let both = manifest.texts.clone();
    assert_stale(manifest.check(folder.path(), &both), "no cubin of second/kernel.cu for sm_80");
}

#[test]
fn a_text_that_is_no_manifest_is_refused_with_its_line() {
    let folder = Folder::new("manifest-damage");
    for (text, line) in [
        ("", 1),
        ("consort cubins 2\n", 1),
        ("consort cubins 1\nnonsense\n", 2),
        ("consort cubins 1\ncompiler x\ncubin a sm_80 ../../etc/passwd 00\n", 3),
        ("consort cubins 1\ncubin a sm_80 .hidden 00\n", 2),
        ("consort cubins 1\ntext a\n", 2),
    ] {
        fs::write(folder.path().join(FILE_NAME), text).unwrap();
        let error = Manifest::read(folder.path()).expect_err(text).to_string();
        assert!(error.contains(&format!("{FILE_NAME}:{line}:")), "{error}");
    }
    let missing = Manifest::read(&folder.path().join("none")).map(drop);
    assert_stale(missing, "none/manifest.txt does not exist");
}

#[test]
fn texts_are_found_in_every_folder_in_order() {
    let folder = Folder::new("manifest-texts");
    for path in [
        "linear/kernel.cu",
        "attention/prefill.cu",
        "attention/shared.cuh",
        "attention/decode.cu",
        "cuda/prelude.cuh",
        "lib.rs",
    ] {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, if path.ends_with("shared.cuh") { "header" } else { "text" }).unwrap();
    }
    let found = texts(folder.path()).unwrap();
    let names: Vec<&str> = found.iter().map(|text| text.name.as_str()).collect();
    assert_eq!(names, ["attention/decode.cu", "attention/prefill.cu", "linear/kernel.cu"]);
    assert!(found.iter().all(|text| text.text == "text"));
    let shared = [("attention/shared.cuh".to_owned(), "header".to_owned())];
    assert_eq!(found.iter().map(|text| &text.headers[..]).collect::<Vec<_>>(), [&shared[..], &shared, &[]]);
    let of_attention = digest(["text", "header", "text"]);
    let expected = [of_attention.clone(), of_attention, digest(["text", "text"])];
    let digests: Vec<String> =
        digests(folder.path()).unwrap().into_iter().map(|(_, digest)| digest).collect();
    assert_eq!(digests, expected);
}
