//! A model shaped like Llama 3 of 8B with random weights: loading, prefill, and decoding at a context of 2048.
//!
//! A decode step is all that the product does but for choosing what to run: numbers to the device, a graph, logits,
//! draws, tokens to the host. Pages are filled by a prefill of one prompt, whose pages are copied to the other
//! sequences: all read pages of their own. The same steps are also enqueued one behind another, as the product does.
//!
//! On an H200 this should take about: writing the weights 4 s, loading them 6 s, giving the files back 2 s, prefills
//! 1 s, the peer's weights and the choice of its fastest step 6 s, decodes of both 4 s, steps behind each other 3 s.

mod checkpoint;
mod overlap;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use consort_kernels::{DType, device::Device};
use consort_parallel::{collective::LocalGroup, partition::Partition};
use serde_json::{Value, json};

use super::tokens::{
    compare::{Differences, worst},
    ranks::{Part, Plan, Ranked, Rows},
};
use crate::{
    figures::{Figure, Goal, Row},
    session::{Noise, Session, WORK_LIMIT, median},
};

/// Bytes per second, read and written, of a copy on an H200, for which the goals are.
const H200_COPY: f64 = 4.3e12;
/// Tokens per second on it at batch 1 and at the larger one.
const GOALS: [f64; 2] = [210.0, 4100.0];
/// Steps of a round of each.
const STEPS: [usize; 2] = [34, 17];
/// Steps enqueued one after another, so that the host's time does not show.
const ENQUEUED: usize = 10;
/// By how much a decode's logits may differ from a prefill's, by their root mean square: far above what rounding to
/// BF16 does in 32 layers, far below the 1.4 of logits that have nothing to do with each other.
const TOLERANCE: f64 = 0.15;

/// Sizes of a model, and of the work.
#[derive(Clone, Copy, Debug)]
struct Shape {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocabulary: usize,
    context: usize,
    /// Sequences of the larger batch.
    batch: usize,
}

impl Shape {
    const EIGHT_BILLION: Shape = Shape {
        layers: 32,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 14_336,
        vocabulary: 128_256,
        context: 2048,
        batch: 32,
    };
    const SMALL: Shape = Shape {
        layers: 2,
        hidden: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        intermediate: 192,
        vocabulary: 640,
        context: 96,
        batch: 8,
    };

    fn config(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": false,
            "eos_token_id": 0,
        })
    }

    /// What the peer is asked.
    fn request(&self, case: &str, batch: usize) -> Value {
        json!({
            "case": case, "batch": batch, "layers": self.layers, "hidden": self.hidden, "heads": self.heads,
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate": self.intermediate,
            "vocabulary": self.vocabulary, "context": self.context,
        })
    }
}

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let shape = session.pick(Shape::EIGHT_BILLION, Shape::SMALL);
    // While there is still memory for it.
    let goals = goals(session)?;
    let Some(mut model) = load(session, &shape)? else { return Ok(()) };
    prefill(session, &shape, &mut model)?;
    for (at, batch) in [1, shape.batch].into_iter().enumerate() {
        let steps = session.pick(STEPS[at], 1);
        decode(session, &shape, &mut model, batch, steps, &goals[at])?;
        overlap::decode(session, &shape, &mut model, batch, steps)?;
    }
    Ok(())
}

/// Those of an H200; of another card in proportion to how fast it copies.
fn goals(session: &Session) -> Result<[Goal; 2]> {
    let copy = session.copy_bandwidth()?;
    Ok(GOALS.map(|goal| match session.device.facts().name.contains("H200") {
        true => Goal::hoped(goal, "on an H200"),
        false => {
            let scaled = goal * copy / H200_COPY;
            Goal::hoped(scaled, format!("{goal} x {:.2} of the 4.3 TB/s of an H200's copy", copy / H200_COPY))
        }
    }))
}

/// The model and its prompt.
struct Loaded {
    rank: Ranked,
    prompt: Vec<u32>,
    /// Logits after the prompt, from its prefill.
    expected: Vec<f32>,
}

/// `None` where there is no place for the weights.
fn load(session: &mut Session, shape: &Shape) -> Result<Option<Loaded>> {
    const CASE: &str = "load, from mapped files to the device";
    let made = match checkpoint::make(shape) {
        Ok(made) => made,
        Err(reason) => {
            session.row(Row::without(CASE, format!("{reason:#}")))?;
            return Ok(None);
        }
    };
    let (devices, partition) =
        ([Device::Cuda(session.device.clone())], Partition::new(made.checkpoint.config(), 1, None)?);
    let plan = Plan {
        checkpoint: &made.checkpoint,
        devices: &devices,
        dtype: DType::BF16,
        deterministic: false,
        separate_processes: false,
        sequences: shape.batch,
        context: shape.context,
        step_tokens: shape.context,
    };
    session.device.load_all()?;
    let comm = LocalGroup::new(1).pop().context("a group without ranks")?;
    let started = Instant::now();
    let rank = Ranked::load(&plan, &partition, &devices[0], Box::new(comm))?;
    let seconds = started.elapsed().as_secs_f64();
    let gigabytes = rank.weight_bytes() as f64 / 1e9;
    let note = format!(
        "{gigabytes:.2} GB in {seconds:.2} s, pages included; the files were written in {:.1} s to {}",
        made.seconds, made.place
    );
    session.row(Row::new(CASE, Figure::rate(gigabytes / seconds, "GB/s")).note(note))?;
    let mut noise = Noise::new(3);
    let prompt = (0..shape.context).map(|_| (noise.next_u64() % shape.vocabulary as u64) as u32).collect();
    Ok(Some(Loaded { rank, prompt, expected: Vec::new() }))
}

/// All of the prompt in one step, to its next token.
fn prefill(session: &mut Session, shape: &Shape, model: &mut Loaded) -> Result<()> {
    let Loaded { rank, prompt, expected } = model;
    let mut once = || -> Result<f64> {
        let started = Instant::now();
        rank.step(&[Part { sequence: 0, start: 0, tokens: prompt }], Rows::Last)?;
        rank.draw()?;
        Ok(started.elapsed().as_secs_f64())
    };
    once()?;
    let request = shape.request("model_prefill", 1);
    let times = session.side_by_side(&request, |session| {
        Ok(median((0..session.pick(2, 1)).map(|_| once()).collect::<Result<_>>()?))
    })?;
    *expected = rank.logits()?.swap_remove(0);
    rank.copy_first_to_others()?;
    let tokens = shape.context as f64;
    session.row(
        Row::new(format!("prefill of {}", shape.context), Figure::rate(tokens / times.ours, "tokens/s"))
            .beside(times.peer.map(|seconds| tokens / seconds))
            .note(times.note),
    )
}

/// The prompt's last token anew, of all sequences: right or not, then how fast.
fn decode(
    session: &mut Session,
    shape: &Shape,
    model: &mut Loaded,
    batch: usize,
    steps: usize,
    goal: &Goal,
) -> Result<()> {
    let Loaded { rank, prompt, expected } = model;
    let case = format!("decode at {}, batch {batch}", shape.context);
    let start = shape.context - 1;
    let mut tokens = vec![prompt[start]; batch];
    rank.step(&parts(&tokens, start), Rows::Last)?;
    let logits = rank.logits()?;
    let expected = std::slice::from_ref(expected);
    let relative = worst(logits.chunks(1).map(|row| Differences::between(row, expected).relative()));
    session.row(
        Row::new(format!("{case}: logits against the prefill's"), Figure::cost(relative, "of their RMS"))
            .goal(Goal::required(TOLERANCE, "two ways of rounding to BF16")),
    )?;
    // Warms up; the graph is there.
    tokens = rank.draw()?;
    let mut step = || -> Result<f64> {
        let started = Instant::now();
        rank.step(&parts(&tokens, start), Rows::Last)?;
        tokens = rank.draw()?;
        Ok(started.elapsed().as_secs_f64())
    };
    step()?;
    let times = session.side_by_side(&shape.request("model_decode", batch), |_| {
        Ok(median((0..steps).map(|_| step()).collect::<Result<_>>()?))
    })?;
    let shares = shares(session, rank, &parts(&tokens, start))?;
    let rest = times.ours - shares.layers - shares.draws;
    let millis = 1e3;
    let note = format!(
        "{:.3} ms by the host's clock, PyTorch's graph by events: \
         layers {:.3} on the device, logits, draws and tokens to the host {:.3}, the rest {:.3}{}{}",
        times.ours * millis,
        shares.layers * millis,
        shares.draws * millis,
        rest * millis,
        if times.note.is_empty() { "" } else { "; " },
        times.note
    );
    session.row(
        Row::new(case.clone(), Figure::rate(batch as f64 / times.ours, "tokens/s"))
            .beside(times.peer.map(|seconds| batch as f64 / seconds))
            .goal(goal.clone())
            .note(note),
    )?;
    // One row of the embedding for each sequence, and the head is no part of the layers.
    let matrices = rank.weight_bytes() - 4 * (shape.vocabulary * shape.hidden) as u64;
    let read = matrices + batch as u64 * rank.kv_bytes_of_one();
    let rate = Figure::rate(read as f64 / shares.layers / 1e12, "TB/s");
    session
        .row(Row::new(format!("{case}: the layers' graph alone"), rate).note("of weights, keys and values"))
}

/// One new token of each sequence.
fn parts(tokens: &[u32], start: usize) -> Vec<Part<'_>> {
    let one = |(sequence, token)| Part { sequence, start, tokens: std::slice::from_ref(token) };
    tokens.iter().enumerate().map(one).collect()
}

/// Seconds of parts of a step.
struct Shares {
    /// The graph, on the device.
    layers: f64,
    /// From a device that has done the layers to tokens on the host.
    draws: f64,
}

fn shares(session: &Session, rank: &mut Ranked, parts: &[Part<'_>]) -> Result<Shares> {
    let device = &session.device;
    let mut outcome = Ok(());
    let mut layers = Vec::new();
    for _ in 0..session.pick(3, 1) {
        let took = device.measure(WORK_LIMIT, || {
            outcome = (0..ENQUEUED).try_for_each(|_| rank.step(parts, Rows::Last));
            Ok(())
        })?;
        layers.push(took.as_secs_f64() / ENQUEUED as f64);
        std::mem::replace(&mut outcome, Ok(()))?;
    }
    let mut draws = Vec::new();
    for _ in 0..session.pick(10, 1) {
        rank.step(parts, Rows::Last)?;
        device.synchronize("end a step", WORK_LIMIT)?;
        let started = Instant::now();
        rank.draw()?;
        draws.push(started.elapsed().as_secs_f64());
    }
    Ok(Shares { layers: median(layers).max(Duration::from_nanos(1).as_secs_f64()), draws: median(draws) })
}
