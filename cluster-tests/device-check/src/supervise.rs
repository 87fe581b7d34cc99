//! Runs the parts, each as a process of its own, one after another, within a limit for all.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    figures::Row,
    folder::Folder,
    parts::{self, PARTS, Part},
    report::{Machine, Outcome, PartReport, Report},
    session::{Line, Size},
};

/// A process that was killed is waited for so long: one that is stuck in a driver does not end at once.
const END_LIMIT: Duration = Duration::from_secs(2);
/// A part is not begun with less time left.
const BEGIN_MIN: Duration = Duration::from_secs(3);
/// What is kept of the time for the end: the table, processes that do not end.
const RESERVE: Duration = Duration::from_secs(6);
/// Longest wait for the peer, which loads PyTorch. Parts that do without it are run meanwhile.
const PEER_LIMIT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parts, by name, instead of all that are not optional.
    #[arg(long, value_delimiter = ',', value_name = "PART,..")]
    only: Vec<String>,
    /// Where report.json, report.md and the parts' own output go.
    #[arg(long, value_name = "DIR", default_value = "device-check-report")]
    out: PathBuf,
    /// Seconds for each part at most, where its own limit is longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    part_limit: u64,
    /// Seconds for all of it.
    #[arg(long, value_name = "SECONDS", default_value_t = 270)]
    limit: u64,
    /// The Python that has PyTorch.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Do without PyTorch.
    #[arg(long)]
    no_peer: bool,
}

/// Runs them; false where one failed or something is wrong.
pub(crate) fn run(folder: &Folder, size: Size, args: &Args) -> Result<bool> {
    let deadline = Instant::now() + Duration::from_secs(args.limit).saturating_sub(RESERVE);
    let chosen: Vec<&Part> = match args.only.as_slice() {
        [] => PARTS.iter().filter(|part| !part.optional).collect(),
        names => names.iter().map(|name| parts::find(name)).collect::<Result<_>>()?,
    };
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    // An earlier run's.
    let _ = fs::remove_file(args.out.join("parts.log"));
    let mut peer = PeerProcess::start(folder, args);
    let mut report = Report { machine: Machine::default(), parts: Vec::new() };
    for part in chosen {
        if part.uses_peer {
            peer.wait_until_ready(deadline);
        }
        let found = run_part(folder, size, args, part, peer.socket(), deadline, &mut report.machine);
        eprintln!("{:<12}{:6.1} s, {} rows: {}", part.name, found.seconds, found.rows.len(), found.outcome);
        report.parts.push(found);
        report.machine.peer = peer.state();
        // Whatever ends this process later, what was found stays.
        write(&args.out, &report)?;
    }
    println!("{}\n{}", report.table(), report.summary());
    drop(peer);
    Ok(report.is_good())
}

fn write(out: &Path, report: &Report) -> Result<()> {
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write("report.json", &serde_json::to_string_pretty(report)?)?;
    write("report.md", &report.table())
}

fn run_part(
    folder: &Folder,
    size: Size,
    args: &Args,
    part: &Part,
    peer: Option<&Path>,
    deadline: Instant,
    machine: &mut Machine,
) -> PartReport {
    let started = Instant::now();
    let left = deadline.saturating_duration_since(started);
    let ended = |outcome, rows| PartReport {
        part: part.name.to_owned(),
        outcome,
        seconds: started.elapsed().as_secs_f64(),
        rows,
    };
    if left < BEGIN_MIN {
        return ended(Outcome::Skipped("no time was left".to_owned()), Vec::new());
    }
    // Few files are left for who asked: a machine may give back only so many.
    let scratch = std::env::temp_dir().join(format!("consort-device-check-{}", std::process::id()));
    let (lines, log) = (scratch.with_extension("jsonl"), scratch.with_extension("log"));
    // What another part left would be read as this one's.
    let _ = fs::remove_file(&lines);
    let outcome = match start_part(folder, size, part, &lines, &log, peer) {
        Ok(mut child) => {
            match end_of(&mut child, left.min(Duration::from_secs(part.limit.min(args.part_limit)))) {
                Some(status) if status.success() => Outcome::Done,
                Some(status) => Outcome::Failed(format!("{status}: {}", last_words(&log))),
                None => Outcome::TimedOut(format!("after {:.0} s", started.elapsed().as_secs_f64())),
            }
        }
        Err(error) => Outcome::Failed(format!("{error:#}")),
    };
    let mut rows: Vec<Row> = Vec::new();
    for line in fs::read_to_string(&lines).unwrap_or_default().lines() {
        match serde_json::from_str(line) {
            Ok(Line::Row(row)) => rows.push(row),
            Ok(Line::Machine(found)) => machine.learn(found),
            // As the last line of a process that was killed may be.
            Err(error) => rows.push(Row::without("a row that cannot be read", error.to_string())),
        }
    }
    keep_log(&args.out, part.name, &log);
    let _ = (fs::remove_file(&lines), fs::remove_file(&log));
    ended(outcome, rows)
}

/// Appends what a part printed to what all printed. Where that cannot be written, the report cannot either and says so.
fn keep_log(out: &Path, part: &str, log: &Path) {
    let said = fs::read(log).unwrap_or_default();
    let all = OpenOptions::new().create(true).append(true).open(out.join("parts.log"));
    let _ = all.and_then(|mut all| {
        writeln!(all, "== {part}")?;
        all.write_all(&said)
    });
}

fn start_part(
    folder: &Folder,
    size: Size,
    part: &Part,
    lines: &Path,
    log: &Path,
    peer: Option<&Path>,
) -> Result<Child> {
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut command = Command::new(program);
    command.arg("--folder").arg(folder.path());
    command
        .arg("--size")
        .arg(size.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned()));
    command.args(["part", part.name]).arg("--report").arg(lines);
    // Streams that wait for each other must not share a queue of the card: it has eight unless asked for more.
    command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    if let Some(socket) = peer {
        command.arg("--peer").arg(socket);
    }
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
    command.spawn().with_context(|| format!("cannot start part {}", part.name))
}

/// How a process ended; `None` where it had to be killed.
fn end_of(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let status = wait(child, limit);
    if status.is_none() {
        kill(child);
    }
    status
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if started.elapsed() >= limit {
            return None;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Kills a process and those that it started, and does not wait for ever.
fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended meanwhile.
        let _ = kill_process_group(group, Signal::KILL);
    }
    wait(child, END_LIMIT);
}

/// What a part said last, from its error on, which is why it failed.
fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let said: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from =
        said.iter().rposition(|line| line.starts_with("error:")).unwrap_or(said.len().saturating_sub(1));
    match &said[from..] {
        [] => "it said nothing".to_owned(),
        words => words.join(" "),
    }
}

/// The peer, from its start to its end.
struct PeerProcess {
    child: Option<Child>,
    socket: PathBuf,
    log: PathBuf,
    started: Instant,
    why_not: String,
}

impl PeerProcess {
    fn start(folder: &Folder, args: &Args) -> PeerProcess {
        // A socket's path may have 107 bytes: not every folder of reports is so short.
        let socket = std::env::temp_dir().join(format!("consort-device-check-{}.peer", std::process::id()));
        let log = args.out.join("peer.log");
        let mut peer = PeerProcess {
            child: None,
            socket,
            log,
            started: Instant::now(),
            why_not: "not asked for".to_owned(),
        };
        if args.no_peer {
            return peer;
        }
        // What a process of this number left behind would be taken for a peer that listens.
        for left in [peer.socket.clone(), peer.socket.with_extension("peer.new")] {
            let _ = fs::remove_file(left);
        }
        let begun = File::create(&peer.log).and_then(|log| {
            let mut command = Command::new(&args.python);
            command.arg(folder.peer()).arg(&peer.socket).env("PYTHONUNBUFFERED", "1");
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
            command.spawn()
        });
        match begun {
            Ok(child) => peer.child = Some(child),
            Err(error) => peer.why_not = format!("cannot start {}: {error}", args.python.display()),
        }
        peer
    }

    /// Waits until it listens, has ended, or is too slow.
    fn wait_until_ready(&mut self, deadline: Instant) {
        while self.child.is_some() && !self.socket.exists() {
            let late = self.started.elapsed() > PEER_LIMIT || Instant::now() >= deadline;
            let ended = matches!(self.child.as_mut().map(Child::try_wait), Some(Ok(Some(_)) | Err(_)));
            if late || ended {
                self.why_not =
                    if ended { last_words(&self.log) } else { "it did not start in time".to_owned() };
                self.end();
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Where it listens, if it does already.
    fn socket(&self) -> Option<&Path> {
        self.child.as_ref()?;
        self.socket.exists().then_some(self.socket.as_path())
    }

    fn state(&self) -> String {
        match self.socket() {
            Some(_) => self.greeting(),
            None if self.child.is_some() => "starting".to_owned(),
            None => format!("none: {}", self.why_not),
        }
    }

    /// What it says when it listens; later lines are about cases.
    fn greeting(&self) -> String {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        said.lines().find(|line| line.starts_with("PyTorch")).unwrap_or("it does not say").to_owned()
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            kill(&mut child);
        }
        let _ = fs::remove_file(&self.socket);
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.end();
    }
}
