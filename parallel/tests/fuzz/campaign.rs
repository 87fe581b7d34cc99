//! Runs cases until the time is up, and sees to it that a failure can be run again.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::{random::Random, reading::Outcome, write};

/// Length for each reader where the environment does not say: enough to find a mistake in everyday work.
const SECONDS_DEFAULT: u64 = 3;
/// Inputs are small and take well under a millisecond; a case that takes this long would never end on a real file.
const CASE_SECONDS_MAX: u64 = 10;
/// Where the sequence of cases starts.
const SEED_DEFAULT: u64 = 0xc045_0127;

/// Runs cases and prints what they came to. `case` damages and reads an input that it writes into the folder, which
/// it finds as the last case left it.
pub(crate) fn run(name: &str, mut case: impl FnMut(&mut Random, &Path) -> Outcome) {
    let folder = folder(name);
    let single = number("CONSORT_FUZZ_CASE");
    let seconds = number("CONSORT_FUZZ_SECONDS").unwrap_or(SECONDS_DEFAULT);
    let mut seeds = Random::new(number("CONSORT_FUZZ_SEED").unwrap_or(SEED_DEFAULT));

    let started = Instant::now();
    let watch = Watch { started, case_since_ms: AtomicU64::new(0), is_over: AtomicBool::new(false) };
    let (mut count, mut total) = (0_u64, Outcome::default());
    std::thread::scope(|scope| {
        let guard = scope.spawn(|| watch.guard(name));
        while single.is_none_or(|_| count == 0) && (count == 0 || started.elapsed().as_secs() < seconds) {
            let seed = single.unwrap_or_else(|| seeds.word());
            // Left behind where the process ends: by a stack overflow, memory refused, or the guard.
            write(&folder.join("seed"), format!("{seed:#x}\n").as_bytes());
            watch.case_since_ms.store(started.elapsed().as_millis() as u64, Relaxed);
            let result = catch_unwind(AssertUnwindSafe(|| case(&mut Random::new(seed), &folder)));
            match result {
                Ok(outcome) => total.add(&outcome),
                Err(panic) => {
                    watch.is_over.store(true, Relaxed);
                    guard.thread().unpark();
                    eprintln!("CONSORT_FUZZ_CASE={seed:#x} repeats it; the input is in {}", folder.display());
                    resume_unwind(panic);
                }
            }
            count += 1;
        }
        watch.is_over.store(true, Relaxed);
        guard.thread().unpark();
    });
    println!("{name}: {count} cases in {} s, {total}", started.elapsed().as_secs());
    // Damage that nothing survives would test only the first check of the reader.
    assert!(single.is_some() || count < 1000 || total.opened > count / 50, "hardly a case opens");
}

/// An empty folder for a test's inputs, kept afterwards.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A number of the environment, decimal or hexadecimal.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    Some(number.unwrap_or_else(|error| panic!("{variable}={text} is no number: {error}")))
}

/// Notices a case that does not end.
struct Watch {
    started: Instant,
    /// When the current case began, in milliseconds from the start.
    case_since_ms: AtomicU64,
    is_over: AtomicBool,
}

impl Watch {
    fn guard(&self, name: &str) {
        while !self.is_over.load(Relaxed) {
            std::thread::park_timeout(Duration::from_secs(1));
            let took_ms = self.started.elapsed().as_millis() as u64 - self.case_since_ms.load(Relaxed);
            if took_ms > CASE_SECONDS_MAX * 1000 && !self.is_over.load(Relaxed) {
                eprintln!(
                    "{name}: a case takes {took_ms} ms; its seed and input are in {}",
                    env!("CARGO_TARGET_TMPDIR")
                );
                std::process::abort();
            }
        }
    }
}
