use super::*;

#[cfg(target_os = "linux")]
#[test]
fn mount_points_are_told_from_folders_in_either_way() {
    let folder = tempfile::tempdir().unwrap();
    for (path, expected) in [(Path::new("/proc"), true), (folder.path(), false)] {
        assert_eq!(is_mount_point(path).unwrap(), expected, "{}", path.display());
        assert_eq!(is_on_another_device(path).unwrap(), expected, "{}", path.display());
    }
}
