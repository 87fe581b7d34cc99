//! Whole models on the card against the CPU: logits of a fixed prompt, greedy tokens decoded by graphs, the same with
//! steps enqueued behind each other, and a sequence's tokens in company. Tiny models also run over three ranks on the
//! one card.
//!
//! Three ranks on one card share its one context: each has streams of its own, reads the others' memory by address, and
//! waits for them in its kernels. All of a sum's blocks must run at once, which they do where a model is tiny: three
//! times 64 blocks at most, of which a multiprocessor holds several.

pub(super) mod compare;
pub(super) mod ranks;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use consort_kernels::{
    DType,
    cuda::{device::CudaDevice, settings::Settings},
    device::Device,
};
use consort_parallel::checkpoint::Checkpoint;

use self::{
    compare::{Differences, margin, worst},
    ranks::{Plan, on_ranks},
};
use crate::{
    figures::{Compared, Figure, Goal, Row},
    session::{Noise, Session},
};

/// Ranks on the one card.
pub(super) const WIDTH: usize = 3;
/// Models of more parameters run alone only: blocks that wait for others must not fill the card.
pub(super) const TINY_PARAMETERS_MAX: u64 = 4_000_000;
/// Tokens of the fixed prompt, and of what follows it. So long a prompt is multiplied by the library at once.
const PROMPT: usize = 80;
const ANSWER: usize = 32;
/// The same where the check itself is checked.
const PROMPT_SMALL: usize = 20;
const ANSWER_SMALL: usize = 5;
/// Sequences that keep one company, itself included, and its place among them.
const COMPANY: usize = 8;
const PLACE: usize = 3;
/// Threads of the CPU's model at most.
const THREADS_MAX: usize = 8;

/// Longest wait for a device after a failure: one that is still at work then will not answer what comes next either.
const IDLE_LIMIT: Duration = Duration::from_secs(2);

/// As in the product's own tests: how much farther from exact logits than the CPU's those of the card may be.
const RMS_FACTOR: f64 = 1.5;
const LARGEST_FACTOR: f64 = 2.0;

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let folder = session.folder.models();
    let models = models(&folder)?;
    if models.is_empty() {
        return session.row(Row::without("models", format!("there are none in {}", folder.display())));
    }
    let devices = devices(session)?;
    for path in models {
        let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        match Case::new(session, &path) {
            Ok(case) => one_model(session, &devices, &name, &case)?,
            Err(error) => report(session, &devices, &name, Err(error))?,
        }
    }
    Ok(())
}

/// Folders with a checkpoint, and GGUF files, in the folder or one below it, by name.
pub(super) fn models(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    let mut found = Vec::new();
    if !folder.is_dir() {
        return Ok(found);
    }
    for path in entries(folder)? {
        if path.join("config.json").is_file() || is_gguf(&path) {
            found.push(path);
        } else if path.is_dir() {
            found.extend(entries(&path)?.into_iter().filter(|path| is_gguf(path)));
        }
    }
    Ok(found)
}

/// The session's device, and the same card opened twice more.
pub(super) fn devices(session: &Session) -> Result<Vec<Device>> {
    let mut devices = vec![Device::Cuda(session.device.clone())];
    let selector = format!("cuda:{}", session.device.facts().ordinal).parse()?;
    while devices.len() < WIDTH {
        devices.push(Device::Cuda(CudaDevice::open(&selector, &Settings::of_process())?));
    }
    Ok(devices)
}

/// One model, and what the CPU says of it.
struct Case {
    checkpoint: Arc<Checkpoint>,
    cpu: Device,
    prompt: Vec<u32>,
    /// Logits in single precision.
    exact: Vec<Vec<f32>>,
    /// How far those in bfloat16 are from them.
    of_cpu: Differences,
    /// Tokens after the prompt.
    count: usize,
}

fn one_model(session: &mut Session, devices: &[Device], name: &str, case: &Case) -> Result<()> {
    let tiny = case.checkpoint.parameter_count() <= TINY_PARAMETERS_MAX;
    for width in [1].into_iter().chain(tiny.then_some(WIDTH)) {
        let (ranks, title) = (&devices[..width], format!("{name}, width {width}"));
        report(session, devices, &title, case.against_the_cpu(ranks, &title))?;
        report(session, devices, &title, case.in_company(ranks, &title))?;
    }
    Ok(())
}

/// Adds what was found, or a row that fails the check. Ends the part only where a device is in doubt.
fn report(session: &mut Session, devices: &[Device], title: &str, found: Result<Vec<Row>>) -> Result<()> {
    match found {
        Ok(rows) => rows.into_iter().try_for_each(|row| session.row(row)),
        Err(error) => {
            let reason = format!("{error:#}");
            session.row(Row::without(title, reason).goal(Goal::required(0.0, "an answer")))?;
            devices.iter().try_for_each(|device| match device {
                Device::Cuda(device) => Ok(device.synchronize("end the work of what failed", IDLE_LIMIT)?),
                _ => Ok(()),
            })
        }
    }
}

impl Case {
    fn new(session: &Session, path: &Path) -> Result<Case> {
        let checkpoint = Checkpoint::open(path)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let prompt = random_tokens(1, session.pick(PROMPT, PROMPT_SMALL), checkpoint.config().vocab_size);
        let mut case = Case {
            cpu: Device::cpu(threads)?,
            checkpoint,
            prompt,
            exact: Vec::new(),
            of_cpu: Differences::default(),
            count: session.pick(ANSWER, ANSWER_SMALL),
        };
        case.exact = case.on_cpu(DType::F32, &case.prompt)?;
        case.of_cpu = Differences::between(&case.on_cpu(DType::BF16, &case.prompt)?, &case.exact);
        Ok(case)
    }

    fn on_cpu(&self, dtype: DType, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        let devices = [self.cpu.clone()];
        let plan = Plan { dtype, ..self.plan(&devices, true, 1) };
        on_ranks(&plan, |rank| rank.teacher_forced(tokens, tokens.len())).context("on the CPU")
    }

    fn plan<'a>(&'a self, devices: &'a [Device], deterministic: bool, sequences: usize) -> Plan<'a> {
        let context = self.prompt.len() + self.count;
        Plan {
            checkpoint: &self.checkpoint,
            devices,
            dtype: DType::BF16,
            deterministic,
            separate_processes: false,
            sequences,
            context,
            step_tokens: sequences * context,
        }
    }

    /// Logits of the prompt, at once and token by token, and the tokens that follow, with and without overlap.
    fn against_the_cpu(&self, devices: &[Device], title: &str) -> Result<Vec<Row>> {
        let (at_once, by_token, spoken, behind) = on_ranks(&self.plan(devices, false, 1), |rank| {
            let at_once = rank.teacher_forced(&self.prompt, self.prompt.len())?;
            let by_token = rank.teacher_forced(&self.prompt, 1)?;
            let spoken = rank.greedy(std::slice::from_ref(&self.prompt), self.count, false)?.swap_remove(0);
            // The first token is the prefill's.
            let position = |step: usize| self.prompt.len() + step;
            let behind = rank.overlapped(&spoken.tokens[..1], position, self.count - 1)?.concat();
            Ok((at_once, by_token, spoken, behind))
        })?;
        let found = [at_once, by_token].map(|logits| Differences::between(&logits, &self.exact));
        let parts = found.map(|found| {
            let (rms, largest) = (found.rms() / self.of_cpu.rms(), found.largest / self.of_cpu.largest);
            worst([rms / RMS_FACTOR, largest / LARGEST_FACTOR])
        });
        let told = |what: &str, of: &Differences| {
            format!("{what}: RMS {:.2e}, largest {:.2e}", of.rms(), of.largest)
        };
        let note =
            [told("prefill", &found[0]), told("decode", &found[1]), told("CPU", &self.of_cpu)].join("; ");
        let tolerance =
            format!("{RMS_FACTOR} x RMS, {LARGEST_FACTOR} x largest of the CPU's BF16, all from F32");
        let logits = Row::new(format!("{title}: logits"), Figure::cost(worst(parts), "of tolerance"))
            .goal(Goal::required(1.0, tolerance))
            .note(note);
        let compared = Compared::between(&spoken.tokens[1..], &behind);
        let case = format!("{title}: tokens of steps enqueued behind each other");
        let behind = compared.row(case, "different", "those of steps one after another");
        let behind = behind.note(format!("of {}", compared.pairs));
        Ok(vec![logits, self.judge(&spoken.tokens, title)?, behind])
    }

    /// Every token against the CPU's logits after the same tokens. Where it is not the CPU's likeliest, the CPU must
    /// find it as likely, within the difference that logits may have.
    fn judge(&self, tokens: &[u32], title: &str) -> Result<Row> {
        let mut fed = self.prompt.clone();
        fed.extend(tokens);
        // The last token is nobody's input.
        fed.pop();
        let logits = self.on_cpu(DType::BF16, &fed)?;
        let margins: Vec<f64> = tokens
            .iter()
            .zip(&logits[self.prompt.len() - 1..])
            .map(|(token, logits)| margin(logits, *token))
            .collect();
        let same = margins.iter().filter(|margin| **margin == 0.0).count();
        let tolerance = LARGEST_FACTOR * self.of_cpu.largest;
        let figure = Figure::cost(worst(margins.iter().copied()) / tolerance, "of tolerance");
        Ok(Row::new(format!("{title}: greedy tokens"), figure)
            .goal(Goal::required(1.0, "the CPU's margin where a token differs"))
            .note(format!("{same} of {} are the CPU's likeliest", tokens.len())))
    }

    /// A sequence alone and among others, where that may not matter.
    fn in_company(&self, devices: &[Device], title: &str) -> Result<Vec<Row>> {
        let vocabulary = self.checkpoint.config().vocab_size;
        let len = |at: usize| (self.prompt.len() * (COMPANY - at)).div_ceil(COMPANY);
        let prompts: Vec<Vec<u32>> =
            (0..COMPANY).map(|at| random_tokens(10 + at as u64, len(at), vocabulary)).collect();
        let (alone, among) = on_ranks(&self.plan(devices, true, COMPANY), |rank| {
            let alone = rank.greedy(&prompts[PLACE..=PLACE], self.count, true)?.swap_remove(0);
            Ok((alone, rank.greedy(&prompts, self.count, true)?.swap_remove(PLACE)))
        })?;
        let tokens = alone.tokens.iter().zip(&among.tokens).filter(|(alone, among)| alone != among).count();
        let bits = |logits: &[Vec<f32>]| logits.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (of_alone, of_among) = (bits(&alone.logits), bits(&among.logits));
        let differing = of_alone.iter().zip(&of_among).filter(|(alone, among)| alone != among).count();
        let figure = Figure::cost(differing as f64, "logits that differ");
        let row = Row::new(format!("{title}: alone and among {COMPANY}, batch-invariant"), figure)
            .goal(Goal::required(0.0, "the same bits"))
            .note(format!("{tokens} of {} tokens differ, of {} logits", self.count, of_alone.len()));
        Ok(vec![row])
    }
}

pub(super) fn random_tokens(seed: u64, count: usize, vocabulary: usize) -> Vec<u32> {
    let mut noise = Noise::new(seed);
    (0..count).map(|_| (noise.next_u64() % vocabulary as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_folders_with_a_configuration_and_gguf_files_there_or_one_below() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for name in ["tiny", "cut", "nothing"] {
            fs::create_dir(at(name)).unwrap();
        }
        for name in
            ["tiny/config.json", "cut/smollm2.gguf", "cut/readme.md", "zero.gguf", "nothing/a.txt", "b.md"]
        {
            fs::write(at(name), "").unwrap();
        }
        assert_eq!(models(folder.path()).unwrap(), [at("cut/smollm2.gguf"), at("tiny"), at("zero.gguf")]);
        assert!(models(&at("absent")).unwrap().is_empty());
    }
}
