//! What becomes of a rank whose process is at fault.

use std::{fmt, io, time::Duration};

use consort_actors::{ShardError, Step};
use consort_parallel::ids::Rank;

use super::{
    frame::FrameError,
    spawn::{Ending, signal_name},
};

/// What a process was last asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Greeting,
    Loading,
    Joining,
    Rejoining,
    Step(Step),
    Nothing,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doing::Greeting => f.write_str("before it said which build it is"),
            Doing::Loading => f.write_str("while it loaded"),
            Doing::Joining => f.write_str("while it waited for the other ranks"),
            Doing::Rejoining => f.write_str("while it entered a new epoch"),
            Doing::Step(step) => write!(f, "in {step}"),
            Doing::Nothing => f.write_str("while it had nothing to do"),
        }
    }
}

/// Why a rank's process is lost. The rank itself is named by whoever tells of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProcessError {
    #[error("its process could not be started from {executable}: {source}")]
    Start { executable: String, source: io::Error },
    #[error("its process {pid} {} {doing}{}", ended(*ending), after(last))]
    Ended { pid: i32, ending: Ending, doing: Doing, last: String },
    #[error(
        "its process {pid} {} {doing}{}; the program {executable} must call consort::shard_main() at the start of \
         main, or shard_executable must name one that does",
        ended(*ending), after(last)
    )]
    NoShard { pid: i32, ending: Ending, doing: Doing, executable: String, last: String },
    #[error(
        "its process {pid} did not say within {limit:?} which build it is, and was killed; the program {executable} \
         must call consort::shard_main() at the start of main, or shard_executable must name one that does"
    )]
    Mute { pid: i32, limit: Duration, executable: String },
    #[error(
        "its process {pid} runs {executable}, which is another build of Consort ({theirs}) than the engine's ({ours}); \
         build both together, or leave shard_executable out"
    )]
    OtherBuild { pid: i32, executable: String, theirs: String, ours: String },
    #[error("its process {pid} was silent for {limit:?} {doing}, and was killed")]
    Silent { pid: i32, limit: Duration, doing: Doing },
    #[error(
        "its process {pid} did not stop for {limit:?} {doing} after the group was aborted, and was killed"
    )]
    Deaf { pid: i32, limit: Duration, doing: Doing },
    #[error("its process {pid} lives, but did not get on for {limit:?} {doing}, and was killed")]
    Stuck { pid: i32, limit: Duration, doing: Doing },
    #[error(
        "process {pid} of {rank} was killed {seconds} s ago and has not ended: its device may still be at work in the \
         other ranks' memory, so nothing takes its place; if it stays \
         (ps -o pid,stat,wchan -p {pid}), its driver hangs, and the host must be started anew"
    )]
    Undead { rank: Rank, pid: i32, seconds: u64 },
    #[error("its process {pid} failed {doing}: {error}")]
    Failed { pid: i32, doing: Doing, error: String },
    #[error("its process {pid} said what nobody asked for {doing} ({what}), and was killed")]
    Confused { pid: i32, doing: Doing, what: String },
    #[error("what process {pid} was to be told {doing} could not be sent: {source}")]
    Frame { pid: i32, doing: Doing, source: FrameError },
    #[error("the socket of process {pid} failed {doing}: {source}")]
    Socket { pid: i32, doing: Doing, source: io::Error },
}

impl From<ProcessError> for ShardError {
    fn from(error: ProcessError) -> Self {
        ShardError::Process { source: Box::new(error) }
    }
}

fn ended(ending: Ending) -> String {
    match ending {
        Ending::Exited(status) => format!("exited with status {status}"),
        Ending::Killed(signal) => format!("was killed by {}", signal_name(signal)),
        Ending::Unknown => "ended".to_owned(),
    }
}

fn after(last: &str) -> String {
    if last.is_empty() { String::new() } else { format!("; it last said: {last}") }
}
