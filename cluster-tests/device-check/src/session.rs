//! What a part works with: the device, the peer, and where its rows go.

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, btree_map::Entry},
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use consort_kernels::{
    KernelError,
    buffer::Plain,
    cuda::{
        Launcher,
        device::{ArenaPlan, CudaDevice, DeviceBuffer, Graph, Selector},
        settings::Settings,
    },
};
use half::bf16;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{figures::Row, folder::Folder, peer::Peer, report::Machine};

/// Longest wait for one piece of work.
pub(crate) const WORK_LIMIT: Duration = Duration::from_secs(20);

/// Replays of a graph of which the median counts.
const REPLAYS: usize = 15;
/// Fewer do where they take longer than this together.
const REPLAYS_MIN: usize = 5;
const REPLAYS_ENOUGH: Duration = Duration::from_millis(300);
/// Work before the first measured replay.
const AWAKE: Duration = Duration::from_millis(15);
/// How often ours and the peer's take turns.
const ROUNDS: usize = 3;
/// No work is faster, whatever a clock says.
const SECONDS_MIN: f64 = 1e-9;
/// Elements that random memory repeats after: more than any cache of a card holds.
const PATTERN: usize = 48 << 20;
const PATTERN_SMALL: usize = 1 << 16;
/// Elements that random memory starts on a multiple of: whole lines of a cache.
const ALIGNED: usize = 128;

/// Sizes of the cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Size {
    Full,
    Small,
}

/// A line of a part's report while it runs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Line {
    Machine(Machine),
    Row(Row),
}

/// A part at work.
pub(crate) struct Session {
    pub(crate) folder: Folder,
    pub(crate) size: Size,
    pub(crate) device: Arc<CudaDevice>,
    peer: Option<Peer>,
    report: File,
    copy: OnceCell<f64>,
    /// Of deviation one, made once: so many numbers take a second.
    noise: OnceCell<Vec<bf16>>,
    /// The noise on the device, by the bits of its scale.
    blocks: RefCell<BTreeMap<u32, DeviceBuffer<bf16>>>,
}

/// Work in a graph.
pub(crate) struct Recorded {
    graph: Graph,
    sets: usize,
}

/// Seconds of one case, ours and the peer's.
pub(crate) struct Times {
    pub(crate) ours: f64,
    pub(crate) peer: Option<f64>,
    /// Why there is no peer's.
    pub(crate) note: String,
}

impl Session {
    /// Opens the first device. A peer that is not there is a part's loss only.
    pub(crate) fn open(folder: Folder, size: Size, report: &Path, peer: Option<&Path>) -> Result<Session> {
        let report =
            OpenOptions::new().create(true).append(true).open(report).context("cannot write the report")?;
        let selector: Selector = "cuda:0".parse()?;
        let device = CudaDevice::open(&selector, &Settings::of_process())?;
        let peer = peer.and_then(|socket| {
            Peer::connect(socket).inspect_err(|error| eprintln!("no figures of PyTorch: {error:#}")).ok()
        });
        let (copy, noise, blocks) = (OnceCell::new(), OnceCell::new(), RefCell::default());
        Ok(Session { folder, size, device, peer, report, copy, noise, blocks })
    }

    /// `full`, or `small` where the check itself is checked.
    pub(crate) fn pick<T>(&self, full: T, small: T) -> T {
        match self.size {
            Size::Full => full,
            Size::Small => small,
        }
    }

    /// Adds a row, which outlives this process.
    pub(crate) fn row(&mut self, row: Row) -> Result<()> {
        self.line(&Line::Row(row))
    }

    pub(crate) fn line(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        self.report.write_all(text.as_bytes()).context("cannot write the report")
    }

    /// Records `sets` pieces of work one after another, the first of which is done once before: what is lazy about a
    /// library shall not fall into a recording. Working sets that follow each other should be larger than the
    /// card's cache, where the work reads memory.
    pub(crate) fn record(
        &self,
        sets: usize,
        mut work: impl FnMut(&dyn Launcher, usize) -> Result<(), KernelError>,
    ) -> Result<Recorded> {
        work(self.device.as_ref(), 0)?;
        self.device.synchronize("end what is to be recorded", WORK_LIMIT)?;
        let graph = self.device.capture(|launcher| (0..sets).try_for_each(|set| work(launcher, set)))?;
        Ok(Recorded { graph, sets })
    }

    /// Seconds that one piece of work takes: the median of several replays of all. Each comes after another that keeps
    /// the device at work until the host has enqueued it: what a launch takes of the host does not count.
    pub(crate) fn seconds(&self, recorded: &Recorded) -> Result<f64> {
        self.wake(recorded)?;
        let (mut times, started) = (Vec::with_capacity(REPLAYS), Instant::now());
        while times.len() < self.pick(REPLAYS, 2)
            && (times.len() < REPLAYS_MIN || started.elapsed() < REPLAYS_ENOUGH)
        {
            self.device.launch_graph(&recorded.graph)?;
            let took =
                self.device.measure(WORK_LIMIT, || Ok(self.device.launch_graph(&recorded.graph)?))?;
            times.push(took.as_secs_f64());
        }
        Ok(median(times).max(SECONDS_MIN) / recorded.sets as f64)
    }

    /// Has the card at work long enough to leave the clock of an idle one.
    fn wake(&self, recorded: &Recorded) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < self.pick(AWAKE, Duration::ZERO) {
            self.device.launch_graph(&recorded.graph)?;
            self.device.synchronize("wake up", WORK_LIMIT)?;
        }
        Ok(())
    }

    /// Ours and the peer's in turns, so that neither has the warmer card; medians of both.
    pub(crate) fn side_by_side(
        &mut self,
        request: &Value,
        mut ours: impl FnMut(&Session) -> Result<f64>,
    ) -> Result<Times> {
        let (mut mine, mut theirs, mut note) = (Vec::new(), Vec::new(), String::new());
        for _ in 0..self.pick(ROUNDS, 1) {
            mine.push(ours(self)?);
            match self.peer.as_mut().map(|peer| peer.seconds(request)) {
                Some(Ok(seconds)) => theirs.push(seconds),
                Some(Err(error)) => note = format!("{error:#}"),
                None => {}
            }
        }
        let peer = (!theirs.is_empty() && note.is_empty()).then(|| median(theirs));
        Ok(Times { ours: median(mine), peer, note })
    }

    /// Bytes per second, read and written, of a copy within the card's memory by its driver.
    pub(crate) fn copy_bandwidth(&self) -> Result<f64> {
        match self.copy.get() {
            Some(known) => Ok(*known),
            None => {
                let measured = self.measure_copy()?;
                Ok(*self.copy.get_or_init(|| measured))
            }
        }
    }

    /// The same, measured anew.
    pub(crate) fn measure_copy(&self) -> Result<f64> {
        let elements = self.pick(512 << 20, 1 << 16);
        let (from, mut to) = (self.buffer::<u32>(elements, "copied")?, self.buffer::<u32>(elements, "copy")?);
        let mut times = Vec::new();
        for _ in 0..=self.pick(REPLAYS, 2) {
            let took = self.device.measure(WORK_LIMIT, || self.device.copy(from.all(), to.all_mut()))?;
            times.push(took.as_secs_f64());
        }
        Ok(2.0 * 4.0 * elements as f64 / median(times).max(SECONDS_MIN))
    }

    /// Random numbers around zero, of standard deviation `scale`, in all of `buffer`: the same noise for every seed,
    /// from another place of it on.
    pub(crate) fn fill(&self, buffer: &mut DeviceBuffer<bf16>, scale: f32, seed: u64) -> Result<()> {
        let mut blocks = self.blocks.borrow_mut();
        let block = match blocks.entry(scale.to_bits()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.noise_block(scale)?),
        };
        let mut from = (Noise::new(seed).next_u64() % block.len() as u64) as usize & !(ALIGNED - 1);
        let mut to = 0;
        while to < buffer.len() {
            let len = (block.len() - from).min(buffer.len() - to);
            self.device.copy(block.slice(from..from + len), buffer.slice_mut(to..to + len))?;
            (from, to) = (0, to + len);
        }
        Ok(self.device.synchronize("fill memory", WORK_LIMIT)?)
    }

    fn noise_block(&self, scale: f32) -> Result<DeviceBuffer<bf16>> {
        let pattern = self.pick(PATTERN, PATTERN_SMALL);
        let noise =
            self.noise.get_or_init(|| Noise::new(1).take(pattern).map(bf16::from_f32).collect::<Vec<_>>());
        let mut block = self.buffer::<bf16>(pattern, "random numbers")?;
        if scale == 1.0 {
            self.device.upload(noise, block.all_mut())?;
        } else {
            let scaled: Vec<bf16> = noise.iter().map(|x| bf16::from_f32(x.to_f32() * scale)).collect();
            self.device.upload(&scaled, block.all_mut())?;
        }
        Ok(block)
    }

    /// One buffer of an arena of its own.
    pub(crate) fn buffer<T: Plain>(&self, len: usize, what: &str) -> Result<DeviceBuffer<T>> {
        let mut plan = ArenaPlan::new();
        let reserved = plan.reserve::<T>(len, what);
        Ok(plan.allocate(&self.device)?.buffer(reserved))
    }
}

/// Numbers around zero of standard deviation one, roughly normal; always the same for a seed.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

impl Iterator for Noise {
    type Item = f32;

    /// Four uniform numbers of 16 bits, added.
    fn next(&mut self) -> Option<f32> {
        let bits = self.next_u64();
        let sum: u32 = (0..4).map(|at| (bits >> (16 * at)) as u32 & 0xffff).sum();
        const UNIFORM: f32 = 65536.0;
        let deviation = (4.0f32 / 12.0).sqrt();
        Some((sum as f32 / UNIFORM - 2.0) / deviation)
    }
}

/// The middle one; NaN of none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_mean_zero_and_deviation_one_and_repeats() {
        let values: Vec<f32> = Noise::new(7).take(100_000).collect();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert_eq!(Noise::new(7).take(10).collect::<Vec<_>>(), values[..10]);
        assert_ne!(Noise::new(8).take(10).collect::<Vec<_>>(), values[..10]);
    }

    #[test]
    fn the_median_is_the_middle_and_nan_of_nothing() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }
}
