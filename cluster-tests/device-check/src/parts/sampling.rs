//! Tokens from logits on the device, by the launches of a step: survey, select where a filter asks for it, draw.
//!
//! The rows of one buffer serve one request after another and a batch at a time, in one graph: 128 MB, between two and
//! three times a cache, since PyTorch's sorts would take too long over more. A row has few likely tokens and a long
//! tail, as a model's has. Tokens must be those of the CPU from the same logits.

use std::thread;

use anyhow::Result;
use consort_kernels::{
    KernelError,
    cuda::{Launcher, device::DeviceBuffer},
    sampling::{
        SamplingParams, TokenHistory,
        cuda::{
            Batch, ENTRY_WORDS, ROW_WORDS, Requests, Slice, Standings, Workspace, draw, select,
            standing_words, survey,
        },
        sample,
    },
};
use serde_json::json;

use crate::{
    figures::{Figure, Goal, Row},
    session::{Noise, Session, WORK_LIMIT},
};

/// Tokens of gpt-oss.
const VOCABULARY: usize = 201_088;
/// Rows of logits in all.
const ROWS: usize = 160;
const BATCHES: [usize; 2] = [1, 32];
/// Rows whose tokens are drawn on the host, too.
const CHECKED_ROWS: usize = 32;

/// One in so many tokens is likely, by so much; logits have this deviation.
const LIKELY_ONE_IN: u64 = 4096;
const LIKELY_BY: f32 = 10.0;
const DEVIATION: f32 = 2.0;

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let mut logits = Logits::new(session)?;
    for batch in session.pick(BATCHES, [1, 4]) {
        let mut wrong = Wrong::default();
        for mode in modes() {
            let case = format!("{} batch={batch}", mode.name.replace('_', "-"));
            time(session, &mut logits, &mode, batch, &case, &mut wrong)?;
        }
        session.row(wrong.row(batch))?;
    }
    Ok(())
}

/// A way to choose a token, and its name in the peer.
struct Mode {
    name: &'static str,
    params: SamplingParams,
}

fn modes() -> [Mode; 5] {
    let drawn = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let mode = |name, params| Mode { name, params };
    [
        mode("greedy", SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        mode("temperature", drawn.clone()),
        mode("top_k", SamplingParams { top_k: Some(50), ..drawn.clone() }),
        mode("top_p", SamplingParams { top_p: 0.9, ..drawn.clone() }),
        mode("min_p", SamplingParams { min_p: 0.05, ..drawn }),
    ]
}

/// Rows of logits, on the host and on the device.
struct Logits {
    width: usize,
    rows: usize,
    host: Vec<f32>,
    device: DeviceBuffer<f32>,
}

impl Logits {
    fn new(session: &Session) -> Result<Logits> {
        let (width, rows) = session.pick((VOCABULARY, ROWS), (3000, 8));
        let mut noise = Noise::new(8);
        let mut logit = || {
            let likely = noise.next_u64().is_multiple_of(LIKELY_ONE_IN);
            let usual = noise.next().unwrap_or_default() * DEVIATION;
            if likely { usual + LIKELY_BY } else { usual }
        };
        let host: Vec<f32> = (0..rows * width).map(|_| logit()).collect();
        let mut device = session.buffer::<f32>(host.len(), "logits")?;
        session.device.upload(&host, device.all_mut())?;
        Ok(Logits { width, rows, host, device })
    }
}

fn time(
    session: &mut Session,
    logits: &mut Logits,
    mode: &Mode,
    batch: usize,
    case: &str,
    wrong: &mut Wrong,
) -> Result<()> {
    let (width, sets) = (logits.width, logits.rows / batch);
    let mut draws = Draws::new(session, logits, mode, batch)?;
    let recorded = session.record(sets, |launcher, set| draws.enqueue(launcher, set))?;
    let params = &mode.params;
    let request = json!({"case": "sample", "mode": mode.name, "rows": batch, "vocabulary": width,
        "sets": sets, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p,
        "min_p": params.min_p});
    let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
    drop(recorded);
    let figure = Figure::cost(times.ours * 1e6, "us");
    session.row(Row::new(case, figure).beside(times.peer.map(|peer| peer * 1e6)).note(times.note))?;
    let rows = (sets * batch).min(CHECKED_ROWS) / batch * batch;
    let mut tokens = vec![0; rows];
    session.device.download(draws.tokens.slice(0..rows), &mut tokens, WORK_LIMIT)?;
    wrong.compare(mode, &tokens, &of_host(draws.logits, mode, batch, rows));
    Ok(())
}

/// What one batch after another asks for, and where its tokens go.
struct Draws<'a> {
    logits: &'a mut Logits,
    batch: Batch,
    rows: DeviceBuffer<u32>,
    entries: DeviceBuffer<u32>,
    scratch: DeviceBuffer<u32>,
    standings: DeviceBuffer<u32>,
    tokens: DeviceBuffer<u32>,
}

impl<'a> Draws<'a> {
    fn new(session: &Session, logits: &'a mut Logits, mode: &Mode, rows: usize) -> Result<Draws<'a>> {
        let mut batch = Batch::new();
        for row in 0..rows {
            batch.push(&params_of(mode, row), &TokenHistory::default(), position_of(row));
        }
        let mut on_device = session.buffer::<u32>(ROW_WORDS * rows, "requests")?;
        session.device.upload(batch.row_words(), on_device.all_mut())?;
        let tokens = session.buffer::<u32>(logits.rows, "tokens")?;
        Ok(Draws {
            logits,
            entries: session.buffer::<u32>(ENTRY_WORDS * batch.shape().entries, "changes of logits")?,
            batch,
            rows: on_device,
            scratch: session.buffer::<u32>(Workspace::words(rows), "scratch")?,
            standings: session.buffer::<u32>(standing_words(rows), "standings")?,
            tokens,
        })
    }

    /// The launches of a step for the batch's rows from `set` times their number on.
    fn enqueue(&mut self, launcher: &dyn Launcher, set: usize) -> Result<(), KernelError> {
        let (shape, width) = (self.batch.shape(), self.logits.width);
        let mine = set * shape.rows..(set + 1) * shape.rows;
        let elements = mine.start * width..mine.end * width;
        let slice = Slice { first: 0, width };
        let requests = Requests { shape, rows: self.rows.all(), entries: self.entries.all(), slice };
        let mut workspace = Workspace::new(self.scratch.all_mut(), shape.rows)?;
        // Where no request changes logits, they are as they were.
        let (logits, tokens) =
            (self.logits.device.slice_mut(elements.clone()), self.tokens.slice_mut(mine.clone()));
        survey(launcher, requests, logits, None, &mut workspace, self.standings.all_mut(), Some(tokens))?;
        let logits = self.logits.device.slice(elements);
        let standings = Standings { words: self.standings.all(), ranks: 1 };
        if shape.filters {
            select(launcher, requests, logits, standings, &mut workspace)?;
        }
        if shape.draws {
            draw(launcher, requests, logits, standings, &mut workspace, self.tokens.slice_mut(mine))?;
        }
        Ok(())
    }
}

/// Every row of a batch has a seed and a position of its own.
fn params_of(mode: &Mode, row: usize) -> SamplingParams {
    SamplingParams { seed: 1000 + row as u64, ..mode.params.clone() }
}

fn position_of(row: usize) -> u64 {
    7 * row as u64
}

/// Tokens of the first `rows` rows, drawn on the host by as many threads as it has.
fn of_host(logits: &Logits, mode: &Mode, batch: usize, rows: usize) -> Vec<Option<u32>> {
    let mut tokens = vec![None; rows];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let part = rows.div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (at, tokens) in tokens.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                for (row, token) in (at * part..).zip(tokens) {
                    let mut row_logits = logits.host[row * logits.width..][..logits.width].to_vec();
                    let in_batch = row % batch;
                    *token = sample(&mut row_logits, &params_of(mode, in_batch), position_of(in_batch));
                }
            });
        }
    });
    tokens
}

/// Tokens that are not the host's.
#[derive(Default)]
struct Wrong {
    compared: usize,
    different: usize,
    first: String,
}

impl Wrong {
    fn compare(&mut self, mode: &Mode, got: &[u32], expected: &[Option<u32>]) {
        self.compared += got.len();
        for (row, (got, expected)) in got.iter().zip(expected).enumerate() {
            if Some(*got) != *expected {
                if self.different == 0 {
                    self.first = format!("{}, row {row}: {got}, the CPU's is {expected:?}", mode.name);
                }
                self.different += 1;
            }
        }
    }

    fn row(self, batch: usize) -> Row {
        // Where nothing was compared, nothing is right.
        let different = if self.compared == 0 { 1 } else { self.different };
        let row = Row::new(format!("tokens batch={batch}"), Figure::cost(different as f64, "differ"));
        let note = format!("of {} {}", self.compared, self.first);
        row.goal(Goal::required(0.0, "the CPU's tokens")).note(note.trim_end())
    }
}
