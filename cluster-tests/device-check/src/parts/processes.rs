//! Three processes on one card, a rank each: they map each other's memory by descriptor and add with our kernels.
//! Whether that works, not how fast it is: a card gives its time to processes in turns.
//!
//! Sums must be those of the fixed order, to the bit, and what a killed process shared must stay for those that map it.
//! What the processes say of a tiny model must be, to the bit, what the same ranks say as threads of one process, whose
//! sums have the same order. Then a process is killed for which the others wait in a step.

mod adder;
mod group;
pub(super) mod rank;
mod sums;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Error, Result, bail};
use consort_kernels::{
    DType,
    cuda::device::{ArenaPlan, CudaError},
    device::Device,
};
use consort_parallel::checkpoint::Checkpoint;

use self::{
    group::Group,
    rank::{Answer, Message, Role},
    sums::{OUTLIVED, SUMS},
};
use super::tokens::{
    self, TINY_PARAMETERS_MAX, WIDTH,
    ranks::{Plan, Ranked, on_ranks},
};
use crate::{
    figures::{Compared, Figure, Goal, Row},
    session::Session,
};

const SAME: &str = "tokens and logits of three processes";
const LOST: &str = "a killed process ends the waits of the others";
const IN_TIME: &str = "an error in time";

/// Tokens of the prompt, and steps after it, which are replays of a graph.
const PROMPT: usize = 20;
const STEPS: usize = 8;
/// Longest time until all processes have answered: they open the card, load, and add or run the model.
const ANSWER_LIMIT: Duration = Duration::from_secs(11);
/// Longest time of the others once their group was ended; without that a step may take 8 s.
const WAKE_LIMIT: Duration = Duration::from_secs(5);
/// From a process's word that it begins a step to when it waits in it.
const UNTIL_IT_WAITS: Duration = Duration::from_millis(300);
/// The rank that is killed.
const VICTIM: usize = WIDTH - 1;
const KILLED: &str = "the process of rank 2 was killed";

pub(crate) fn run(session: &mut Session) -> Result<()> {
    const OF_MODELS: [&str; 2] = [SAME, LOST];
    if let Some(lack) = lack_of_sharing(session)? {
        let cases = SUMS.into_iter().chain([OUTLIVED]).chain(OF_MODELS);
        return cases.into_iter().try_for_each(|case| session.row(Row::without(case, lack.clone())));
    }
    sums::run(session)?;
    match tiny_model(&session.folder.models())? {
        Some(model) => on_model(session, &model),
        None => {
            let lack = |case| Row::without(case, "there is no tiny model");
            OF_MODELS.into_iter().try_for_each(|case| session.row(lack(case)))
        }
    }
}

/// A case without which the check fails, and that came to no number.
fn failed(case: &str, error: &Error, goal: f64, of: &str) -> Row {
    Row::without(case, format!("{error:#}")).goal(Goal::required(goal, of))
}

fn on_model(session: &mut Session, model: &Path) -> Result<()> {
    let row = match compared(session, model) {
        Ok(row) => row,
        Err(error) => failed(SAME, &error, 0.0, "an answer"),
    };
    session.row(row)?;
    let limit = WAKE_LIMIT.as_secs_f64();
    let row = match without_one(session, model) {
        Ok(seconds) => Row::new(LOST, Figure::cost(seconds, "s"))
            .goal(Goal::required(limit, IN_TIME))
            .note("killed while they wait in a step"),
        Err(error) => failed(LOST, &error, limit, IN_TIME),
    };
    session.row(row)
}

/// The first model that is small enough for three ranks on one card.
fn tiny_model(folder: &Path) -> Result<Option<PathBuf>> {
    for path in tokens::models(folder)? {
        if Checkpoint::open(&path)?.parameter_count() <= TINY_PARAMETERS_MAX {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Why the card's memory cannot be given to other processes, where it cannot.
fn lack_of_sharing(session: &Session) -> Result<Option<String>> {
    let mut plan = ArenaPlan::new();
    plan.reserve::<u32>(1, "what is shared");
    match plan.allocate_shared(&session.device).and_then(|arena| arena.export()) {
        Ok(_) => Ok(None),
        Err(error @ CudaError::Unshared { .. }) => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// What is loaded by threads and by processes.
fn plan<'a>(checkpoint: &'a Checkpoint, devices: &'a [Device], separate_processes: bool) -> Plan<'a> {
    Plan {
        checkpoint,
        devices,
        dtype: DType::BF16,
        deterministic: true,
        separate_processes,
        sequences: 1,
        context: PROMPT + STEPS,
        step_tokens: PROMPT,
    }
}

/// What a rank does, be it a thread or a process.
fn speak(rank: &mut Ranked, checkpoint: &Checkpoint) -> Result<Answer> {
    let prompt = tokens::random_tokens(1, PROMPT, checkpoint.config().vocab_size);
    let spoken = rank.greedy(&[prompt], STEPS, true)?.pop().context("nothing was said")?;
    let logits = spoken.logits.iter().flatten().map(|logit| logit.to_bits()).collect();
    Ok(Answer { tokens: spoken.tokens, logits })
}

fn compared(session: &Session, model: &Path) -> Result<Row> {
    let checkpoint = Checkpoint::open(model)?;
    let devices = tokens::devices(session)?;
    let of_threads = on_ranks(&plan(&checkpoint, &devices, false), |rank| speak(rank, &checkpoint))
        .context("three threads of one process")?;
    drop(devices);
    let mut group = Group::start(session, Some(model), |_| Role::Answers)?;
    let mut answers = Vec::with_capacity(WIDTH);
    group.hear(ANSWER_LIMIT, WIDTH, |rank, message| match message {
        Message::Answer(answer) => {
            answers.push(answer);
            Ok(())
        }
        other => bail!("rank {rank} says {other:?}"),
    })?;
    group.end_well(0..WIDTH)?;
    let found = answers.iter().fold(Compared::default(), |found, answer| {
        found
            .and(Compared::between(&of_threads.tokens, &answer.tokens))
            .and(Compared::between(&of_threads.logits, &answer.logits))
    });
    let note = format!("of {} numbers of {WIDTH} ranks, against three threads of one process", found.pairs);
    Ok(found.row(SAME, "wrong", "the same bits").note(note))
}

/// Seconds from when a killed process's group is ended to the last of the others' errors.
fn without_one(session: &Session, model: &Path) -> Result<f64> {
    let role = |rank| if rank == VICTIM { Role::Stops } else { Role::Waits };
    let mut group = Group::start(session, Some(model), role)?;
    group.hear(ANSWER_LIMIT, WIDTH, |rank, message| match message {
        Message::Ready => Ok(()),
        other => bail!("rank {rank} says {other:?}"),
    })?;
    std::thread::sleep(UNTIL_IT_WAITS);
    group.kill(VICTIM)?;
    let aborted = group.abort(KILLED);
    group.hear(WAKE_LIMIT, WIDTH - 1, |rank, message| match message {
        Message::Failed(reason) if reason.contains(KILLED) => Ok(()),
        other => bail!("rank {rank} says {other:?}"),
    })?;
    let seconds = aborted.elapsed().as_secs_f64();
    // They give back what they hold.
    group.end_well(0..VICTIM)?;
    Ok(seconds)
}
