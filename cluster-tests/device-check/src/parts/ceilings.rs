//! What the card can do, by the driver's copy, by a matrix so large that it is only read, and by a large product.

use anyhow::Result;
use consort_kernels::{
    cuda::{Launcher, row_stride},
    linear::cuda::{Invariance, LIBRARY_PARTIALS, WeightView, Workspace, linear, workspace_len},
};
use half::bf16;
use serde_json::json;

use crate::{
    figures::{Figure, Row},
    session::{Recorded, Session},
};

/// Of the matrices whose product is what a card does at best.
pub(super) fn edge(session: &Session) -> usize {
    session.pick(8192, 128)
}

pub(crate) fn run(session: &mut Session) -> Result<()> {
    copy(session)?;
    product(session, "read (a matrix times one row)", session.pick(65_536, 64), session.pick(8192, 128), 1)?;
    let edge = edge(session);
    product(session, &format!("product of two matrices of edge {edge}"), edge, edge, edge)
}

fn copy(session: &mut Session) -> Result<()> {
    let request = json!({"case": "copy", "bytes": session.pick(2u64 << 30, 1 << 18)});
    let times = session.side_by_side(&request, |session| Ok(1.0 / session.measure_copy()?))?;
    let bytes = request["bytes"].as_f64().unwrap_or(f64::NAN);
    let rate = Figure::rate(1.0 / times.ours / 1e12, "TB/s");
    session
        .row(Row::new("copy", rate).beside(times.peer.map(|peer| 2.0 * bytes / peer / 1e12)).note(times.note))
}

/// `[rows, inputs]` times `[outputs, inputs]` of random numbers, in a graph, which keeps their memory.
pub(super) fn record(session: &Session, outputs: usize, inputs: usize, rows: usize) -> Result<Recorded> {
    let mut weight = session.buffer::<bf16>(outputs * row_stride(inputs), "weight")?;
    let mut x = session.buffer::<bf16>(rows * row_stride(inputs), "activations")?;
    session.fill(&mut weight, 1.0, 1)?;
    session.fill(&mut x, 1.0, 2)?;
    let mut y = session.buffer::<f32>(rows * outputs, "results")?;
    let multiprocessors = session.device.multiprocessors();
    let len = workspace_len(multiprocessors, outputs, inputs, rows, Invariance::None)?;
    let mut partials = session.buffer::<f32>(len.partials.max(LIBRARY_PARTIALS), "partial sums")?;
    let mut arrivals = session.buffer::<u32>(len.arrivals, "arrivals")?;
    session.record(1, |launcher, _| {
        let weight = WeightView { values: weight.all(), outputs, inputs };
        let mut workspace = Workspace { partials: partials.all_mut(), arrivals: arrivals.all_mut() };
        linear(launcher, x.all(), weight, None, y.all_mut(), &mut workspace, Invariance::None)
    })
}

/// Such a product by bytes of the weight where there is one row, else by operations.
fn product(session: &mut Session, case: &str, outputs: usize, inputs: usize, rows: usize) -> Result<()> {
    let recorded = record(session, outputs, inputs, rows)?;
    let request = json!({"case": "linear", "n": outputs, "k": inputs, "m": rows, "sets": 1});
    let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
    let (work, unit) = match rows {
        1 => (2.0 * outputs as f64 * inputs as f64 / 1e12, "TB/s"),
        _ => (2.0 * (rows * outputs) as f64 * inputs as f64 / 1e12, "TFLOP/s"),
    };
    let row = Row::new(case, Figure::rate(work / times.ours, unit));
    session.row(row.beside(times.peer.map(|peer| work / peer)).note(times.note))
}
