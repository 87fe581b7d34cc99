//! The parts, in order of their value: what is wrong comes before what is slow.

mod all_reduce;
mod attention;
mod ceilings;
mod faults;
mod kernels;
mod linears;
mod machine;
mod model;
mod nccl;
mod processes;
mod sampling;
mod sanitizer;
mod tokens;
mod triton;
mod truth;

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use rustix::process::getppid;

pub(crate) use self::processes::rank::Args as RankArgs;
use crate::{
    folder::Folder,
    session::{Line, Session, Size},
};

/// A part of the check.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Seconds after which it is ended.
    pub(crate) limit: u64,
    /// Run only where it is asked for by name.
    pub(crate) optional: bool,
    /// Whether it is run beside PyTorch.
    pub(crate) uses_peer: bool,
    work: fn(&mut Session) -> Result<()>,
}

/// All of them. Few take as long as they may; where the time for all runs out, the last ones are not begun.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "machine",
        about: "the card, its driver and its libraries",
        limit: 40,
        optional: false,
        uses_peer: false,
        work: machine::run,
    },
    Part {
        name: "kernels",
        about: "every kernel against what it read and wrote on the emulator",
        limit: 45,
        optional: false,
        uses_peer: false,
        work: kernels::run,
    },
    Part {
        name: "tokens",
        about: "greedy tokens of real models, against the CPU's",
        limit: 30,
        optional: false,
        uses_peer: false,
        work: tokens::run,
    },
    Part {
        name: "processes",
        about: "three processes on one card: memory shared by descriptor, our all-reduce; function, not speed",
        limit: 30,
        optional: false,
        uses_peer: false,
        work: processes::run,
    },
    Part {
        name: "ceilings",
        about: "what the card can do: copy, read, a large product",
        limit: 25,
        optional: false,
        uses_peer: true,
        work: ceilings::run,
    },
    Part {
        name: "linears",
        about: "products of few and many rows, in the shapes of an 8B model and of gpt-oss over three",
        limit: 45,
        optional: false,
        uses_peer: true,
        work: linears::run,
    },
    Part {
        name: "attention",
        about: "paged decode over 8k, and prefill",
        limit: 60,
        optional: false,
        uses_peer: true,
        work: attention::run,
    },
    Part {
        name: "model",
        about: "an 8B-shaped model at 2k, one sequence and 32",
        limit: 90,
        optional: false,
        uses_peer: true,
        work: model::run,
    },
    Part {
        name: "sampling",
        about: "draws from 201,088 tokens",
        limit: 40,
        optional: false,
        uses_peer: true,
        work: sampling::run,
    },
    Part {
        name: "all_reduce",
        about: "sums of three ranks as streams of one process",
        limit: 15,
        optional: false,
        uses_peer: false,
        work: all_reduce::run,
    },
    Part {
        name: "nccl",
        about: "the machine's NCCL at one rank: sums, graphs, an abort",
        limit: 60,
        optional: false,
        uses_peer: false,
        work: nccl::run,
    },
    Part {
        name: "faults",
        about: "which errors the driver gives for what is wrong on purpose",
        limit: 40,
        optional: false,
        uses_peer: false,
        work: faults::run,
    },
    Part {
        name: "sanitizer",
        about: "the part kernels under compute-sanitizer's four tools",
        limit: 250,
        optional: true,
        uses_peer: false,
        work: sanitizer::run,
    },
    Part {
        name: "triton",
        about: "products of one row and decodes, beside the same in Triton",
        limit: 120,
        optional: true,
        uses_peer: true,
        work: triton::run,
    },
];

/// One part in this process.
#[derive(clap::Args)]
pub(crate) struct Args {
    name: String,
    /// Rows are appended here.
    #[arg(long)]
    report: PathBuf,
    /// Socket of the peer.
    #[arg(long)]
    peer: Option<PathBuf>,
}

pub(crate) fn run(folder: Folder, size: Size, args: &Args) -> Result<()> {
    let part = find(&args.name)?;
    end_with_parent();
    if let Some(made) = faults::make() {
        return made;
    }
    let mut session = Session::open(folder, size, &args.report, args.peer.as_deref())?;
    session.line(&Line::Machine(machine::facts(&session.device)))?;
    (part.work)(&mut session)
}

/// Ends this process when the one that started it has ended: nobody is left to end it in time.
fn end_with_parent() {
    let parent = getppid();
    std::thread::spawn(move || {
        while getppid() == parent {
            std::thread::sleep(Duration::from_millis(200));
        }
        eprintln!("error: what started this part has ended");
        std::process::exit(1);
    });
}

/// The part of this name.
pub(crate) fn find(name: &str) -> Result<&'static Part> {
    PARTS.iter().find(|part| part.name == name).with_context(|| {
        let names: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
        format!("there is no part `{name}`; the parts are {}", names.join(", "))
    })
}

/// Names and what they are.
pub(crate) fn list() -> String {
    let mut text = String::new();
    for part in PARTS {
        let optional = if part.optional { " (only with --only)" } else { "" };
        let _ = writeln!(text, "{:<12}{}{optional}", part.name, part.about);
    }
    text
}
