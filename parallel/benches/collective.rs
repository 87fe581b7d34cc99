//! What an all-reduce of 16 KiB costs two ranks that are threads, and two that are processes.
//!
//! `cargo bench -p consort-parallel --bench collective`. Rounds of both take turns, so that a machine's mood falls on
//! both; every figure is a median over rounds, in microseconds a call. Arguments are ignored but `--test`, which runs a
//! short pass.

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        io::Write,
        os::fd::AsFd,
        process::{Command, Stdio},
        time::Instant,
    };

    use consort_parallel::{
        collective::{Collective, LocalGroup, SharedMemory, SharedMemoryGroup},
        ids::Rank,
    };

    /// 16 KiB: a hidden size of 4096.
    const LEN: usize = 4096;
    /// Calls before those that count, which wake the other rank and bring its core up to speed.
    const WARM_UP_CALLS: usize = 50;
    const CALLS: usize = 200;
    /// Tells this program that it is the other rank.
    const RANK: &str = "--rank-1";

    pub(super) fn main() {
        if std::env::args().any(|argument| argument == RANK) {
            let memory = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
            return follow(&mut SharedMemory::attach(memory, Rank(1)).expect("the group of the first rank"));
        }
        let rounds = if std::env::args().any(|argument| argument == "--test") { 3 } else { 101 };
        let mut local = LocalGroup::new(2);
        let mut follower = local.remove(1);
        let following = std::thread::spawn(move || follow(&mut follower));

        let seats = SharedMemoryGroup::create(2).expect("shared memory");
        let memory = || seats[0].descriptor().try_clone_to_owned().expect("a descriptor");
        let mut child = Command::new(std::env::current_exe().expect("a program"))
            .arg(RANK)
            .stdin(memory())
            .stdout(Stdio::null())
            .spawn()
            .expect("the other process");
        let mut shared = SharedMemory::attach(memory(), Rank(0)).expect("a fresh group");

        let (mut threads_us, mut processes_us) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            threads_us.push(round(&mut local[0]));
            processes_us.push(round(&mut shared));
        }
        drop((local, shared, seats));
        following.join().expect("it does not panic");
        child.wait().expect("it is ours");
        report("2 threads", threads_us);
        report("2 processes", processes_us);
    }

    /// Takes part until the group ends.
    fn follow(comm: &mut dyn Collective) {
        let mut data = vec![1.0; LEN];
        while comm.all_reduce_sum(&mut data).is_ok() {
            // Sums of sums would soon be infinite.
            data.fill(1.0);
        }
    }

    /// Microseconds a call.
    fn round(comm: &mut dyn Collective) -> f64 {
        let mut data = vec![1.0; LEN];
        let mut call = || {
            comm.all_reduce_sum(&mut data).expect("nobody aborts");
            assert!(data.iter().all(|x| *x == 2.0));
            data.fill(1.0);
        };
        (0..WARM_UP_CALLS).for_each(|_| call());
        let begin = Instant::now();
        (0..CALLS).for_each(|_| call());
        begin.elapsed().as_secs_f64() * 1e6 / CALLS as f64
    }

    fn report(name: &str, mut rounds_us: Vec<f64>) {
        rounds_us.sort_by(f64::total_cmp);
        let at = |share: f64| rounds_us[((rounds_us.len() - 1) as f64 * share) as usize];
        let (low, median, high) = (at(0.1), at(0.5), at(0.9));
        let count = rounds_us.len();
        let _ = writeln!(
            std::io::stdout(),
            "all_reduce_sum of 16 KiB, {name:<11}: median {median:6.2} us (10 % {low:.2}, 90 % {high:.2}; {count} rounds)"
        );
    }
}
