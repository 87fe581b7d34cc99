//! A seeded simulation of scheduler and shards in virtual time, with invariants checked after every event.
//!
//! | Module | What it is |
//! |---|---|
//! | [`model`] | the pretended model: what a history draws, what it leaves in a page |
//! | [`shard`] | pages with contents, tables, sequences: finds every wrong page, position and order |
//! | [`host`] | the host's pages, and transfers as late as is legal |
//! | [`cost`] | how long a step takes on a card, from a roofline |
//! | [`executor`] | a group of shards with a clock: steps come in, results come out at their time, groups are lost |
//! | [`oracle`] | what must be true of streams and plans, from outside |
//! | [`rig`] | scheduler, executor and oracle under one hand: every operation is checked |
//! | [`scenario`] | what happens from outside, at which time, and what it happens to |
//! | [`workload`] | scenarios from a seed; [`trace`] | scenarios from recorded arrivals |
//! | [`world`] | runs a scenario in virtual time |
//! | [`shrink`] | the small scenario behind a failure |
//! | [`runs`] | many seeds at once, replay, the long run; [`planted`] | every mistake of a list is found |
//! | [`facts`], [`by_hand`], [`moved_pages`] | single claims on whole runs |
//!
//! A run that fails names its seed and the command that replays it.

mod by_hand;
mod cost;
mod executor;
mod facts;
mod host;
mod model;
mod moved_pages;
mod oracle;
mod planted;
mod rig;
mod runs;
mod scenario;
mod shard;
mod shrink;
mod trace;
mod workload;
mod world;

pub(super) use rig::Simulation;
pub(super) use shard::SimShard;

/// Tokens that the pretended model knows.
pub(super) const VOCAB: usize = 97;
/// The token that ends a generation, where one does.
const STOP: u32 = 7;

/// splitmix64: small, seeded, the same everywhere.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// One of `low..=high`.
    fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn one_of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    /// Exponentially distributed with this mean: the time to the next of independent arrivals.
    fn exponential(&mut self, mean: u64) -> u64 {
        let uniform = ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        (-uniform.ln() * mean as f64) as u64
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Prints the seed when a test fails under it.
struct SeedNote(u64);

impl Drop for SeedNote {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation failed with seed {}", self.0);
        }
    }
}
