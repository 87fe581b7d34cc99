//! Device memory that the sampler's kernels keep between blocks and launches.

use crate::cuda::{DeviceSlice, DeviceSliceMut};

/// Blocks that a row is cut into at most: one thread each takes the best of their results.
pub(super) const CHUNKS_MAX: usize = 256;
/// Bins of a row.
const BINS: usize = 2048;
/// Words of a chunk's result.
const PARTIAL_WORDS: usize = 4;

/// Where each part lies, in words. All begin on 16 bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    thresholds: usize,
    masses: usize,
    partials: usize,
    counts: usize,
    arrived: usize,
    end: usize,
}

impl Layout {
    fn of(rows: usize) -> Layout {
        let thresholds = 0;
        let masses = thresholds + (2 * rows).next_multiple_of(4);
        let partials = masses + 2 * BINS * rows;
        let counts = partials + PARTIAL_WORDS * CHUNKS_MAX * rows;
        let arrived = counts + BINS * rows;
        let end = arrived + rows.next_multiple_of(4);
        Layout { thresholds, masses, partials, counts, arrived, end }
    }
}

/// The sampler's memory for at most so many rows. Zero before the first launch; the kernels leave zero what must be.
#[derive(Debug)]
pub struct Workspace<'a> {
    words: DeviceSliceMut<'a, u32>,
    layout: Layout,
    rows_max: usize,
}

impl<'a> Workspace<'a> {
    /// Words for at most `rows_max` rows: 32 KiB a row.
    pub fn words(rows_max: usize) -> usize {
        Layout::of(rows_max).end
    }

    /// Of memory with [`Workspace::words`]`(rows_max)` words, zero before its first use. Use it with the same
    /// `rows_max` always, and after a launch that failed only zeroed again.
    pub fn new(words: DeviceSliceMut<'a, u32>, rows_max: usize) -> Result<Self, crate::KernelError> {
        let layout = Layout::of(rows_max);
        crate::KernelError::check_len("sampling", "workspace", words.len(), layout.end)?;
        Ok(Workspace { words, layout, rows_max })
    }

    pub(super) fn rows_max(&self) -> usize {
        self.rows_max
    }

    pub(super) fn thresholds(&self) -> DeviceSlice<'_, u32> {
        self.words.shared().range(self.layout.thresholds..self.layout.masses)
    }

    pub(super) fn thresholds_mut(&mut self) -> DeviceSliceMut<'_, u32> {
        self.words.range(self.layout.thresholds..self.layout.masses)
    }

    pub(super) fn masses(&mut self) -> DeviceSliceMut<'_, u32> {
        self.words.range(self.layout.masses..self.layout.partials)
    }

    pub(super) fn partials(&mut self) -> DeviceSliceMut<'_, u32> {
        self.words.range(self.layout.partials..self.layout.counts)
    }

    pub(super) fn counts(&mut self) -> DeviceSliceMut<'_, u32> {
        self.words.range(self.layout.counts..self.layout.arrived)
    }

    pub(super) fn arrived(&mut self) -> DeviceSliceMut<'_, u32> {
        self.words.range(self.layout.arrived..self.layout.end)
    }
}
