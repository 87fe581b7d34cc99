//! Sampling on CUDA: the tokens that the CPU draws, from logits `[rows][width]` on the device.
//!
//! A step is [`survey`] (changes of logits, the best token; greedy rows are done), [`select`] where a row has top-k or
//! top-p, and [`draw`] where a row is not greedy: one to three launches, whatever the rows. [`summarize`] is a fourth
//! where log-probabilities are asked for; it gives the logits back what the survey changed.
//!
//! Where the vocabulary is cut over ranks, each rank launches the same on its slice, and they gather little:
//!
//! 1. [`survey`], then gather the standings (8 bytes a row);
//! 2. [`candidates`] where a row has top-k or top-p, and [`draw_slice`] where a row is drawn; then gather both;
//! 3. [`merge`], on every rank: the token, exactly that of the whole row, or a mark that a row's filters let more
//!    tokens through than the ranks' candidates hold. Such a row's logits (as the survey changed them) must be gathered
//!    and sampled whole, by the launches above.
//!
//! No row depends on another, and nothing on how rows are cut: all sums are integers and every choice is the greatest
//! in a total order.
#![allow(unsafe_code)]

mod batch;
mod summary;
mod workspace;

#[cfg(test)]
mod tests;

pub use batch::{Batch, BatchShape, ENTRY_WORDS, ROW_WORDS};
pub use summary::Summary;
pub use workspace::Workspace;

use workspace::CHUNKS_MAX;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher},
};

/// What stands for a token where a row has none: no logit is a number above minus infinity.
pub const NO_TOKEN: u32 = u32::MAX;

/// Most tokens of a row: sums of weights and ids have room for them, and one block for the chunks of a summary.
pub const WIDTH_MAX: usize = SUMMARY_CHUNK * CHUNKS_MAX;

/// Most tokens that a summary lists.
pub const TOP_MAX: usize = 20;

const OPERATION: &str = "sampling";
const SCAN_THREADS: u32 = 256;
const SELECT_THREADS_MAX: u32 = 512;
/// A chunk has work for a block's threads in 16-byte loads.
const CHUNK_MIN: usize = 1024;
const SUMMARY_CHUNK: usize = 4096;
const STANDING_WORDS: usize = 2;
const DRAW_WORDS: usize = 4;
/// Of a rank's candidates of a row: the best place left out, tokens, weights.
const CANDIDATE_HEAD_WORDS: usize = 8;
const PLACE_WORDS: usize = 2;
/// As `bench` of `selection.cuh` lays it out.
const BENCH_BYTES: u32 = 3 * 4 * (2048 + 256) + 16 * 1024 + 512 + 128 + 256;

/// A batch on the device: [`Batch::row_words`] and [`Batch::entry_words`], and the shape.
#[derive(Clone, Copy, Debug)]
pub struct Requests<'a> {
    /// How much is asked for.
    pub shape: BatchShape,
    /// The rows.
    pub rows: DeviceSlice<'a, u32>,
    /// The changes of logits.
    pub entries: DeviceSlice<'a, u32>,
    /// The part of the vocabulary that the logits are of.
    pub slice: Slice,
}

/// A rank's part of the vocabulary; the whole of it on a single rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its first token.
    pub first: u32,
    /// Its tokens: the width of a row of logits.
    pub width: usize,
}

/// What [`survey`] left, gathered: `[ranks][rows]` standings.
#[derive(Clone, Copy, Debug)]
pub struct Standings<'a> {
    /// Two words each.
    pub words: DeviceSlice<'a, u32>,
    /// Ranks that they are of.
    pub ranks: usize,
}

/// Words of the standings of `rows` rows.
pub fn standing_words(rows: usize) -> usize {
    STANDING_WORDS * rows
}

/// Words of the draws of `rows` rows.
pub fn draw_words(rows: usize) -> usize {
    DRAW_WORDS * rows
}

/// Words of one rank's candidates of `rows` rows, `capacity` a row.
pub fn candidate_words(rows: usize, capacity: usize) -> usize {
    rows * (CANDIDATE_HEAD_WORDS + PLACE_WORDS * capacity)
}

/// Words that [`summarize`] needs beside its results, for `requests` rows with up to `top_max` tokens.
pub fn summary_scratch_words(requests: usize, width: usize, top_max: usize) -> usize {
    requests * width.div_ceil(SUMMARY_CHUNK).max(1) * Summary::words(top_max)
}

/// Changes logits as each request asks and finds each row's best token. `before`, where it is given, gets what the
/// changed logits were, an element for each entry, for [`summarize`]. `tokens`, on a single rank, gets those of greedy
/// rows and of rows without any number; the others are left for [`draw`].
pub fn survey(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    mut logits: DeviceSliceMut<'_, f32>,
    before: Option<DeviceSliceMut<'_, f32>>,
    workspace: &mut Workspace<'_>,
    mut standings: DeviceSliceMut<'_, u32>,
    tokens: Option<DeviceSliceMut<'_, u32>>,
) -> Result<(), KernelError> {
    let rows = requests.shape.rows;
    check(requests, logits.len(), workspace)?;
    KernelError::check_len(OPERATION, "standings", standings.len(), standing_words(rows))?;
    if let Some(before) = &before {
        KernelError::check_len(OPERATION, "before", before.len(), requests.shape.entries)?;
    }
    if let Some(tokens) = &tokens {
        KernelError::check_len(OPERATION, "tokens", tokens.len(), rows)?;
    }
    let cut = Cut::new(launcher, rows, requests.slice.width);
    let args = Args::new()
        .slice_mut(&mut logits)
        .u32(requests.slice.width as u32)
        .u32(requests.slice.first)
        .u32(cut.chunk as u32)
        .slice(requests.rows)
        .slice(requests.entries)
        .u64(before.map_or(0, |before| before.address()))
        .slice_mut(&mut workspace.partials())
        .slice_mut(&mut workspace.arrived())
        .slice_mut(&mut standings)
        .u64(tokens.map_or(0, |tokens| tokens.address()));
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe { cut.launch(launcher, "sampling_survey", SCAN_THREADS, 256, args) }
}

/// Finds where the candidates of each row with top-k or top-p end; for [`draw`], from the workspace.
pub fn select(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
) -> Result<(), KernelError> {
    check(requests, logits.len(), workspace)?;
    check_standings(requests, standings)?;
    if !requests.shape.filters {
        return Ok(());
    }
    let cut = Cut::new(launcher, requests.shape.rows, requests.slice.width);
    let args = selection_args(requests, logits, standings, workspace, cut)
        .slice_mut(&mut workspace.thresholds_mut());
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe {
        cut.launch(launcher, "sampling_select", select_threads(requests.slice.width), BENCH_BYTES, args)
    }
}

/// Draws: every row of the batch gets its token. After [`select`], where that is needed.
pub fn draw(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
    tokens: DeviceSliceMut<'_, u32>,
) -> Result<(), KernelError> {
    KernelError::check_len(OPERATION, "tokens", tokens.len(), requests.shape.rows)?;
    launch_draw(launcher, requests, logits, standings, workspace, [tokens.address(), 0])
}

/// Draws in this rank's slice, for the rows that have neither top-k nor top-p; for [`merge`].
pub fn draw_slice(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
    draws: DeviceSliceMut<'_, u32>,
) -> Result<(), KernelError> {
    KernelError::check_len(OPERATION, "draws", draws.len(), draw_words(requests.shape.rows))?;
    launch_draw(launcher, requests, logits, standings, workspace, [0, draws.address()])
}

fn launch_draw(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
    [tokens, draws]: [u64; 2],
) -> Result<(), KernelError> {
    check(requests, logits.len(), workspace)?;
    check_standings(requests, standings)?;
    let cut = Cut::new(launcher, requests.shape.rows, requests.slice.width);
    let args = Args::new()
        .slice(logits)
        .u32(requests.slice.width as u32)
        .u32(requests.slice.first)
        .u32(cut.chunk as u32)
        .slice(requests.rows)
        .slice(standings.words)
        .u32(standings.ranks as u32)
        .slice(workspace.thresholds())
        .slice_mut(&mut workspace.arrived())
        .slice_mut(&mut workspace.partials())
        .u64(tokens)
        .u64(draws);
    // SAFETY: lengths are checked above and by the callers; the arguments are the kernel's parameters.
    unsafe { cut.launch(launcher, "sampling_draw", SCAN_THREADS, 512, args) }
}

/// Lists this rank's best `capacity` tokens of each row with top-k or top-p; for [`merge`].
pub fn candidates(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
    capacity: usize,
    mut candidates: DeviceSliceMut<'_, u32>,
) -> Result<(), KernelError> {
    check(requests, logits.len(), workspace)?;
    check_standings(requests, standings)?;
    check_capacity(capacity)?;
    let words = candidate_words(requests.shape.rows, capacity);
    KernelError::check_len(OPERATION, "candidates", candidates.len(), words)?;
    if !requests.shape.filters {
        return Ok(());
    }
    let cut = Cut::new(launcher, requests.shape.rows, requests.slice.width);
    let args = selection_args(requests, logits, standings, workspace, cut)
        .u32(capacity as u32)
        .slice_mut(&mut candidates);
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe {
        cut.launch(launcher, "sampling_candidates", select_threads(requests.slice.width), BENCH_BYTES, args)
    }
}

/// What the ranks found in their slices, gathered, rank by rank.
#[derive(Clone, Copy, Debug)]
pub struct Gathered<'a> {
    /// Of [`survey`].
    pub standings: Standings<'a>,
    /// Of [`draw_slice`]; read where a row is drawn without top-k and top-p.
    pub draws: DeviceSlice<'a, u32>,
    /// Of [`candidates`]; read where a row has top-k or top-p.
    pub candidates: DeviceSlice<'a, u32>,
    /// Candidates of a rank and row.
    pub capacity: usize,
}

/// Tokens from what the ranks found. `incomplete` becomes 1 for rows whose candidates do not suffice (their token is
/// [`NO_TOKEN`]), else 0.
pub fn merge(
    launcher: &dyn Launcher,
    requests: Requests<'_>,
    gathered: Gathered<'_>,
    mut tokens: DeviceSliceMut<'_, u32>,
    mut incomplete: DeviceSliceMut<'_, u32>,
) -> Result<(), KernelError> {
    let Gathered { standings, draws, candidates, capacity } = gathered;
    let rows = requests.shape.rows;
    check_requests(requests)?;
    check_standings(requests, standings)?;
    check_capacity(capacity)?;
    if requests.shape.draws {
        KernelError::check_len(OPERATION, "draws", draws.len(), standings.ranks * draw_words(rows))?;
    }
    if requests.shape.filters {
        let words = standings.ranks * candidate_words(rows, capacity);
        KernelError::check_len(OPERATION, "candidates", candidates.len(), words)?;
    }
    KernelError::check_len(OPERATION, "tokens", tokens.len(), rows)?;
    KernelError::check_len(OPERATION, "incomplete", incomplete.len(), rows)?;
    if rows == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: "sampling_merge",
        grid: [rows as u32, 1, 1],
        threads: select_threads(standings.ranks.saturating_mul(capacity)),
        shared_bytes: BENCH_BYTES,
        args: Args::new()
            .slice(requests.rows)
            .slice(standings.words)
            .u32(standings.ranks as u32)
            .slice(draws)
            .slice(candidates)
            .u32(capacity as u32)
            .slice_mut(&mut tokens)
            .slice_mut(&mut incomplete),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe { launcher.launch(&launch) }
}

/// Which rows [`summarize`] looks at, and what was done to them.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Pairs of a row of the logits and the number of best tokens to list. No row twice.
    pub rows: DeviceSlice<'a, u32>,
    /// The token of each row of the logits; [`NO_TOKEN`] for none.
    pub tokens: DeviceSlice<'a, u32>,
    /// The batch and what its [`survey`] left in `before`; `None` where the logits are as the model gave them.
    pub changed: Option<(Requests<'a>, DeviceSlice<'a, f32>)>,
    /// Best tokens listed at most.
    pub top_max: usize,
}

/// Summarises rows for their log-probabilities, of the logits as the model gave them: changes are undone first.
/// `summaries` gets [`Summary::words`] words a wanted row. The rows that `wanted` names must be below the logits' rows.
pub fn summarize(
    launcher: &dyn Launcher,
    wanted: Wanted<'_>,
    slice: Slice,
    mut logits: DeviceSliceMut<'_, f32>,
    mut scratch: DeviceSliceMut<'_, u32>,
    workspace: &mut Workspace<'_>,
    mut summaries: DeviceSliceMut<'_, u32>,
) -> Result<(), KernelError> {
    let (requests, top_max) = (wanted.rows.len() / 2, wanted.top_max);
    KernelError::check_len(OPERATION, "wanted rows", wanted.rows.len(), 2 * requests)?;
    KernelError::check_len(OPERATION, "logits", logits.len(), wanted.tokens.len() * slice.width)?;
    check_width(slice)?;
    KernelError::check_index(OPERATION, "number of wanted rows", requests, workspace.rows_max() + 1)?;
    KernelError::check_index(OPERATION, "number of best tokens", top_max, TOP_MAX + 1)?;
    let words = requests * Summary::words(top_max);
    KernelError::check_len(OPERATION, "summaries", summaries.len(), words)?;
    let words = summary_scratch_words(requests, slice.width, top_max);
    KernelError::check_len(OPERATION, "scratch", scratch.len(), words)?;
    let mut changes = [0; 3];
    if let Some((batch, before)) = wanted.changed {
        check_requests(batch)?;
        KernelError::check_len(OPERATION, "tokens", wanted.tokens.len(), batch.shape.rows)?;
        KernelError::check_len(OPERATION, "before", before.len(), batch.shape.entries)?;
        if !before.is_empty() {
            changes = [batch.rows.address(), batch.entries.address(), before.address()];
        }
    }
    if requests == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: "sampling_summarize",
        grid: [slice.width.div_ceil(SUMMARY_CHUNK).max(1) as u32, requests as u32, 1],
        threads: SCAN_THREADS,
        shared_bytes: 4 * SUMMARY_CHUNK as u32 + 256,
        args: Args::new()
            .slice_mut(&mut logits)
            .u32(slice.width as u32)
            .u32(slice.first)
            .slice(wanted.rows)
            .u64(changes[0])
            .u64(changes[1])
            .u64(changes[2])
            .u32(top_max as u32)
            .slice(wanted.tokens)
            .slice_mut(&mut scratch)
            .slice_mut(&mut workspace.arrived())
            .slice_mut(&mut summaries),
    };
    // SAFETY: lengths are checked above; that the rows exist is the caller's part; the arguments are the kernel's
    // parameters.
    unsafe { launcher.launch(&launch) }
}

/// How rows are cut into chunks, each for a block: two blocks a multiprocessor, if the chunks do not get too small.
#[derive(Clone, Copy, Debug)]
struct Cut {
    rows: usize,
    chunks: usize,
    chunk: usize,
}

impl Cut {
    fn new(launcher: &dyn Launcher, rows: usize, width: usize) -> Cut {
        let blocks = (2 * launcher.multiprocessors() as usize / rows.max(1)).clamp(1, CHUNKS_MAX);
        let chunk = width.div_ceil(blocks).next_multiple_of(4).max(CHUNK_MIN);
        Cut { rows, chunk, chunks: width.div_ceil(chunk).max(1) }
    }

    /// # Safety
    /// As for [`Launcher::launch`].
    unsafe fn launch(
        self,
        launcher: &dyn Launcher,
        kernel: &str,
        threads: u32,
        shared_bytes: u32,
        args: Args,
    ) -> Result<(), KernelError> {
        if self.rows == 0 {
            return Ok(());
        }
        let grid = [self.chunks as u32, self.rows as u32, 1];
        // SAFETY: the caller's promise.
        unsafe { launcher.launch(&Launch { kernel, grid, threads, shared_bytes, args }) }
    }
}

/// Threads of a block that selects among `tokens` and may read all of them alone: short rows need few.
fn select_threads(tokens: usize) -> u32 {
    const TOKENS_PER_THREAD: usize = 8;
    const THREADS_MIN: usize = 128;
    let threads = tokens.div_ceil(TOKENS_PER_THREAD).next_multiple_of(THREADS_MIN);
    threads.clamp(THREADS_MIN, SELECT_THREADS_MAX as usize) as u32
}

fn selection_args(
    requests: Requests<'_>,
    logits: DeviceSlice<'_, f32>,
    standings: Standings<'_>,
    workspace: &mut Workspace<'_>,
    cut: Cut,
) -> Args {
    Args::new()
        .slice(logits)
        .u32(requests.slice.width as u32)
        .u32(requests.slice.first)
        .u32(cut.chunk as u32)
        .slice(requests.rows)
        .slice(standings.words)
        .u32(standings.ranks as u32)
        .slice_mut(&mut workspace.arrived())
        .slice_mut(&mut workspace.counts())
        .slice_mut(&mut workspace.masses())
}

fn check(requests: Requests<'_>, logits: usize, workspace: &Workspace<'_>) -> Result<(), KernelError> {
    check_requests(requests)?;
    KernelError::check_index(OPERATION, "number of rows", requests.shape.rows, workspace.rows_max() + 1)?;
    KernelError::check_len(OPERATION, "logits", logits, requests.shape.rows * requests.slice.width)?;
    check_width(requests.slice)
}

fn check_width(slice: Slice) -> Result<(), KernelError> {
    KernelError::check_index(OPERATION, "last token", slice.first as usize + slice.width, WIDTH_MAX + 1)
}

fn check_requests(requests: Requests<'_>) -> Result<(), KernelError> {
    /// The largest extent of a grid along y.
    const ROWS_MAX: usize = 65_535;
    let BatchShape { rows, entries, .. } = requests.shape;
    KernelError::check_index(OPERATION, "number of rows", rows, ROWS_MAX + 1)?;
    KernelError::check_len(OPERATION, "rows", requests.rows.len(), ROW_WORDS * rows)?;
    KernelError::check_len(OPERATION, "entries", requests.entries.len(), ENTRY_WORDS * entries)
}

fn check_standings(requests: Requests<'_>, standings: Standings<'_>) -> Result<(), KernelError> {
    let words = standings.ranks * standing_words(requests.shape.rows);
    KernelError::check_len(OPERATION, "standings", standings.words.len(), words)?;
    KernelError::check_index(OPERATION, "rank", 0, standings.ranks)
}

fn check_capacity(capacity: usize) -> Result<(), KernelError> {
    if capacity > 0 && capacity <= WIDTH_MAX {
        return Ok(());
    }
    let reason =
        format!("{capacity} candidates a rank; 1 to {WIDTH_MAX} can be listed, 256 to 1024 are useful");
    Err(KernelError::Unsupported { operation: OPERATION, reason })
}
