//! Ranks in processes of their own (`isolation = "process"`): a fault of one ends with its process, and the engine only
//! loses a rank.
//!
//! In the engine each rank keeps its thread, whose [`remote`] executor asks a child process for what the rank is to
//! do. The child ([`worker`]) runs the same model as a thread would. They speak in frames ([`frame`]) over one Unix
//! socket, which the child inherits as its standard input. Ranks on CPUs exchange activations through shared memory,
//! of which a new segment comes with each epoch. Ranks on GPUs only meet there: they map each other's device memory,
//! whose descriptors they exchange through mailboxes that come with the segment. Each process opens its own card and
//! no other.
//!
//! * [`factory`]: makes the group's shared memory, and a process for each rank.
//! * [`spawn`]: children, and that none outlives its use ([`parent`]), and what becomes of those that cannot be ended
//!   ([`left_behind`]).
//! * [`log`]: what they write to standard error, in the engine's log.
//! * [`blueprint`]: what a child needs to know to load its rank.
//!
//! **Signs of life** ([`signs`], [`pulse`]). A process says every half second that it lives, how often its main thread
//! has moved, and whether that waits for other ranks. One that is silent for [`SILENCE_MAX`], that does not let go of a
//! group that was aborted within [`ANSWER_MAX`], or whose main thread stands still for [`STANDSTILL_MAX`] is killed and
//! counts as lost: that costs a restart of the rank. A child whose engine is gone ends at once.
//!
//! Absent on purpose: ports, names in a file system, and anything that a stranger could connect to.

mod blueprint;
mod error;
mod factory;
mod frame;
mod left_behind;
mod log;
mod parent;
mod place;
mod pulse;
mod remote;
mod signs;
mod socket;
mod spawn;
#[cfg(test)]
mod tests;
mod worker;

use std::{io, path::PathBuf, sync::Arc, time::Duration};

pub(crate) use factory::ProcessFactory;
use spawn::{ShardCommand, Spawner};
pub(crate) use worker::is_misplaced;
pub use worker::shard_main;

/// How long a process may give no sign of life before it is killed.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// How long a process may take to answer once its group is aborted: the longest time between two looks at the group's
/// shared memory, which is that of a layer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The same for a rank on a GPU: its process looks when the device has ended the step that it is in. The kernels of a
/// step leave their waits for others at once, and compute on to its end.
const DEVICE_ANSWER_MAX: Duration = Duration::from_secs(20);

/// How long a main thread may stand still that waits for no other rank: the longest time for one layer on CPUs.
const STANDSTILL_MAX: Duration = Duration::from_secs(120);

/// The same for a rank on a GPU, where waits for the device count as moves and have limits of their own. Shorter than
/// the others' devices wait for this one, so that who hangs is known before they give up.
const DEVICE_STANDSTILL_MAX: Duration = Duration::from_secs(20);

/// How long it may stand still while it loads: in the making of kernels, or in one read of a slow disk.
const LOADING_STANDSTILL_MAX: Duration = Duration::from_secs(600);

/// How long a process may take to say which build it is. It has only been loaded by then.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// How long a process may take to give back its memory before it is killed.
const STOP_MAX: Duration = Duration::from_secs(5);

/// How long a killed process may take to be gone: a driver takes its time to end what a card was doing.
const KILL_MAX: Duration = Duration::from_secs(60);

/// How long a rank's new process is not started because an old one has not ended.
const LEFT_BEHIND_MAX: Duration = Duration::from_secs(120);

/// Limits of a rank's process, and the build that it must be.
#[derive(Clone, Debug)]
struct WorkSettings {
    silence_max: Duration,
    answer_max: Duration,
    device_answer_max: Duration,
    standstill_max: Duration,
    device_standstill_max: Duration,
    loading_standstill_max: Duration,
    greeting_max: Duration,
    stop_max: Duration,
    kill_max: Duration,
    left_behind_max: Duration,
    build: [u8; 16],
}

impl Default for WorkSettings {
    fn default() -> Self {
        Self {
            silence_max: SILENCE_MAX,
            answer_max: ANSWER_MAX,
            device_answer_max: DEVICE_ANSWER_MAX,
            standstill_max: STANDSTILL_MAX,
            device_standstill_max: DEVICE_STANDSTILL_MAX,
            loading_standstill_max: LOADING_STANDSTILL_MAX,
            greeting_max: GREETING_MAX,
            stop_max: STOP_MAX,
            kill_max: KILL_MAX,
            left_behind_max: LEFT_BEHIND_MAX,
            build: build(),
        }
    }
}

/// The sources that this program was built from, as the build script hashed them.
fn build() -> [u8; 16] {
    let hash = u128::from_str_radix(env!("CONSORT_BUILD_HASH"), 16);
    hash.expect("the build script writes 32 hexadecimal digits").to_be_bytes()
}

/// What the processes of an engine have in common.
pub(crate) struct Processes {
    spawner: Arc<Spawner>,
    command: ShardCommand,
    settings: WorkSettings,
}

impl Processes {
    /// Processes of `executable`, or of the program that runs.
    pub(crate) fn new(executable: Option<PathBuf>) -> io::Result<Arc<Self>> {
        let command = executable.map_or_else(ShardCommand::of_this_program, ShardCommand::of);
        Ok(Arc::new(Self { spawner: Spawner::new()?, command, settings: WorkSettings::default() }))
    }
}
