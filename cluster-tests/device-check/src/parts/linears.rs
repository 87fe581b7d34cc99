//! Products as a step asks for them, through `linear()`: of few rows, by bytes of the weights that must be read, and of
//! many, by operations.
//!
//! Weights of one shape are so many that they do not stay in a cache, and follow one another in one graph. Our sums are
//! written in f32, PyTorch's rounded to BF16.

use anyhow::Result;
use consort_kernels::{
    KernelError,
    cuda::{Launcher, device::DeviceBuffer, row_stride},
    linear::cuda::{
        Invariance, LIBRARY_PARTIALS, LIBRARY_ROWS_MIN, WeightView, Workspace, linear, workspace_len,
    },
};
use half::bf16;
use serde_json::json;

use super::truth::{Worst, largest, spread};
use crate::{
    figures::{Figure, Goal, Row},
    session::{Recorded, Session, WORK_LIMIT},
};

/// Rows of `x`: a decode of one, of a few, of the most that our own kernels take, and a prefill for the library.
const ROWS: [usize; 5] = [1, 8, 32, 64, 512];
const ROWS_SMALL: [usize; 5] = [1, 8, 32, 64, 96];
/// Rows for which the batch-invariant way is timed beside the fastest.
const ROWS_INVARIANT_MAX: usize = 8;
/// Bytes of all weights in a graph: several times a cache of 60 MB.
const ROTATED_BYTES: usize = 384 << 20;

/// A weight of a model.
struct Shape {
    name: &'static str,
    outputs: usize,
    inputs: usize,
    /// Whether a prefill multiplies by it for all of its rows: it does not with the vocabulary.
    prefilled: bool,
}

const fn shape(name: &'static str, outputs: usize, inputs: usize, prefilled: bool) -> Shape {
    Shape { name, outputs, inputs, prefilled }
}

const SHAPES: [Shape; 8] = [
    shape("8B qkv", 6144, 4096, true),
    shape("8B o", 4096, 4096, true),
    shape("8B gate_up", 28_672, 4096, true),
    shape("8B down", 4096, 14_336, true),
    shape("8B head", 128_256, 4096, false),
    shape("gpt-oss/3 qkv", 1920, 2880, true),
    shape("gpt-oss/3 o", 2880, 1536, true),
    shape("gpt-oss/3 head", 67_072, 2880, false),
];

pub(crate) fn run(session: &mut Session) -> Result<()> {
    SHAPES.iter().try_for_each(|shape| Weights::new(session, shape)?.run(session))
}

/// A product of one row by each weight of an 8B model, beside the same in Triton.
pub(super) fn beside_triton(session: &mut Session) -> Result<()> {
    for shape in SHAPES.iter().filter(|shape| shape.name.starts_with("8B")) {
        let mut weights = Weights::new(session, shape)?;
        let recorded = weights.record(session, 1, Invariance::None)?;
        let (n, k, sets) = (weights.outputs, weights.inputs, weights.sets);
        let request = json!({"case": "triton_gemv", "n": n, "k": k, "sets": sets});
        let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
        drop(recorded);
        let (work, _) = weights.work(1);
        let row = weights.row(session, format!("m=1 {}, beside Triton", shape.name), 1, times.ours)?;
        session.row(row.beside(times.peer.map(|peer| work / peer)).also(&times.note))?;
    }
    Ok(())
}

/// Several weights of one shape, and what multiplying by them takes.
struct Weights {
    name: &'static str,
    outputs: usize,
    inputs: usize,
    sets: usize,
    rows: Vec<usize>,
    values: DeviceBuffer<bf16>,
    x: DeviceBuffer<bf16>,
    y: DeviceBuffer<f32>,
    partials: DeviceBuffer<f32>,
    arrivals: DeviceBuffer<u32>,
    truth: Truth,
}

impl Weights {
    fn new(session: &Session, shape: &Shape) -> Result<Weights> {
        let outputs = session.pick(shape.outputs, (shape.outputs / 128).max(16));
        let inputs = session.pick(shape.inputs, (shape.inputs / 32).next_multiple_of(8));
        let rows: Vec<usize> = session
            .pick(ROWS, ROWS_SMALL)
            .into_iter()
            .filter(|&rows| shape.prefilled || rows < LIBRARY_ROWS_MIN)
            .collect();
        let rows_max = rows.iter().copied().max().unwrap_or(1);
        let elements = outputs * row_stride(inputs);
        let sets = session.pick(ROTATED_BYTES.div_ceil(2 * elements), 2);
        let mut values = session.buffer::<bf16>(sets * elements, "weights")?;
        session.fill(&mut values, 1.0, 1)?;
        let mut x = session.buffer::<bf16>(rows_max * row_stride(inputs), "activations")?;
        session.fill(&mut x, 1.0, 2)?;
        let y = session.buffer::<f32>(rows_max * outputs, "results")?;
        let len = |invariance| {
            workspace_len(session.device.multiprocessors(), outputs, inputs, rows_max, invariance)
        };
        let len = len(Invariance::None)?.max(len(Invariance::Batch)?);
        let partials = session.buffer::<f32>(len.partials.max(LIBRARY_PARTIALS), "partial sums")?;
        let arrivals = session.buffer::<u32>(len.arrivals, "arrivals")?;
        let last = (sets - 1) * elements;
        let truth = Truth::new(session, &values, last, &x, outputs, inputs)?;
        let name = shape.name;
        Ok(Weights { name, outputs, inputs, sets, rows, values, x, y, partials, arrivals, truth })
    }

    fn run(&mut self, session: &mut Session) -> Result<()> {
        let mut worst = Worst::default();
        for rows in self.rows.clone() {
            let recorded = self.record(session, rows, Invariance::None)?;
            let (n, k, sets) = (self.outputs, self.inputs, self.sets);
            let request = json!({"case": "linear", "m": rows, "n": n, "k": k, "sets": sets});
            let times = session.side_by_side(&request, |session| session.seconds(&recorded))?;
            drop(recorded);
            worst.see(self.error(session, rows)?, format!("m={rows}"));
            let (work, _) = self.work(rows);
            let peer = times.peer.map(|peer| work / peer);
            let row = self.row(session, format!("m={rows} {}", self.name), rows, times.ours)?;
            let copied = if rows == 1 { Some(0.8 * session.copy_bandwidth()? / 1e12) } else { None };
            let row = match goal(copied, peer) {
                Some(goal) => row.goal(goal),
                None => row,
            };
            session.row(row.beside(peer).also(&times.note))?;
            if rows <= ROWS_INVARIANT_MAX {
                let recorded = self.record(session, rows, Invariance::Batch)?;
                let seconds = session.seconds(&recorded)?;
                drop(recorded);
                worst.see(self.error(session, rows)?, format!("m={rows}, batch invariant"));
                let case = format!("m={rows} {}, batch invariant", self.name);
                let row = self.row(session, case, rows, seconds)?.beside(peer);
                session.row(row)?;
            }
        }
        session.row(worst.row(format!("results {}", self.name)))
    }

    /// All weights in one graph.
    fn record(&mut self, session: &Session, rows: usize, invariance: Invariance) -> Result<Recorded> {
        let recorded =
            session.record(self.sets, |launcher, set| self.multiply(launcher, set, rows, invariance))?;
        // Results of an earlier case would be right, too.
        session.device.zero(self.y.all_mut())?;
        Ok(recorded)
    }

    fn multiply(
        &mut self,
        launcher: &dyn Launcher,
        set: usize,
        rows: usize,
        invariance: Invariance,
    ) -> Result<(), KernelError> {
        let (stride, outputs, inputs) = (row_stride(self.inputs), self.outputs, self.inputs);
        let elements = outputs * stride;
        let values = self.values.slice(set * elements..(set + 1) * elements);
        let weight = WeightView { values, outputs, inputs };
        let mut workspace =
            Workspace { partials: self.partials.all_mut(), arrivals: self.arrivals.all_mut() };
        let (x, y) = (self.x.slice(0..rows * stride), self.y.slice_mut(0..rows * outputs));
        linear(launcher, x, weight, None, y, &mut workspace, invariance)
    }

    /// What one product is counted as, in units of 10^12.
    fn work(&self, rows: usize) -> (f64, &'static str) {
        let elements = (self.outputs * self.inputs) as f64;
        if rows < LIBRARY_ROWS_MIN {
            (2.0 * elements / 1e12, "TB/s")
        } else {
            (2.0 * rows as f64 * elements / 1e12, "TFLOP/s")
        }
    }

    fn row(&self, session: &Session, case: String, rows: usize, seconds: f64) -> Result<Row> {
        let (work, unit) = self.work(rows);
        let row = Row::new(case, Figure::rate(work / seconds, unit));
        if unit != "TB/s" {
            return Ok(row);
        }
        let share = 100.0 * work * 1e12 / seconds / session.copy_bandwidth()?;
        Ok(row.note(format!("{share:.0} % of copy")))
    }

    /// How far the last weight's results are from the truth, as a share of what rounding may make.
    fn error(&self, session: &Session, rows: usize) -> Result<f64> {
        let mut errors = Vec::new();
        for row in spread(rows, CHECKED_ROWS) {
            let mut y = vec![0.0; self.outputs];
            let from = self.y.slice(row * self.outputs..(row + 1) * self.outputs);
            session.device.download(from, &mut y, WORK_LIMIT)?;
            errors.push(self.truth.error(row, &y));
        }
        Ok(largest(errors.into_iter()))
    }
}

/// The stricter of what is hoped for of a rate: a share of the copy's, and nine tenths of PyTorch's.
fn goal(copied: Option<f64>, peer: Option<f64>) -> Option<Goal> {
    let copied = copied.map(|value| Goal::hoped(value, "80 % of copy"));
    let peer = peer.map(|value| Goal::hoped(0.9 * value, "90 % of PyTorch"));
    [copied, peer].into_iter().flatten().max_by(|a, b| a.value.total_cmp(&b.value))
}

/// Rows of a result that are looked at, and elements of each.
const CHECKED_ROWS: usize = 8;
const CHECKED_OUTPUTS: usize = 97;

/// What multiplies to some elements of a result, on the host.
struct Truth {
    inputs: usize,
    outputs: Vec<usize>,
    /// A row for each of the outputs.
    weights: Vec<bf16>,
    x: Vec<bf16>,
}

impl Truth {
    /// Of the weight that begins at `start`.
    fn new(
        session: &Session,
        values: &DeviceBuffer<bf16>,
        start: usize,
        x: &DeviceBuffer<bf16>,
        outputs: usize,
        inputs: usize,
    ) -> Result<Truth> {
        let stride = row_stride(inputs);
        let outputs = spread(outputs, CHECKED_OUTPUTS);
        let mut weights = vec![bf16::ZERO; outputs.len() * stride];
        for (&output, row) in outputs.iter().zip(weights.chunks_exact_mut(stride)) {
            let at = start + output * stride;
            session.device.download(values.slice(at..at + stride), row, WORK_LIMIT)?;
        }
        let mut host = vec![bf16::ZERO; x.len()];
        session.device.download(x.all(), &mut host, WORK_LIMIT)?;
        Ok(Truth { inputs, outputs, weights, x: host })
    }

    /// The largest difference in a row `y` of the result, as a share of what rounding may make.
    ///
    /// A tensor core adds sixteen products and what it has so far at once, and may cut each to some 2^-22 of the
    /// largest. What it has so far is a random walk: hardly ever beyond four times the root of the sum of squares.
    fn error(&self, row: usize, y: &[f32]) -> f64 {
        let stride = row_stride(self.inputs);
        let x = &self.x[row * stride..][..self.inputs];
        let steps = (self.inputs / 16 + 1) as f64;
        let errors = self.outputs.iter().zip(self.weights.chunks_exact(stride)).map(|(&output, weight)| {
            let products = x.iter().zip(weight).map(|(x, w)| f64::from(x.to_f32()) * f64::from(w.to_f32()));
            let (sum, squares) = products.fold((0.0, 0.0), |(sum, squares), p| (sum + p, squares + p * p));
            let tolerance = steps * 4.0 * squares.sqrt() / f64::from(1 << 22) + f64::from(f32::MIN_POSITIVE);
            (f64::from(y[output]) - sum).abs() / tolerance
        });
        largest(errors)
    }
}
