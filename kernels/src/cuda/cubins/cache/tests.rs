use std::{process::Command, time::Duration};

use super::*;
use crate::testing::Folder;

fn compiled(cubin: &[u8]) -> Compiled {
    Compiled { cubin: cubin.to_vec(), log: "ptxas info    : 0 bytes gmem\n".to_owned() }
}

#[test]
fn what_was_put_is_got_back_by_its_key_alone() {
    let folder = Folder::new("cache-roundtrip");
    let cache = Cache::new(folder.path().join("made/when/needed"));
    assert_eq!(cache.get("a"), None);
    cache.put("a", &compiled(b"one"));
    cache.put("b", &compiled(b""));
    assert_eq!(
        (cache.get("a"), cache.get("b"), cache.get("c")),
        (Some(compiled(b"one")), Some(compiled(b"")), None)
    );
    cache.put("a", &compiled(b"two"));
    assert_eq!(cache.get("a"), Some(compiled(b"two")));
    assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 2, "no temporary file stays");
}

#[test]
fn truncated_lengthened_and_changed_files_are_as_good_as_none() {
    let folder = Folder::new("cache-damage");
    let cache = Cache::new(folder.path().to_path_buf());
    cache.put("a", &compiled(b"a cubin of some bytes"));
    let whole = fs::read(cache.file("a")).unwrap();
    for end in 0..whole.len() {
        fs::write(cache.file("a"), &whole[..end]).unwrap();
        assert_eq!(cache.get("a"), None, "{end} of {} bytes", whole.len());
    }
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 0x40;
        assert_eq!(decode(&changed), None, "byte {at} changed");
    }
    assert_eq!(decode(&[&whole[..], b"x"].concat()), None);
    cache.put("a", &compiled(b"anew"));
    assert_eq!(cache.get("a"), Some(compiled(b"anew")));
}

#[test]
fn a_pipe_of_the_name_is_not_waited_for() {
    let folder = Folder::new("cache-pipe");
    let cache = Cache::new(folder.path().to_path_buf());
    let made = Command::new("mkfifo").arg(cache.file("a")).status().unwrap();
    assert!(made.success());
    assert_eq!(cache.get("a"), None);
    cache.put("a", &compiled(b"anew"));
    assert_eq!(cache.get("a"), Some(compiled(b"anew")));
}

#[test]
fn a_folder_that_cannot_be_written_loses_the_file_and_nothing_else() {
    let folder = Folder::new("cache-unwritable");
    let in_the_way = folder.path().join("file");
    fs::write(&in_the_way, "not a folder").unwrap();
    let cache = Cache::new(in_the_way);
    cache.put("a", &compiled(b"one"));
    assert_eq!(cache.get("a"), None);
}

#[test]
fn the_oldest_files_go_beyond_the_bound() {
    let folder = Folder::new("cache-bound");
    let cache = Cache::new(folder.path().to_path_buf());
    fs::write(folder.path().join("somebody-else's.txt"), "stays").unwrap();
    for number in 0..ENTRIES_MAX {
        let file = File::create(cache.file(&format!("old-{number:04}"))).unwrap();
        let age = Duration::from_secs(10_000 - number as u64);
        file.set_modified(SystemTime::now() - age).unwrap();
    }
    cache.put("new", &compiled(b"new"));
    assert!(cache.get("new").is_some());
    let left = |number: usize| cache.file(&format!("old-{number:04}")).exists();
    let kept = ENTRIES_KEPT - 1;
    assert!(!left(ENTRIES_MAX - kept - 1) && left(ENTRIES_MAX - kept) && left(ENTRIES_MAX - 1));
    assert!(folder.path().join("somebody-else's.txt").exists());
}

#[test]
fn threads_that_keep_the_same_cubin_leave_one_whole_file() {
    let folder = Folder::new("cache-threads");
    let cache = Cache::new(folder.path().to_path_buf());
    let large = compiled(&vec![7; 1 << 20]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..8).for_each(|_| cache.put("a", &large)));
        }
    });
    assert_eq!(cache.get("a"), Some(large));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_cache_tells_what_it_holds_and_whether_it_can_be_written() {
    let folder = Folder::new("cache-facts");
    let cache = Cache::new(folder.path().join("deep/cubins"));
    assert_eq!(
        cache.facts(),
        CacheFacts { folder: folder.path().join("deep/cubins"), cubins: 0, bytes: 0, refusal: None },
        "a folder that can be made is as good as one that is there"
    );
    assert!(!folder.path().join("deep").exists(), "looking makes nothing");
    fs::create_dir_all(folder.path().join("deep/cubins/a-folder.cubin")).unwrap();
    fs::write(folder.path().join("deep/cubins/one.cubin"), [0; 30]).unwrap();
    fs::write(folder.path().join("deep/cubins/two.cubin"), [0; 12]).unwrap();
    fs::write(folder.path().join("deep/cubins/other"), [0; 7]).unwrap();
    let facts = cache.facts();
    assert_eq!((facts.cubins, facts.bytes, facts.refusal), (2, 42, None));
    let below_a_file = Cache::new(folder.path().join("deep/cubins/one.cubin/cache"));
    assert!(below_a_file.facts().refusal.is_some_and(|reason| reason.contains("not a directory")));
}
