//! What the engine makes of a process's signs of life, and how long it waits for them.

use std::time::{Duration, Instant};

use super::error::Doing;

/// Most of the time between two looks that counts as time in which somebody waited: an engine that was stopped itself
/// has not waited.
const LOOKED_MAX: Duration = Duration::from_secs(1);

/// Time that was waited, by looks.
#[derive(Debug)]
pub(super) struct Waited {
    pub(super) time: Duration,
    looked: Instant,
}

impl Waited {
    pub(super) fn new(now: Instant) -> Self {
        Self { time: Duration::ZERO, looked: now }
    }

    pub(super) fn longer_than(&mut self, limit: Duration, now: Instant) -> bool {
        self.time += now.saturating_duration_since(self.looked).min(LOOKED_MAX);
        self.looked = now;
        self.time >= limit
    }
}

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Without a sign of life.
    pub(super) silence: Duration,
    /// To an answer once the group is aborted.
    pub(super) answer: Duration,
    /// Between two moves of a main thread that waits for no other rank.
    pub(super) standstill: Duration,
    /// The same while it loads.
    pub(super) loading_standstill: Duration,
}

/// Why a process is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Silent(Duration),
    Deaf(Duration),
    Stuck(Duration),
}

/// Signs of life of one process.
#[derive(Debug)]
pub(super) struct Signs {
    pub(super) limits: Limits,
    /// Since any sign.
    silence: Waited,
    /// Since an answer was due because the group is aborted.
    overdue: Waited,
    /// Since the main thread moved, or waited for another rank.
    standstill: Waited,
    /// What it told last.
    moves: u64,
}

impl Signs {
    pub(super) fn new(limits: Limits, now: Instant) -> Self {
        let anew = || Waited::new(now);
        Self { limits, silence: anew(), overdue: anew(), standstill: anew(), moves: 0 }
    }

    /// Something came.
    pub(super) fn heard(&mut self, now: Instant) {
        self.silence = Waited::new(now);
    }

    /// An answer is due from now on.
    pub(super) fn asked(&mut self, now: Instant) {
        self.overdue = Waited::new(now);
        self.standstill = Waited::new(now);
    }

    /// Its main thread has made so many moves, and may wait for other ranks.
    pub(super) fn pulse(&mut self, moves: u64, waits: bool, now: Instant) {
        if waits || moves != self.moves {
            self.standstill = Waited::new(now);
        }
        self.moves = moves;
    }

    /// What becomes of a process that was asked to do `doing`, whose group is aborted or not.
    pub(super) fn judge(&mut self, doing: Doing, is_aborted: bool, now: Instant) -> Option<Verdict> {
        let Limits { silence, answer, standstill, loading_standstill } = self.limits;
        if self.silence.longer_than(silence, now) {
            return Some(Verdict::Silent(silence));
        }
        let answers_aborts = !matches!(doing, Doing::Loading | Doing::Greeting | Doing::Nothing);
        if !(answers_aborts && (is_aborted || doing == Doing::Rejoining)) {
            self.overdue = Waited::new(now);
        } else if self.overdue.longer_than(answer, now) {
            return Some(Verdict::Deaf(answer));
        }
        let standstill = match doing {
            // Its main thread waits to be told something, or has not begun.
            Doing::Nothing | Doing::Greeting => {
                self.standstill = Waited::new(now);
                return None;
            }
            Doing::Loading => loading_standstill,
            Doing::Joining | Doing::Rejoining | Doing::Step(_) => standstill,
        };
        self.standstill.longer_than(standstill, now).then_some(Verdict::Stuck(standstill))
    }
}

#[cfg(test)]
mod tests {
    use consort_actors::Step;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const STEP: Doing = Doing::Step(Step(3));

    fn signs(begin: Instant) -> Signs {
        let limits = Limits {
            silence: 10 * SECOND,
            answer: 5 * SECOND,
            standstill: 30 * SECOND,
            loading_standstill: 60 * SECOND,
        };
        Signs::new(limits, begin)
    }

    /// The verdict and the second it comes in, of a process that beats so: moves and waits by second.
    fn verdict(doing: Doing, is_aborted: bool, beat: impl Fn(u64) -> (u64, bool)) -> Option<(u64, Verdict)> {
        let begin = Instant::now();
        let mut signs = signs(begin);
        (1..200).find_map(|second| {
            let now = begin + second as u32 * SECOND;
            let (moves, waits) = beat(second);
            signs.heard(now);
            signs.pulse(moves, waits, now);
            signs.judge(doing, is_aborted, now).map(|verdict| (second, verdict))
        })
    }

    #[test]
    fn a_main_thread_that_stands_still_is_stuck_unless_it_waits_for_others_or_for_work() {
        let stuck = |seconds| Verdict::Stuck(seconds * SECOND);
        let still = |_| (0, false);
        for doing in [STEP, Doing::Joining] {
            assert_eq!(verdict(doing, false, still), Some((30, stuck(30))));
        }
        assert_eq!(verdict(Doing::Loading, false, still), Some((60, stuck(60))));
        assert_eq!(verdict(Doing::Nothing, false, still), None);
        assert_eq!(verdict(STEP, false, |_| (0, true)), None);
        assert_eq!(verdict(STEP, false, |second| (second / 20, false)), None);
        // It moved last in second 40.
        assert_eq!(verdict(STEP, false, |second| (second.min(40), false)), Some((70, stuck(30))));
    }

    #[test]
    fn who_does_not_leave_an_aborted_group_is_deaf_even_if_it_waits() {
        let deaf = Some((5, Verdict::Deaf(5 * SECOND)));
        assert_eq!(verdict(STEP, true, |second| (second, true)), deaf);
        assert_eq!(verdict(Doing::Rejoining, false, |second| (second, true)), deaf);
        assert_eq!(verdict(Doing::Loading, true, |second| (second, false)), None);
    }

    #[test]
    fn silence_counts_only_while_the_engine_looks() {
        let begin = Instant::now();
        let mut signs = signs(begin);
        // The engine itself was stopped for a minute.
        assert_eq!(signs.judge(Doing::Nothing, false, begin + 60 * SECOND), None);
        for second in 61..69 {
            assert_eq!(signs.judge(Doing::Nothing, false, begin + second * SECOND), None, "{second}");
        }
        let verdict = signs.judge(Doing::Nothing, false, begin + 69 * SECOND);
        assert_eq!(verdict, Some(Verdict::Silent(10 * SECOND)));
    }
}
