//! Kernels with one planted mistake each: every one is caught by the mode that the crate's documentation names for it,
//! and the same kernel without the mistake is clean in every mode.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use consort_emulator::{Copies, Order, Settings};

#[derive(Clone, Copy)]
enum Build {
    Plain,
    Asan,
    Tsan,
}

/// The driver of the planted kernels, compiled once with or without a sanitizer.
fn driver(build: Build) -> &'static Path {
    static DRIVERS: [OnceLock<PathBuf>; 3] = [const { OnceLock::new() }; 3];
    DRIVERS[build as usize].get_or_init(|| {
        let home = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("planted-{}", build as usize));
        std::fs::create_dir_all(&folder).expect("the target folder is writable");
        let (sanitizer, define) = match build {
            Build::Plain => (None, "CONSORT_PLAIN"),
            Build::Asan => (Some("-fsanitize=address"), "CONSORT_ASAN"),
            Build::Tsan => (Some("-fsanitize=thread"), "CONSORT_TSAN"),
        };
        let compile = |source: PathBuf, watched: bool| {
            let object = folder.join(source.file_name().expect("a file")).with_extension("o");
            let mut command = compiler();
            command.args([
                "-std=c++20",
                "-O1",
                "-g1",
                "-fno-strict-aliasing",
                "-fno-omit-frame-pointer",
                "-c",
            ]);
            command.arg("-DCONSORT_EMULATOR").arg(format!("-D{define}"));
            command.arg("-I").arg(home.join("cpp")).arg("-I").arg(home.join("../src/cuda"));
            command.args(sanitizer.filter(|_| watched));
            if source.extension().is_some_and(|extension| extension == "cu") {
                command.args(["-x", "c++"]);
            }
            run(command.arg(&source).arg("-o").arg(&object));
            object
        };
        // As build.rs has it: all of the machine, of which one file is watched.
        let files = std::fs::read_dir(home.join("cpp"))
            .expect("the machine's folder")
            .map(|file| file.expect("its files").path());
        let mut objects: Vec<PathBuf> = files
            .filter(|file| file.extension().is_some_and(|extension| extension == "cpp" || extension == "S"))
            .map(|file| compile(file.clone(), file.ends_with("accesses.cpp")))
            .collect();
        objects.push(compile(home.join("tests/planted/planted.cu"), true));
        objects.push(compile(home.join("tests/planted/main.cpp"), false));
        let program = folder.join("driver");
        run(compiler().args(sanitizer).args(&objects).arg("-o").arg(&program));
        program
    })
}

fn compiler() -> Command {
    Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()))
}

fn run(command: &mut Command) {
    let output = command.output().expect("a C++ compiler is installed");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The race detector of some compilers wants addresses where it expects them. Containers may not allow to ask for that;
/// then it is run as it is.
fn with_fixed_addresses(program: &Path) -> Command {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    let probe =
        || Command::new("setarch").args(["-R", "true"]).output().is_ok_and(|run| run.status.success());
    if *ALLOWED.get_or_init(probe) {
        let mut command = Command::new("setarch");
        command.arg("-R").arg(program);
        return command;
    }
    Command::new(program)
}

/// Everything that a planted kernel's run prints.
fn outcome(build: Build, kernel: &str, blocks: u32, settings: Settings) -> String {
    outcome_with(build, kernel, blocks, settings, None)
}

/// The same, with one more word for the driver.
fn outcome_with(build: Build, kernel: &str, blocks: u32, settings: Settings, word: Option<&str>) -> String {
    let mut command = match build {
        Build::Tsan => with_fixed_addresses(driver(build)),
        Build::Plain | Build::Asan => Command::new(driver(build)),
    };
    command.arg(kernel).arg(blocks.to_string());
    command.args([settings.order as u32, settings.copies as u32].map(|value| value.to_string()));
    command.arg(settings.seed.to_string()).args(word);
    command.env("ASAN_OPTIONS", "detect_leaks=0").env("TSAN_OPTIONS", "halt_on_error=1");
    let output = command.output().expect("the driver runs");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

fn in_every_mode(build: Build, kernel: &str, blocks: u32) -> impl Iterator<Item = (Settings, String)> {
    Settings::all().map(move |settings| (settings, outcome(build, kernel, blocks, settings)))
}

fn assert_clean(build: Build, kernel: &str, blocks: u32) {
    for (settings, outcome) in in_every_mode(build, kernel, blocks) {
        assert_eq!(outcome, "clean\n", "{kernel}, {settings:?}");
    }
}

/// Each launch faults with a message that holds all of `parts`, whatever the mode.
fn assert_always_faults(kernel: &str, parts: &[&str]) {
    for (settings, outcome) in in_every_mode(Build::Plain, kernel, 1) {
        for part in parts.iter().chain(&["fault: ", &format!("kernel {kernel}")]) {
            assert!(outcome.contains(part), "{kernel}, {settings:?}: no `{part}` in {outcome}");
        }
    }
}

fn with(order: Order, copies: Copies) -> Settings {
    Settings { order, copies, seed: 3 }
}

#[test]
fn emulator_kernels_without_mistakes_are_clean_in_every_mode() {
    for kernel in ["reverse_right", "rounds_right", "copied_right"] {
        assert_clean(Build::Plain, kernel, 1);
        assert_clean(Build::Asan, kernel, 1);
        assert_clean(Build::Tsan, kernel, 1);
    }
    assert_clean(Build::Plain, "flag_right", 2);
    assert_clean(Build::Tsan, "flag_right", 2);
}

#[test]
fn emulator_finds_a_missing_barrier_before_a_read_by_any_order_of_threads() {
    let kernel = "reverse_without_barrier_before_the_read";
    for order in [Order::Ascending, Order::Descending, Order::Shuffled, Order::FarWarp] {
        let outcome = outcome(Build::Plain, kernel, 1, with(order, Copies::AtOnce));
        assert!(outcome.starts_with("wrong: ") && outcome.contains("nan"), "{order:?}: {outcome}");
    }
    let raced = outcome(Build::Tsan, kernel, 1, Settings::PLAIN);
    assert!(raced.contains("ThreadSanitizer: data race"), "{raced}");
}

#[test]
fn emulator_finds_a_missing_barrier_before_a_write_by_letting_one_warp_run_far() {
    let kernel = "rounds_without_barrier_before_the_write";
    let outcomes: Vec<String> = (0..8)
        .map(|seed| {
            outcome(Build::Plain, kernel, 1, Settings { seed, ..with(Order::FarWarp, Copies::AtOnce) })
        })
        .collect();
    assert!(outcomes.iter().any(|outcome| outcome.starts_with("wrong: ")), "{outcomes:?}");
    let raced = outcome(Build::Tsan, kernel, 1, Settings::PLAIN);
    assert!(raced.contains("ThreadSanitizer: data race"), "{raced}");
}

#[test]
fn emulator_finds_a_missing_wait_by_copying_late() {
    let kernel = "copied_without_wait";
    for order in [Order::Ascending, Order::Descending, Order::Shuffled, Order::FarWarp] {
        let late = outcome(Build::Plain, kernel, 1, with(order, Copies::Late));
        assert!(late.starts_with("wrong: ") && late.contains("nan"), "{order:?}: {late}");
        assert_eq!(outcome(Build::Plain, kernel, 1, with(order, Copies::AtOnce)), "clean\n", "{order:?}");
    }
}

#[test]
fn emulator_finds_every_access_out_of_bounds() {
    assert_always_faults("reads_beyond_the_end", &["touches 0x", "thread (5, 0, 0)"]);
    assert_always_faults("writes_beyond_the_end", &["touches 0x", "thread (6, 0, 0)"]);
    assert_always_faults("writes_beyond_shared_memory", &["wrote beyond its 512 bytes of shared memory"]);
    for kernel in ["reads_beyond_the_end", "writes_beyond_the_end", "writes_beyond_shared_memory"] {
        let found = outcome(Build::Asan, kernel, 1, Settings::PLAIN);
        assert!(found.contains("AddressSanitizer: heap-buffer-overflow"), "{found}");
        assert!(found.contains("planted.cu"), "{found}");
    }
}

#[test]
fn emulator_finds_accesses_to_the_wrong_memory() {
    assert_always_faults("matrix_from_global_memory", &["the row of a matrix", "not in shared memory"]);
    assert_always_faults("copy_from_shared_memory", &["an asynchronous copy from", "in shared memory"]);
    assert_always_faults(
        "global_load_from_shared_memory",
        &["a load from global memory", "in shared memory"],
    );
}

#[test]
fn emulator_finds_misaligned_accesses() {
    assert_always_faults("reads_misaligned", &["16 bytes at 0x", "are not aligned"]);
}

#[test]
fn emulator_finds_divergent_barriers_and_warps() {
    assert_always_faults("divergent_barrier", &["a divergent barrier", "__syncthreads in line"]);
    assert_always_faults("divergent_warp", &["a divergent warp", "__syncwarp in line", "a shuffle in line"]);
    assert_always_faults("absent_lanes", &["a shuffle", "lanes"]);
}

#[test]
fn emulator_finds_threads_that_leave_too_early() {
    assert_always_faults("leaves_before_the_barrier", &["__syncthreads", "thread (9, 0, 0)"]);
    for copies in [Copies::Late, Copies::ByChance] {
        let found: Vec<String> = (0..4)
            .map(|seed| {
                let settings = Settings { seed, ..with(Order::Ascending, copies) };
                outcome(Build::Plain, "leaves_with_copies_under_way", 1, settings)
            })
            .collect();
        let expected = "leaves the kernel with copies to shared memory under way";
        assert!(found.iter().any(|found| found.contains(expected)), "{copies:?}: {found:?}");
    }
}

#[test]
fn emulator_finds_a_wait_without_end() {
    assert_always_faults("waits_for_ever", &["no thread can go on", "thread (11, 0, 0)", "polls memory"]);
    assert_always_faults(
        "waits_for_ever_by_exchange",
        &["no thread can go on", "thread (12, 0, 0)", "polls memory"],
    );
}

#[test]
fn emulator_grids_run_bit_by_bit_end_as_those_run_at_once() {
    let opened =
        |kernel: &str, blocks, settings| outcome_with(Build::Plain, kernel, blocks, settings, Some("opened"));
    let faults = ["reads_beyond_the_end", "divergent_barrier", "leaves_before_the_barrier"];
    for settings in Settings::all() {
        for (kernel, blocks) in
            [("reverse_right", 1), ("rounds_right", 1), ("copied_right", 1), ("flag_right", 2)]
        {
            assert_eq!(opened(kernel, blocks, settings), "clean\n", "{kernel}, {settings:?}");
        }
        for kernel in faults {
            let (found, at_once) = (opened(kernel, 1, settings), outcome(Build::Plain, kernel, 1, settings));
            let described = |text: &str| text.split("touches").next().map(str::to_owned);
            assert_eq!(described(&found), described(&at_once), "{settings:?}");
        }
        // Somebody else may still change what it polls.
        assert_eq!(opened("waits_for_ever", 1, settings), "fault: waits_for_ever is blocked\n");
    }
}

#[test]
fn emulator_finds_an_unordered_flag_by_the_race_detector() {
    let found = outcome(Build::Tsan, "flag_unordered", 2, Settings::PLAIN);
    assert!(found.contains("ThreadSanitizer: data race") && found.contains("planted.cu"), "{found}");
}

#[test]
fn emulator_refuses_launches_that_no_device_would_take() {
    let launch = |kernel: &str, grid, threads, shared_bytes| {
        let arguments = Vec::new();
        let grid = consort_emulator::Grid {
            kernel,
            grid,
            threads,
            shared_bytes,
            arguments,
            argument_bytes: vec![],
            rank: 0,
        };
        // SAFETY: each is refused before any thread runs.
        #[allow(unsafe_code)]
        unsafe { consort_emulator::launch(grid, Settings::PLAIN) }.unwrap_err().0
    };
    assert!(launch("nothing", [1, 1, 1], [32, 1, 1], 0).contains("there is no kernel of this name"));
    let (name, parameters, threads) = consort_emulator::kernels()[0];
    assert!(launch(name, [0, 1, 1], [32, 1, 1], 0).contains("a grid without blocks"));
    assert!(launch(name, [1, 70_000, 1], [32, 1, 1], 0).contains("a grid too large"));
    assert!(launch(name, [1, 1, 1], [threads + 1, 1, 1], 0).contains("threads a block"));
    assert!(launch(name, [1, 1, 1], [32, 1, 1], 300_000).contains("bytes of shared memory"));
    let expected = format!("0 arguments for {} parameters", parameters.len());
    assert!(launch(name, [1, 1, 1], [32, 1, 1], 0).contains(&expected));
}
