//! Three processes on one card, a rank each: they map each other's memory by descriptor and add with our kernels.
//! Whether that works, not how fast it is: a card gives its time to processes in turns.
//!
//! What the processes say of a tiny model must be, to the bit, what the same ranks say as threads of one process, whose
//! sums have the same order. Then a process is killed for which the others wait in a step.

mod group;
pub(super) mod rank;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use consort_kernels::{
    DType,
    cuda::device::{ArenaPlan, CudaError},
    device::Device,
};
use consort_parallel::checkpoint::Checkpoint;

use self::{
    group::Group,
    rank::{Answer, Message, Role},
};
use super::tokens::{
    self, TINY_PARAMETERS_MAX, WIDTH,
    ranks::{Plan, Ranked, on_ranks},
};
use crate::{
    figures::{Figure, Goal, Row},
    session::Session,
};

const SAME: &str = "tokens and logits of three processes";
const LOST: &str = "a killed process ends the waits of the others";

/// Tokens of the prompt, and steps after it, which are replays of a graph.
const PROMPT: usize = 20;
const STEPS: usize = 8;
/// Longest time until all processes have answered: they open the card, load and compute.
const ANSWER_LIMIT: Duration = Duration::from_secs(11);
/// Longest time of the others once their group was ended; without that a step may take 8 s.
const WAKE_LIMIT: Duration = Duration::from_secs(5);
/// From a process's word that it begins a step to when it waits in it.
const UNTIL_IT_WAITS: Duration = Duration::from_millis(300);
/// The rank that is killed.
const VICTIM: usize = WIDTH - 1;
const KILLED: &str = "the process of rank 2 was killed";

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let lack = match tiny_model(&session.folder.models())? {
        None => "there is no tiny model".to_owned(),
        Some(model) => match lack_of_sharing(session)? {
            None => return on_model(session, &model),
            Some(lack) => lack,
        },
    };
    [SAME, LOST].into_iter().try_for_each(|case| session.row(Row::without(case, lack.clone())))
}

fn on_model(session: &mut Session, model: &Path) -> Result<()> {
    let row = match compared(session, model) {
        Ok(row) => row,
        Err(error) => Row::without(SAME, format!("{error:#}")).goal(Goal::required(0.0, "an answer")),
    };
    session.row(row)?;
    let row = match without_one(session, model) {
        Ok(seconds) => Row::new(LOST, Figure::cost(seconds, "s")).note("killed while they wait in a step"),
        Err(error) => Row::without(LOST, format!("{error:#}")),
    };
    session.row(row.goal(Goal::required(WAKE_LIMIT.as_secs_f64(), "an error in time")))
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
    let mut group = Group::start(session, model, |_| Role::Answers)?;
    let mut answers = Vec::with_capacity(WIDTH);
    group.hear(ANSWER_LIMIT, WIDTH, |rank, message| match message {
        Message::Answer(answer) => {
            answers.push(answer);
            Ok(())
        }
        other => bail!("rank {rank} says {other:?}"),
    })?;
    group.end_well(0..WIDTH)?;
    let (wrong, compared) = different(&of_threads, &answers);
    let note = format!("of {compared} numbers of {WIDTH} ranks, against three threads of one process");
    Ok(Row::new(SAME, Figure::cost(wrong as f64, "wrong"))
        .goal(Goal::required(0.0, "the same bits"))
        .note(note))
}

/// Numbers that are not the expected ones, or are missing or too many, and how many were compared. Where none was, that
/// is wrong.
fn different(expected: &Answer, answers: &[Answer]) -> (usize, usize) {
    let (mut wrong, mut compared) = (0, 0);
    for answer in answers {
        for (expected, got) in [(&expected.tokens, &answer.tokens), (&expected.logits, &answer.logits)] {
            let pairs = expected.iter().zip(got);
            wrong += expected.len().abs_diff(got.len()) + pairs.clone().filter(|(a, b)| a != b).count();
            compared += pairs.count();
        }
    }
    if compared == 0 { (1, 0) } else { (wrong, compared) }
}

/// Seconds from when a killed process's group is ended to the last of the others' errors.
fn without_one(session: &Session, model: &Path) -> Result<f64> {
    let role = |rank| if rank == VICTIM { Role::Stops } else { Role::Waits };
    let mut group = Group::start(session, model, role)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_differ_are_missing_or_too_many_are_wrong_and_so_are_none() {
        let answer = |tokens: &[u32], logits: &[u32]| Answer { tokens: tokens.into(), logits: logits.into() };
        let expected = answer(&[1, 2], &[3, 4]);
        assert_eq!(different(&expected, &[expected.clone(), expected.clone()]), (0, 8));
        let others = [answer(&[1, 7], &[3, 4]), answer(&[1, 2], &[4]), answer(&[1, 2, 2], &[3, 4])];
        assert_eq!(different(&expected, &others), (1 + 2 + 1, 4 + 3 + 4));
        assert_eq!(different(&expected, &[]), (1, 0));
        let nothing = answer(&[], &[]);
        assert_eq!(different(&nothing, std::slice::from_ref(&nothing)), (1, 0));
    }
}
