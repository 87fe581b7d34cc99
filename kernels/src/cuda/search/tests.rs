use super::*;
use crate::testing::Folder;

fn places_of_nvrtc(settings: &Settings, root: &Path) -> Vec<Place> {
    places(&NVRTC, settings, root)
}

fn folder(root: &Folder, path: &str) -> PathBuf {
    let path = root.path().join(path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn a_configured_library_is_the_only_place() {
    let root = Folder::new("search-configured");
    folder(&root, "usr/local/cuda/lib64");
    let mut settings = Settings { library: Some(folder(&root, "mine")), ..Settings::default() };
    assert_eq!(places_of_nvrtc(&settings, root.path()), [Place::Folder(root.path().join("mine"))]);
    settings.library = Some(root.path().join("mine/libnvrtc.so.12"));
    assert_eq!(
        places_of_nvrtc(&settings, root.path()),
        [Place::File(root.path().join("mine/libnvrtc.so.12"))]
    );
}

#[test]
fn the_order_is_loader_then_toolkits_then_system_then_wheels() {
    let root = Folder::new("search-order");
    let expected = [
        "elsewhere/cuda/lib64",
        "usr/local/cuda/lib64",
        "usr/local/cuda-13.0/targets/sbsa-linux/lib",
        "usr/local/cuda-12.10/lib64",
        "usr/local/cuda-12.9/lib64",
        "opt/cuda/lib64",
        "usr/lib/x86_64-linux-gnu",
        "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib",
        "venv/lib/python3.11/site-packages/nvidia/cu13/lib",
        "python/lib/python3.12/site-packages/nvidia/cu13/lib",
        "home/.local/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib",
        "usr/local/lib/python3.11/dist-packages/nvidia/cuda_nvrtc/lib",
        "usr/lib/python3/dist-packages/nvidia/cuda_nvrtc/lib",
    ]
    .map(|path| Place::Folder(folder(&root, path)));
    folder(&root, "usr/local/cuda-11.0/bin");
    folder(&root, "no-python/lib/python3.12/site-packages/nvidia/cu13/lib");
    let python = folder(&root, "python/bin");
    fs::write(python.join("python3"), "").unwrap();
    let settings = Settings {
        toolkits: vec![root.path().join("elsewhere/cuda")],
        environments: vec![root.path().join("venv")],
        programs: vec![folder(&root, "no-python/bin"), python],
        home: Some(root.path().join("home")),
        ..Settings::default()
    };
    let found = places_of_nvrtc(&settings, root.path());
    assert_eq!(found[0], Place::Loader);
    assert_eq!(found[1..], expected);
}

#[test]
fn an_empty_machine_leaves_the_loader() {
    let root = Folder::new("search-empty");
    assert_eq!(places_of_nvrtc(&Settings::default(), root.path()), [Place::Loader]);
}
