//! Decodes of which one step is enqueued behind another: its input is what the step before draws on the device, and
//! the host takes that step's tokens meanwhile. Beside the same steps one after another, which must draw the same.

use std::time::Instant;

use anyhow::Result;

use super::{Loaded, Rows, Shape, parts};
use crate::{
    figures::{Compared, Figure, Row},
    parts::tokens::ranks::Ranked,
    session::{Session, median},
};

/// How often both take turns.
const TURNS: usize = 3;
/// Fewer steps would hardly be under way together.
const STEPS_MIN: usize = 4;

/// Tokens of each step.
type Drawn = Vec<Vec<u32>>;

/// The prompt's last token anew, of `batch` sequences, so many steps each time.
pub(super) fn decode(
    session: &mut Session,
    shape: &Shape,
    model: &mut Loaded,
    batch: usize,
    steps: usize,
) -> Result<()> {
    let Loaded { rank, prompt, .. } = model;
    let (start, steps) = (shape.context - 1, steps.max(STEPS_MIN));
    let first = vec![prompt[start]; batch];
    let (mut seconds, mut of_overlapped) = (Vec::new(), Vec::new());
    let mut compared = Compared::default();
    // The first turn warms up.
    for turn in 0..=session.pick(TURNS, 1) {
        let (took, expected) = timed(|| one_after_another(rank, &first, start, steps))?;
        let (took_overlapped, drawn) = timed(|| rank.overlapped(&first, |_| start, steps))?;
        compared = compared.and(Compared::between(&expected.concat(), &drawn.concat()));
        if turn > 0 {
            seconds.push(took);
            of_overlapped.push(took_overlapped);
        }
    }
    let case = format!("decode at {}, batch {batch}, a step enqueued behind another", shape.context);
    let [rate, overlapped] = [seconds, of_overlapped].map(|of| (batch * steps) as f64 / median(of));
    let ratio = overlapped / rate;
    session.row(
        Row::new(case.clone(), Figure::rate(overlapped, "tokens/s"))
            .note(format!("{ratio:.2} times the {rate:.1} of the same {steps} steps one after another")),
    )?;
    let row = compared.row(format!("{case}: tokens"), "different", "those of steps one after another");
    session.row(row.note(format!("of {}", compared.pairs)))
}

fn timed(work: impl FnOnce() -> Result<Drawn>) -> Result<(f64, Drawn)> {
    let started = Instant::now();
    let drawn = work()?;
    Ok((started.elapsed().as_secs_f64(), drawn))
}

fn one_after_another(rank: &mut Ranked, first: &[u32], start: usize, steps: usize) -> Result<Drawn> {
    let (mut tokens, mut drawn) = (first.to_vec(), Vec::with_capacity(steps));
    for _ in 0..steps {
        rank.step(&parts(&tokens, start), Rows::Last)?;
        tokens = rank.draw()?;
        drawn.push(tokens.clone());
    }
    Ok(drawn)
}
