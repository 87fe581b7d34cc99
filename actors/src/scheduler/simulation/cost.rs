//! How long a step takes: what it must compute and what it must read, against what a card can do in a second.
//!
//! ```text
//! time = launch + all-reduces + max(bytes / bandwidth, operations / peak, pages moved / link)
//! bytes = weights + keys and values read and written + pages copied
//! operations = rows x those of one row + attended pairs x those of one pair
//! ```
//! Whole nanoseconds, the same everywhere.

use crate::config::CacheSpec;

/// What one step does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Tokens whose keys and values are computed.
    pub(super) rows: u64,
    /// Tokens of one layer group whose keys and values are read, over all sequences and groups.
    pub(super) kv_tokens_read: u64,
    /// Pairs of a row and a token that it attends to, over all groups.
    pub(super) attended_pairs: u64,
    /// Pages copied.
    pub(super) copies: u64,
    /// Pages moved between device and host that the step waits for: of one that runs nothing.
    pub(super) moves: u64,
}

impl Load {
    /// Adds `rows` of one sequence that follow `start` tokens. A decode is one row.
    pub(super) fn add_rows(&mut self, rows: usize, start: usize, cache: &CacheSpec) {
        self.rows += rows as u64;
        for window in cache.groups.windows() {
            let end = start + rows;
            let read = window.map_or(end, |window| end.min(window + rows - 1));
            let middle = start + rows.div_ceil(2);
            let attended = window.map_or(middle, |window| middle.min(window));
            self.kv_tokens_read += read as u64;
            self.attended_pairs += (rows * attended) as u64;
        }
    }
}

/// One card, or several in step, and the model on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CostModel {
    /// From the plan to the first kernel, and whatever else each step takes.
    pub(super) launch_ns: u64,
    /// Latency of all of a step's all-reduces together.
    pub(super) all_reduce_ns: u64,
    pub(super) bytes_per_s: u64,
    pub(super) flops_per_s: u64,
    /// Read once in each step.
    pub(super) weight_bytes: u64,
    pub(super) flops_per_row: u64,
    /// Keys and values of one token in one group of layers.
    pub(super) kv_bytes: u64,
    pub(super) flops_per_pair: u64,
    /// Between device and host.
    pub(super) host_bytes_per_s: u64,
}

impl CostModel {
    /// Llama 3.1 8B in BF16 on one H200.
    pub(super) const ONE_CARD: CostModel = CostModel {
        launch_ns: 30_000,
        all_reduce_ns: 0,
        bytes_per_s: 4_300_000_000_000,
        flops_per_s: 600_000_000_000_000,
        weight_bytes: 16_000_000_000,
        flops_per_row: 16_000_000_000,
        kv_bytes: 131_072,
        flops_per_pair: 524_288,
        host_bytes_per_s: 50_000_000_000,
    };
    /// gpt-oss-120b in BF16 on three H100, 64 all-reduces in a step; two groups of 18 layers.
    pub(super) const THREE_CARDS: CostModel = CostModel {
        launch_ns: 60_000,
        all_reduce_ns: 72 * 12_000,
        bytes_per_s: 3 * 2_900_000_000_000,
        flops_per_s: 3 * 600_000_000_000_000,
        weight_bytes: 20_000_000_000,
        flops_per_row: 10_200_000_000,
        kv_bytes: 36_864,
        flops_per_pair: 294_912,
        host_bytes_per_s: 3 * 50_000_000_000,
    };

    /// Time of one step, never 0.
    pub(super) fn step_ns(&self, load: &Load, block_size: usize) -> u64 {
        let kv_tokens = load.kv_tokens_read + load.rows + 2 * load.copies * block_size as u64;
        let bytes = u128::from(self.weight_bytes) + u128::from(kv_tokens) * u128::from(self.kv_bytes);
        let flops = u128::from(load.rows) * u128::from(self.flops_per_row)
            + u128::from(load.attended_pairs) * u128::from(self.flops_per_pair);
        let ns = |work: u128, per_s: u64| work * 1_000_000_000 / u128::from(per_s);
        let busy = ns(bytes, self.bytes_per_s).max(ns(flops, self.flops_per_s));
        let moved = u128::from(load.moves * block_size as u64) * u128::from(self.kv_bytes);
        let moving = ns(moved, self.host_bytes_per_s);
        let is_idle = load.rows == 0 && load.copies == 0;
        let busy = if is_idle { moving } else { busy.max(moving) };
        let busy = u64::try_from(busy).unwrap_or(u64::MAX);
        self.launch_ns.saturating_add(self.all_reduce_ns).saturating_add(busy).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: CacheSpec = CacheSpec::new(16, 100);

    fn load(rows: usize, start: usize) -> Load {
        let mut load = Load::default();
        load.add_rows(rows, start, &CACHE);
        load
    }

    #[test]
    fn a_decode_takes_as_long_as_its_bytes_and_a_long_chunk_as_its_operations() {
        let card = CostModel::ONE_CARD;
        let decode = card.step_ns(&load(1, 1000), 16);
        // 16 GB and 1002 tokens of 128 KiB at 4.3 TB/s, and the launch.
        let bytes = 16_000_000_000 + 1002 * 131_072;
        assert_eq!(decode, 30_000 + bytes / 4300);
        let chunk = card.step_ns(&load(8192, 0), 16);
        // 8192 rows of 16 GFLOP, and 33.5 million pairs, at 600 TFLOP/s.
        let flops: u64 = 8192 * 16_000_000_000 + 8192 * 4096 * 524_288;
        assert_eq!(chunk, 30_000 + flops / 600_000);
    }

    #[test]
    fn a_window_bounds_what_a_row_reads() {
        let groups = crate::config::LayerGroups::new(&[Some(128), None]).expect("two groups");
        let cache = CacheSpec { groups, ..CACHE };
        let mut load = Load::default();
        load.add_rows(1, 999, &cache);
        assert_eq!((load.kv_tokens_read, load.attended_pairs), (128 + 1000, 128 + 1000));
    }
}
