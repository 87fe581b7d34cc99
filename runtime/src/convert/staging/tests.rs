use super::*;

/// A finished folder beside the model that it is to replace, each told by the one file in it.
fn folders() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let (new, output) = (parent.path().join("out.partial-1/new"), parent.path().join("out"));
    for (folder, name) in [(&new, "new one"), (&output, "old one")] {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(name), "").unwrap();
    }
    (parent, new, output)
}

#[test]
fn two_folders_change_places_in_one_step_or_in_two() {
    let (_parent, new, output) = folders();
    exchange(&new, &output).unwrap();
    assert!(output.join("new one").exists());
    #[cfg(target_os = "linux")]
    assert!(new.join("old one").exists(), "the output was never without a model");

    let (_parent, new, output) = folders();
    step_aside(&new, &output, &mut |from, to| fs::rename(from, to)).unwrap();
    assert!(output.join("new one").exists() && new.with_file_name("old").join("old one").exists());
}

#[test]
fn a_model_that_stepped_aside_comes_back_or_is_told_where_it_is() {
    for (fails, rolls_back) in [(1..2, true), (1..3, false)] {
        let (_parent, new, output) = folders();
        let mut count = 0..;
        let mut rename = |from: &Path, to: &Path| match count.next() {
            Some(number) if fails.contains(&number) => Err(io::Error::other(format!("failure {number}"))),
            _ => fs::rename(from, to),
        };
        let error = step_aside(&new, &output, &mut rename).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "failure 1", "the first failure is the reason");
        assert!(new.join("new one").exists());
        assert_eq!(output.join("old one").exists(), rolls_back);
        let old = new.with_file_name("old");
        let told = error.to_string();
        let names_it = told.contains("failure 2") && told.contains(old.to_str().unwrap());
        assert!(rolls_back || names_it && old.join("old one").exists(), "{told}");
    }
}
