//! Sums of three processes, and what two of them have of the third one's memory when it was killed in the middle of
//! one.

use anyhow::{Result, bail};

use super::{
    ANSWER_LIMIT, KILLED, UNTIL_IT_WAITS, VICTIM, WAKE_LIMIT,
    adder::WAYS,
    failed,
    group::Group,
    rank::{Message, Role},
};
use crate::{figures::Compared, parts::tokens::WIDTH, session::Session};

/// By each of [`WAYS`].
pub(super) const SUMS: [&str; WAYS.len()] =
    ["sums of three processes, one shot", "sums of three processes, two shots"];
pub(super) const OUTLIVED: &str = "memory of a killed process";

pub(super) fn run(session: &mut Session) -> Result<()> {
    let (mut group, found) = match added(session) {
        Ok(added) => added,
        Err(error) => {
            let cases = SUMS.into_iter().chain([OUTLIVED]);
            return cases
                .into_iter()
                .try_for_each(|case| session.row(failed(case, &error, 0.0, "an answer")));
        }
    };
    for (case, found) in SUMS.into_iter().zip(found) {
        let note = format!("of {} elements, enqueued and replayed", found.pairs);
        session.row(found.row(case, "wrong", "the fixed order's").note(note))?;
    }
    session.row(match outlived(&mut group) {
        Ok(found) => {
            let note = format!("of {} elements that the others read", found.pairs);
            found.row(OUTLIVED, "wrong", "what it left").note(note)
        }
        Err(error) => failed(OUTLIVED, &error, 0.0, "what it left"),
    })
}

/// All three after their sums, and what those were.
fn added(session: &Session) -> Result<(Group, [Compared; WAYS.len()])> {
    let role = |rank| if rank == VICTIM { Role::Stops } else { Role::Waits };
    let mut group = Group::start(session, None, role)?;
    let mut found = [Compared::default(); WAYS.len()];
    group.hear(ANSWER_LIMIT, WIDTH, |rank, message| match message {
        Message::Added(of_rank) => {
            found.iter_mut().zip(of_rank).for_each(|(found, of_rank)| *found = found.and(of_rank));
            Ok(())
        }
        other => bail!("rank {rank} says {other:?}"),
    })?;
    Ok((group, found))
}

/// Kills one that the others wait for, whose sums must end with that reason.
fn outlived(group: &mut Group) -> Result<Compared> {
    std::thread::sleep(UNTIL_IT_WAITS);
    group.kill(VICTIM)?;
    group.abort(KILLED);
    let mut found = Compared::default();
    group.hear(WAKE_LIMIT, WIDTH - 1, |rank, message| match message {
        Message::Outlived(outlived) if outlived.error.contains(KILLED) => {
            found = found.and(outlived.memory);
            Ok(())
        }
        other => bail!("rank {rank} says {other:?}"),
    })?;
    group.end_well(0..VICTIM)?;
    Ok(found)
}
