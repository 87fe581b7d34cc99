//! `cargo xtask tidy`: everything that must hold besides the tests. Cheap checks come first, and all of them run, so
//! one call shows every violation.

mod arrows;
mod pure;
mod sizes;
mod source;
mod unsafe_leaves;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use self::source::Source;
use crate::{process, workspace::Workspace};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what needs no build: arrows, sizes, `unsafe`, format.
    #[arg(long)]
    quick: bool,
}

/// What the formatter leaves alone (comments, strings, CUDA) may be this much wider than its own width: a word.
const WIDTH_SLACK: usize = 10;

/// What a check found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    errors: Vec<String>,
    warnings: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let sources = read_sources(workspace.root())?;
    let line_width_max = formatted_width(workspace.root())? + WIDTH_SLACK;
    let mut failed = Vec::new();
    let mut judge = |name: &'static str, found: Findings| {
        found.warnings.iter().for_each(|text| eprintln!("warning: {text}"));
        found.errors.iter().for_each(|text| eprintln!("error: {text}"));
        if !found.errors.is_empty() {
            failed.push(name);
        }
    };
    judge("crate arrows", arrows::check(&workspace.metadata()?)?);
    judge("sizes", sizes::check(&sources, line_width_max));
    judge("pure modules", pure::check(&sources, pure::PURE));
    judge("unsafe code", unsafe_leaves::check(&sources, unsafe_leaves::LEAVES));

    let mut ran = |name: &'static str, result: Result<()>| {
        if let Err(error) = result {
            eprintln!("error: {error:#}");
            failed.push(name);
        }
    };
    ran("format", process::run(workspace.cargo().args(["fmt", "--all", "--", "--check"])));
    if !args.quick {
        let mut clippy = workspace.cargo();
        clippy.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
        ran("clippy", process::run(&mut clippy));
        let mut doc = workspace.cargo();
        doc.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
        ran("rustdoc", process::run(&mut doc));
    }
    if !failed.is_empty() {
        bail!("not tidy: {}", failed.join(", "));
    }
    println!("tidy: {} source files", sources.len());
    Ok(())
}

/// Extensions of what people write here: Rust, CUDA, and the emulator's C++.
const EXTENSIONS: &[&str] = &["rs", "cu", "cuh", "cpp", "h", "S"];

/// Every source under the root, in path order; `target` and hidden folders are nobody's source.
fn read_sources(root: &Path) -> Result<Vec<Source>> {
    let (mut pending, mut files) = (vec![root.to_path_buf()], Vec::new());
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let hidden = name.to_string_lossy().starts_with('.');
            if entry.file_type()?.is_dir() && !hidden && name != "target" {
                pending.push(path);
            } else if path
                .extension()
                .and_then(|extension| extension.to_str())
                .is_some_and(|it| EXTENSIONS.contains(&it))
            {
                files.push(path);
            }
        }
    }
    files.sort();
    files.iter().map(|path| read_source(root, path)).collect()
}

fn read_source(root: &Path, path: &Path) -> Result<Source> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let relative: PathBuf = path.strip_prefix(root).unwrap_or(path).to_path_buf();
    Ok(Source::new(relative.to_string_lossy().replace('\\', "/"), text))
}

/// The width that the formatter keeps.
fn formatted_width(root: &Path) -> Result<usize> {
    let path = root.join("rustfmt.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("cannot parse {}", path.display()))?;
    let width = table.get("max_width").and_then(toml::Value::as_integer);
    width
        .and_then(|width| usize::try_from(width).ok())
        .with_context(|| format!("{}: no max_width", path.display()))
}
