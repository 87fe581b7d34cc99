//! The process of one rank: takes its place, computes, and says a line of JSON for each thing its parent waits for.

use std::{
    io::{IoSliceMut, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use consort_kernels::{
    cuda::{device::CudaDevice, settings::Settings},
    device::Device,
};
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::{MAILBOX_RANKS_MAX, SharedMemory},
    ids::Rank,
    partition::Partition,
};
use rustix::{
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::{Signal, getppid, set_parent_process_death_signal},
};
use serde::{Deserialize, Serialize};

use super::{
    super::tokens::WIDTH,
    VICTIM,
    adder::{Adder, Outlived, WAYS},
    plan, speak,
};
use crate::{figures::Compared, parts::tokens::ranks::Ranked, session::Size};

/// A process that is to be killed ends by itself after this.
const STOPPED_LIMIT: Duration = Duration::from_secs(20);

/// One rank in this process, whose place comes through its standard input.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process that started it.
    #[arg(long)]
    pub(super) parent: i32,
    #[arg(long)]
    pub(super) rank: u16,
    /// What it runs; it adds where there is none.
    #[arg(long)]
    pub(super) model: Option<PathBuf>,
    #[arg(long, value_enum)]
    pub(super) role: Role,
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Says what the model says.
    Answers,
    /// Goes on to one step or sum more, to which a rank does not come.
    Waits,
    /// Does not come to it, and waits to be killed.
    Stops,
}

/// What a model says: tokens, and the bits of all their logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) tokens: Vec<u32>,
    pub(super) logits: Vec<u32>,
}

/// What a process says to its parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    Answer(Answer),
    /// Its sums in each way. It now waits for the others or has them wait.
    Added([Compared; WAYS.len()]),
    /// What it has of a rank that did not come.
    Outlived(Outlived),
    /// It has computed with the others, and now waits for them or has them wait.
    Ready,
    Failed(String),
}

impl Args {
    /// Does it. What fails is the parent's to judge.
    pub(crate) fn run(&self, size: Size) -> Result<()> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != self.parent) {
            bail!("what started this rank has ended");
        }
        match self.compute(size) {
            Ok(()) => Ok(()),
            Err(error) => say(&Message::Failed(format!("{error:#}"))),
        }
    }

    fn compute(&self, size: Size) -> Result<()> {
        let mut descriptors = received()?.into_iter();
        let segment = descriptors.next().context("the place in the group did not come")?;
        let rank = Rank(self.rank);
        let place = SharedMemory::attach(segment, rank)?.with_mailbox(descriptors.collect())?;
        let device = CudaDevice::open(&"cuda:0".parse()?, &Settings::of_process())?;
        match &self.model {
            Some(model) => self.speak(place, Device::Cuda(device), model),
            None => self.add(Adder::meet(place, device, size)?),
        }
    }

    fn speak(&self, place: SharedMemory, device: Device, model: &Path) -> Result<()> {
        let (checkpoint, devices) = (Checkpoint::open(model)?, [device]);
        let partition = Partition::new(checkpoint.config(), WIDTH, None)?;
        let plan = plan(&checkpoint, &devices, true);
        let mut ranked = Ranked::load(&plan, &partition, &devices[0], Box::new(place))?;
        let answer = speak(&mut ranked, &checkpoint)?;
        match self.role {
            Role::Answers => {
                // A rank that leaves ends the group.
                ranked.meet()?;
                say(&Message::Answer(answer))
            }
            Role::Waits => {
                say(&Message::Ready)?;
                speak(&mut ranked, &checkpoint).map(drop)?;
                bail!("a step went well to which a rank did not come")
            }
            Role::Stops => {
                say(&Message::Ready)?;
                until_killed()
            }
        }
    }

    fn add(&self, mut adder: Adder) -> Result<()> {
        let added = Message::Added(adder.add()?);
        adder.leave_numbers()?;
        say(&added)?;
        match self.role {
            Role::Answers => Ok(()),
            Role::Waits => say(&Message::Outlived(adder.outlive(VICTIM)?)),
            Role::Stops => until_killed(),
        }
    }
}

fn until_killed() -> Result<()> {
    thread::sleep(STOPPED_LIMIT);
    bail!("nobody has ended this process")
}

fn say(message: &Message) -> Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}

/// The descriptors that the parent has sent.
fn received() -> Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + MAILBOX_RANKS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let input = std::io::stdin();
    let mut into = [IoSliceMut::new(&mut byte)];
    recvmsg(input.as_fd(), &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        .context("cannot receive the place in the group")?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(rights.flatten().collect())
}
