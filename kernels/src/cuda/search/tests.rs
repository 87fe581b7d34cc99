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

#[test]
fn the_driver_is_no_toolkits_and_cublaslt_is_in_its_wheels() {
    let root = Folder::new("search-driver");
    let [local, system, container, wsl, wheel] = [
        "usr/local/cuda/lib64",
        "usr/lib/x86_64-linux-gnu",
        "usr/local/nvidia/lib64",
        "usr/lib/wsl/lib",
        "venv/lib/python3.11/site-packages/nvidia/cublas/lib",
    ]
    .map(|path| Place::Folder(folder(&root, path)));
    let settings = Settings { environments: vec![root.path().join("venv")], ..Settings::default() };
    assert_eq!(places(&DRIVER, &settings, root.path()), [Place::Loader, system.clone(), container, wsl]);
    assert_eq!(places(&CUBLAS_LT, &settings, root.path()), [Place::Loader, local, system, wheel]);
}

#[test]
fn the_file_of_one_library_says_nothing_of_another() {
    let root = Folder::new("search-other-file");
    let mine = folder(&root, "mine");
    let compiler = Settings { library: Some(mine.join("libnvrtc.so.12")), ..Settings::default() };
    assert_eq!(places(&DRIVER, &compiler, root.path()), [Place::Loader]);
    assert_eq!(places(&CUBLAS_LT, &compiler, root.path()), [Place::Loader]);
    let driver = Settings { library: Some(mine.join("libcuda.so.1")), ..Settings::default() };
    assert_eq!(places(&DRIVER, &driver, root.path()), [Place::File(mine.join("libcuda.so.1"))]);
    assert_eq!(places(&NVRTC, &driver, root.path()), [Place::Loader]);
}

#[test]
fn nccl_is_in_its_wheel_and_what_watches_cards_comes_with_the_driver() {
    let root = Folder::new("search-nccl");
    let wheel = Place::Folder(folder(&root, "venv/lib/python3.11/site-packages/nvidia/nccl/lib"));
    let settings = Settings { environments: vec![root.path().join("venv")], ..Settings::default() };
    assert_eq!(places(&NCCL, &settings, root.path()), [Place::Loader, wheel]);
    assert_eq!(places(&MANAGEMENT, &settings, root.path()), [Place::Loader]);
}

#[test]
fn a_library_that_cannot_be_loaded_is_told_with_every_place() {
    let root = Folder::new("search-load");
    let mine = folder(&root, "mine");
    let settings = Settings { library: Some(mine.clone()), ..Settings::default() };
    let looked = load(&NCCL, &settings, root.path()).map(drop).unwrap_err();
    assert_eq!(looked, format!("\n  {}/libnccl.so.2: not there", mine.display()));
    fs::write(mine.join("libnccl.so.2"), "no library").unwrap();
    let looked = load(&NCCL, &settings, root.path()).map(drop).unwrap_err();
    assert!(looked.starts_with(&format!("\n  {}/libnccl.so.2: ", mine.display())), "{looked}");
    assert_eq!(looked.lines().count(), 2, "{looked}");
}
