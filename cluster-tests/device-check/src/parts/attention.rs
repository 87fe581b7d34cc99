//! Attention over pages, through the kernels' own launches: decodes by bytes of keys and values that must be read,
//! prefills by operations.
//!
//! A decode is planned as a step's graph has it (in a frame whose numbers are powers of two) and, beside that, as well
//! as it can be. PyTorch reads keys and values that lie side by side, in whichever way of several is its fastest.

mod sequences;

use anyhow::Result;
use consort_kernels::{
    KernelError,
    attention::{
        PagedSpan,
        cuda::{Chunks, Frame, Inputs, Plan, decode, prefill},
    },
    cuda::{Launcher, device::DeviceBuffer, row_stride},
};
use half::bf16;
use serde_json::json;

use self::sequences::{Heads, Sequences, error, truth};
use super::{
    ceilings,
    truth::{Worst, largest, spread},
};
use crate::{
    figures::{Figure, Goal, Row},
    session::{Session, WORK_LIMIT},
};

/// Bytes of all keys and values in a graph: several times a cache of 60 MB.
const ROTATED_BYTES: usize = 384 << 20;
/// What is looked at on the host: rows, and KV heads of each with all their query heads.
const CHECKED_ROWS: usize = 3;
const CHECKED_HEADS: usize = 2;

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let (queries, kv) = session.pick((64, 8), (16, 2));
    let (context, batches) = session.pick((8192, [1, 32]), (200, [1, 3]));
    for batch in batches {
        for dim in [64, 128] {
            decodes(
                session,
                Heads { queries, kv, dim },
                context,
                batch,
                Other { case: "decode", suffix: "" },
            )?;
        }
    }
    let share = session.pick(Heads { queries: 24, kv: 3, dim: 64 }, Heads { queries: 15, kv: 3, dim: 64 });
    let other = Other { case: "decode", suffix: ", a third of gpt-oss" };
    decodes(session, share, context, batches[1], other)?;
    let product = product_rate(session)?;
    for dim in [64, 128] {
        for tokens in session.pick([2048, 8192], [40, 100]) {
            prefills(session, Heads { queries, kv, dim }, tokens, product)?;
        }
    }
    Ok(())
}

/// Decodes beside the same in Triton, over keys and values that lie side by side.
pub(super) fn beside_triton(session: &mut Session) -> Result<()> {
    let (queries, kv) = session.pick((64, 8), (16, 2));
    let (context, batches) = session.pick((8192, [1, 32]), (200, [1, 3]));
    for batch in batches {
        let heads = Heads { queries, kv, dim: 128 };
        decodes(session, heads, context, batch, Other { case: "triton_decode", suffix: ", beside Triton" })?;
    }
    Ok(())
}

/// What a decode is held against, and what its name ends with.
struct Other {
    case: &'static str,
    suffix: &'static str,
}

/// How a decode is planned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As a graph replays it.
    Framed,
    /// As many chunks as fit.
    Free,
}

fn decodes(session: &mut Session, heads: Heads, context: usize, batch: usize, other: Other) -> Result<()> {
    let bytes = batch * context * heads.token_bytes();
    let sets = session.pick(ROTATED_BYTES.div_ceil(bytes), 2);
    let sequences = Sequences::new(session, heads, context, sets * batch)?;
    let case = format!("decode batch={batch} d={} at {context}{}", heads.dim, other.suffix);
    let mut worst = Worst::default();
    let request = json!({"case": other.case, "batch": batch, "context": context, "queries": heads.queries,
        "kv": heads.kv, "dim": heads.dim, "sets": sets});
    let copied = session.copy_bandwidth()?;
    let mut peer = None;
    for way in [Way::Framed, Way::Free] {
        let plans = (0..sets).map(|set| decode_plan(session, &sequences, set, batch, way));
        let mut steps = Steps::new(session, &sequences, plans.collect::<Result<_, _>>()?, batch)?;
        let recorded = session.record(sets, |launcher, set| steps.decode(launcher, set))?;
        let seconds = if way == Way::Framed {
            let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
            peer = times.peer.map(|peer| bytes as f64 / peer / 1e12);
            if !times.note.is_empty() {
                session.row(Row::without(format!("{case}, the peer"), times.note))?;
            }
            times.ours
        } else {
            session.seconds(&recorded)?
        };
        let rate = bytes as f64 / seconds;
        let note = format!("{:.0} % of copy", 100.0 * rate / copied);
        let named = if way == Way::Framed { case.clone() } else { format!("{case}, free chunks") };
        let row = Row::new(named, Figure::rate(rate / 1e12, "TB/s")).beside(peer).note(note);
        session.row(match way {
            Way::Framed => row.goal(Goal::hoped(0.75 * copied / 1e12, "75 % of copy")),
            Way::Free => row,
        })?;
        let places: Vec<(usize, usize)> =
            spread(batch, CHECKED_ROWS).into_iter().map(|row| ((sets - 1) * batch + row, context)).collect();
        steps.check(session, heads, &places, &spread(batch, CHECKED_ROWS), &mut worst)?;
    }
    session.row(worst.row(format!("results of {case}")))
}

fn decode_plan(
    session: &Session,
    sequences: &Sequences,
    set: usize,
    batch: usize,
    way: Way,
) -> Result<Plan, KernelError> {
    let (shape, len, context) = (&sequences.shape, sequences.table_len, sequences.context);
    let span =
        |at: usize| PagedSpan { rows: at..at + 1, context_len: context, table: at * len..(at + 1) * len };
    let spans: Vec<PagedSpan> = (0..batch).map(span).collect();
    let tables = sequences.tables(set * batch, batch);
    let chunks = Chunks::Fill { multiprocessors: session.device.multiprocessors() };
    if way == Way::Free {
        return Plan::new(shape, chunks, &spans, batch, tables, sequences.page_count);
    }
    let contexts = std::iter::repeat_n(context, batch);
    let frame = Frame::around(shape, chunks, contexts, batch, batch * context, tables.len())?;
    Plan::framed(shape, frame, &spans, tables, sequences.page_count)
}

fn prefills(session: &mut Session, heads: Heads, tokens: usize, product: f64) -> Result<()> {
    let sequences = Sequences::new(session, heads, tokens, 1)?;
    let span = PagedSpan { rows: 0..tokens, context_len: tokens, table: 0..sequences.table_len };
    let chunks = Chunks::Fill { multiprocessors: session.device.multiprocessors() };
    let plan =
        Plan::new(&sequences.shape, chunks, &[span], tokens, sequences.tables(0, 1), sequences.page_count)?;
    let mut steps = Steps::new(session, &sequences, vec![plan], tokens)?;
    let recorded = session.record(1, |launcher, set| steps.prefill(launcher, set))?;
    let request = json!({"case": "prefill", "tokens": tokens, "queries": heads.queries, "kv": heads.kv,
        "dim": heads.dim});
    let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
    drop(recorded);
    // A token sees itself and those before it; two products, each a multiplication and an addition.
    let pairs = (tokens * (tokens + 1) / 2) as f64;
    let work = 4.0 * (heads.queries * heads.dim) as f64 * pairs;
    let rate = work / times.ours;
    let case = format!("prefill d={} of {tokens}", heads.dim);
    let note = format!("{:.0} % of the product's {:.0} TFLOP/s", 100.0 * rate / product, product / 1e12);
    let row = Row::new(&case, Figure::rate(rate / 1e12, "TFLOP/s"));
    let row = row.beside(times.peer.map(|peer| work / peer / 1e12));
    session.row(row.note(note).also(&times.note))?;
    let rows = spread(tokens, CHECKED_ROWS);
    let places: Vec<(usize, usize)> = rows.iter().map(|row| (0, row + 1)).collect();
    let mut worst = Worst::default();
    steps.check(session, heads, &places, &rows, &mut worst)?;
    session.row(worst.row(format!("results of {case}")))
}

/// Operations a second of a large product on this card.
fn product_rate(session: &Session) -> Result<f64> {
    let edge = ceilings::edge(session);
    let recorded = ceilings::record(session, edge, edge, edge)?;
    Ok(2.0 * (edge as f64).powi(3) / session.seconds(&recorded)?)
}

/// Queries, plans and their numbers on the device, and where results go.
struct Steps<'a> {
    sequences: &'a Sequences,
    plans: Vec<Plan>,
    numbers: Vec<DeviceBuffer<u32>>,
    queries: DeviceBuffer<bf16>,
    workspace: DeviceBuffer<f32>,
    out: DeviceBuffer<bf16>,
}

impl<'a> Steps<'a> {
    fn new(session: &Session, sequences: &'a Sequences, plans: Vec<Plan>, rows: usize) -> Result<Steps<'a>> {
        let width = sequences.shape.kv_of_query.len() * sequences.shape.pages.head_dim();
        let mut numbers = Vec::with_capacity(plans.len());
        for plan in &plans {
            let mut on_device = session.buffer::<u32>(plan.numbers_room(), "numbers of a plan")?;
            session.device.upload(plan.numbers(), on_device.slice_mut(0..plan.numbers().len()))?;
            numbers.push(on_device);
        }
        let mut queries = session.buffer::<bf16>(rows * width, "queries")?;
        session.fill(&mut queries, 1.0, 6)?;
        let floats = plans.iter().map(Plan::workspace_floats).max().unwrap_or(0);
        let workspace = session.buffer::<f32>(floats, "partial sums")?;
        let out = session.buffer::<bf16>(rows * row_stride(width), "results")?;
        Ok(Steps { sequences, plans, numbers, queries, workspace, out })
    }

    fn decode(&mut self, launcher: &dyn Launcher, set: usize) -> Result<(), KernelError> {
        let (inputs, workspace, out) = self.parts(set);
        decode(launcher, &inputs, workspace.all_mut(), out.all_mut())
    }

    fn prefill(&mut self, launcher: &dyn Launcher, set: usize) -> Result<(), KernelError> {
        let (inputs, _, out) = self.parts(set);
        prefill(launcher, &inputs, out.all_mut())
    }

    fn parts(&mut self, set: usize) -> (Inputs<'_>, &mut DeviceBuffer<f32>, &mut DeviceBuffer<bf16>) {
        let inputs = Inputs {
            shape: &self.sequences.shape,
            queries: self.queries.all(),
            pages: self.sequences.pages.all(),
            sinks: None,
            plan: &self.plans[set],
            numbers: self.numbers[set].all(),
        };
        (inputs, &mut self.workspace, &mut self.out)
    }

    /// Compares what the last launch left. `places`: for each of `rows` its sequence and the keys that it sees.
    fn check(
        &self,
        session: &Session,
        heads: Heads,
        places: &[(usize, usize)],
        rows: &[usize],
        worst: &mut Worst,
    ) -> Result<()> {
        let Heads { queries, kv, dim } = heads;
        let width = queries * dim;
        for (&row, &(sequence, keys_seen)) in rows.iter().zip(places) {
            let [mut query, mut out] = [vec![bf16::ZERO; width], vec![bf16::ZERO; width]];
            session.device.download(
                self.queries.slice(row * width..(row + 1) * width),
                &mut query,
                WORK_LIMIT,
            )?;
            let at = row * row_stride(width);
            session.device.download(self.out.slice(at..at + width), &mut out, WORK_LIMIT)?;
            let query: Vec<f32> = query.iter().map(|x| x.to_f32()).collect();
            for kv_head in spread(kv, CHECKED_HEADS) {
                let [keys, values] = self.sequences.head(session, sequence, kv_head)?;
                let seen = ..keys_seen * dim;
                let of_query = self.sequences.shape.kv_of_query.iter().enumerate();
                for (head, _) in of_query.filter(|(_, of)| **of == kv_head) {
                    let columns = head * dim..(head + 1) * dim;
                    let scale = self.sequences.shape.scale;
                    let known = truth(&query[columns.clone()], &keys[seen], &values[seen], scale);
                    let errors =
                        out[columns].iter().zip(known).map(|(got, known)| error(got.to_f32(), known));
                    worst.see(largest(errors), format!("row {row}, head {head}"));
                }
            }
        }
        Ok(())
    }
}
