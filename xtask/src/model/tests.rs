use std::{env, process as std_process};

use super::*;

/// A folder of this test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("consort-xtask-{name}-{}", std_process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const ABC_SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

#[test]
fn a_file_of_the_pinned_bytes_passes() {
    let folder = Folder::new("verify-passes");
    let path = folder.0.join("abc");
    fs::write(&path, "abc").unwrap();
    verify(&path, 3, ABC_SHA256).unwrap();
}

#[test]
fn a_truncated_file_is_refused_by_size_and_a_changed_one_by_hash() {
    let folder = Folder::new("verify-refuses");
    let path = folder.0.join("abc");
    fs::write(&path, "ab").unwrap();
    let error = verify(&path, 3, ABC_SHA256).expect_err("a byte is missing").to_string();
    assert!(error.contains("has 2 bytes, 3 expected"), "{error}");
    fs::write(&path, "abd").unwrap();
    let error = verify(&path, 3, ABC_SHA256).expect_err("a byte is changed").to_string();
    assert!(error.contains("SHA-256") && error.contains(ABC_SHA256), "{error}");
}

#[test]
fn an_entry_of_another_size_is_never_written() {
    let folder = Folder::new("unzip");
    let (archive, out) = (folder.0.join("a.zip"), folder.0.join("out"));
    let make = "import sys, zipfile; zipfile.ZipFile(sys.argv[1], 'w').writestr('inner/abc', 'abc')";
    let python = |code: &str| {
        let mut command = std_process::Command::new(PYTHON);
        command.args(["-c", code]).arg(&archive);
        command
    };
    process::run(&mut python(make)).unwrap();
    assert!(!process::succeeds(python(UNZIP).args(["inner/abc", "4"]).arg(&out)));
    assert!(!out.exists());
    process::run(python(UNZIP).args(["inner/abc", "3"]).arg(&out)).unwrap();
    verify(&out, 3, ABC_SHA256).unwrap();
}

#[test]
fn a_second_run_waits_for_the_first() {
    let folder = Folder::new("lock");
    let first = lock(&folder.0).unwrap();
    let other = File::open(folder.0.join(".lock")).unwrap();
    assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
    drop(first);
    other.try_lock().unwrap();
}

#[test]
fn what_a_killed_run_left_is_cleared_before_the_next_download() {
    let folder = Folder::new("scratch");
    fs::create_dir(folder.0.join(".download")).unwrap();
    fs::write(folder.0.join(".download/half.whl"), "half").unwrap();
    let scratch = Scratch::new(&folder.0).unwrap();
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
    drop(scratch);
    assert!(!folder.0.join(".download").exists());
}
