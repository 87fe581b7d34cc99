use super::*;

/// The real compiler, if `cargo xtask cubins` installed it or this machine has one. Says so where there is none.
pub(super) fn compiler() -> Option<Cubins> {
    let workspace = Workspace::find().unwrap();
    let mut settings = Settings { cache: None, ..Settings::of_process() };
    if settings.library.is_none() {
        settings.environments.insert(0, workspace.root().join("target/venv-cubins"));
    }
    let cubins = Cubins::new(settings);
    match cubins.compiler(Arch::CHECKED[2]) {
        Ok(_) => Some(cubins),
        Err(error) => {
            println!("skipped, since there is no NVRTC here; `cargo xtask cubins` installs it. {error}");
            None
        }
    }
}

#[test]
fn items_keep_their_order_whatever_thread_takes_them() {
    let items: Vec<u64> = (0..1000).collect();
    assert_eq!(
        on_all_cores(&items, |item| item * item),
        items.iter().map(|item| item * item).collect::<Vec<_>>()
    );
    assert_eq!(on_all_cores(&[] as &[u64], |item| *item), Vec::<u64>::new());
}

#[test]
fn a_written_folder_is_what_the_build_script_takes() {
    let folder = std::env::temp_dir().join(format!("consort-xtask-cubins-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("left-over.sm_80.cubin"), "of a text that is gone").unwrap();
    fs::write(folder.join(FILE_NAME), "an old manifest").unwrap();
    let built: Vec<Built> = SOURCES
        .iter()
        .map(|source| Built {
            source: *source,
            arch: Arch::CHECKED[0],
            cubin: Cubin {
                bytes: source.name.as_bytes().into(),
                log: String::new(),
                origin: consort_kernels::cuda::cubins::Origin::Compiler,
            },
            verdict: Verdict::default(),
        })
        .collect();
    let manifest = write_cubins(&folder, "NVRTC 12.9", &built).unwrap();
    assert!(!folder.join("left-over.sm_80.cubin").exists());
    assert!(!folder.join(FILE_NAME).exists(), "nothing is embedded before all is judged");
    manifest.write(&folder).unwrap();
    let digests = consort_kernels::cuda::cubins::manifest::digests(
        &Workspace::find().unwrap().root().join("kernels/src"),
    );
    Manifest::read(&folder).unwrap().check(&folder, &digests.unwrap()).unwrap();
    fs::remove_dir_all(folder).unwrap();
}
