//! Many seeds, a single one again, and the long run.
//!
//! | Variable | What it does |
//! |---|---|
//! | `CONSORT_SIMULATION_SEED` | runs this seed alone, or begins the long run with it |
//! | `CONSORT_SIMULATION_ONLY` | keeps only the events of these numbers, as a shrunk scenario names them |
//! | `CONSORT_SIMULATION_ALOUD` | prints every plan and result of that seed |
//! | `CONSORT_SIMULATION_SECONDS` | how long the long run lasts |

use std::{
    cell::Cell,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    scenario::Scenario,
    shrink::shrink,
    workload,
    world::{Report, run, run_aloud},
};

/// Steps of all seeds of a run in CI together.
const STEPS: u64 = 1_000_000;
const THREADS: usize = 2;

thread_local! {
    /// Whether a panic of this thread is expected, and says nothing.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs a scenario, and says what went wrong if anything did.
pub(super) fn outcome(scenario: &Scenario) -> Result<Report, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                loud(panic)
            }
        }));
    });
    QUIET.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| run(scenario)));
    QUIET.set(false);
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}

/// A seed under which something went wrong, and the least that it takes.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) seed: u64,
    pub(super) message: String,
    pub(super) shrunk: Scenario,
    /// What goes wrong in the small scenario: not always the same.
    shrunk_message: String,
}

impl Failure {
    pub(super) fn of(seed: u64, scenario: &Scenario, message: String) -> Self {
        let shrunk = shrink(scenario, |scenario| outcome(scenario).is_err());
        let shrunk_message = outcome(&shrunk).err().unwrap_or_default();
        Self { seed, message, shrunk, shrunk_message }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, message, shrunk, shrunk_message } = self;
        let numbers: Vec<String> = shrunk.numbers().iter().map(usize::to_string).collect();
        let test = "cargo test -p consort-actors --lib simulation::runs::a_million -- --nocapture";
        writeln!(f, "seed {seed}: {message}")?;
        writeln!(f, "replay: CONSORT_SIMULATION_SEED={seed} {test}")?;
        writeln!(
            f,
            "shrunk: CONSORT_SIMULATION_SEED={seed} CONSORT_SIMULATION_ONLY={} {test}",
            numbers.join(",")
        )?;
        writeln!(f, "which fails with: {shrunk_message}")?;
        write!(f, "{shrunk}")
    }
}

/// Runs seeds from `first` on, on several threads, as long as `more` of the steps so far.
fn explore(first: u64, more: impl Fn(u64) -> bool + Sync) -> Result<(Report, u64), Box<Failure>> {
    let (next, steps, stop) = (AtomicU64::new(first), AtomicU64::new(0), AtomicBool::new(false));
    let (total, failed) = (Mutex::new(Report::default()), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while more(steps.load(Ordering::Relaxed)) && !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let scenario = workload::scenario(seed);
                    match outcome(&scenario) {
                        Ok(report) => {
                            steps.fetch_add(report.steps, Ordering::Relaxed);
                            total.lock().expect("no panic while it is held").add(&report);
                        }
                        Err(message) => {
                            stop.store(true, Ordering::Relaxed);
                            let failure = Box::new(Failure::of(seed, &scenario, message));
                            *failed.lock().expect("no panic while it is held") = Some(failure);
                        }
                    }
                }
            });
        }
    });
    match failed.into_inner().expect("no panic while it is held") {
        Some(failure) => Err(failure),
        None => Ok((total.into_inner().expect("as above"), next.load(Ordering::Relaxed) - first)),
    }
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}: a number is due")))
}

fn say(report: &Report, seeds: u64, took: Duration) {
    let Report { steps, counters, seen, .. } = report;
    let seconds = took.as_secs_f64();
    println!("{seeds} seeds, {steps} steps in {seconds:.1} s, {:.0} steps/s", *steps as f64 / seconds);
    println!(
        "{} finished, {} failed, {} cancelled, {} refused; {} groups lost, {} shards relearned",
        seen.finished, seen.failed, seen.cancelled, seen.refused, report.lost_groups, report.relearned
    );
    println!(
        "{} tokens; {} preemptions, at most {} of one, {} kept, {} at once; {} of {} prompt tokens found",
        seen.tokens,
        counters.preemptions,
        seen.preemptions_max,
        seen.kept,
        seen.at_once,
        counters.prefix_cache_hits,
        counters.prefix_cache_queries
    );
    println!(
        "{} pages saved to the host, {} loaded for {} tokens",
        counters.host_saves, counters.host_loads, counters.host_hits
    );
    println!(
        "between two tokens at most {} steps and {:.1} ms; at most {} plans without a row for the first prefill, {} \
         steps first of the waiting",
        seen.steps_between_max,
        seen.token_gap_max_ns as f64 / 1e6,
        seen.starved_max,
        seen.steps_first_max
    );
}

/// Runs the seed that the environment names, if it names one.
fn replay() -> bool {
    let Some(seed) = variable::<u64>("CONSORT_SIMULATION_SEED") else { return false };
    let mut scenario = workload::scenario(seed);
    if let Ok(only) = std::env::var("CONSORT_SIMULATION_ONLY") {
        let numbers = only.split(',').map(|number| number.parse().expect("numbers with commas between"));
        scenario = scenario.only(&numbers.collect::<Vec<_>>());
        println!("{scenario}");
    }
    let began = Instant::now();
    let aloud = std::env::var_os("CONSORT_SIMULATION_ALOUD").is_some();
    let report = if aloud { run_aloud(&scenario) } else { run(&scenario) };
    say(&report, 1, began.elapsed());
    true
}

#[test]
fn a_million_steps_hold_every_invariant() {
    if replay() {
        return;
    }
    let began = Instant::now();
    let (report, seeds) = explore(0, |steps| steps < STEPS).unwrap_or_else(|failure| panic!("{failure}"));
    say(&report, seeds, began.elapsed());
    assert!(report.steps >= STEPS);
    let Report { counters, seen, lost_groups, relearned, .. } = report;
    // Whatever is to be tried was tried.
    assert!(counters.preemptions > 5_000 && seen.kept > 20 && counters.prefix_cache_hits > 100_000);
    assert!(seen.finished > 10_000 && seen.cancelled > 1_000 && seen.refused > 1_000 && seen.failed > 100);
    assert!(lost_groups > 100 && relearned > 100);
    assert!(counters.host_saves > 50_000 && counters.host_loads > 5_000 && counters.host_hits > 20_000);
}

/// Until time is over (for ever unless the environment says how long) or something fails.
#[test]
#[ignore = "runs until stopped; cargo xtask simulate"]
fn the_long_run_finds_nothing() {
    let first = variable("CONSORT_SIMULATION_SEED").unwrap_or(1 << 32);
    let seconds = variable::<u64>("CONSORT_SIMULATION_SECONDS").map(Duration::from_secs);
    let (began, mut from, mut total) = (Instant::now(), first, Report::default());
    println!("seeds from {first} on");
    while seconds.is_none_or(|seconds| began.elapsed() < seconds) {
        let part = Instant::now();
        let left = seconds.map_or(Duration::MAX, |seconds| seconds.saturating_sub(began.elapsed()));
        let part_max = left.min(Duration::from_secs(10));
        let (report, seeds) = explore(from, |_| part.elapsed() < part_max).unwrap_or_else(|failure| {
            println!("{failure}");
            panic!("seed {} fails", failure.seed)
        });
        total.add(&report);
        from += seeds;
        say(&total, from - first, began.elapsed());
    }
}
