//! Violations of a topology's rules, each with its place.

use std::{collections::BTreeSet, fmt, io, path::PathBuf};

use super::{
    excerpt::{Place, Source, shown_path},
    raw::Origin,
};

/// Violations that are kept; of a file with more, whoever mends these sees the rest next.
const VIOLATIONS_MAX: usize = 1000;
/// Violations that the message lists.
const LISTED_MAX: usize = 50;

/// A topology could not be read, or breaks its rules.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The file could not be read.
    #[error("cannot read the topology {}: {}", shown_path(.path), read_remedy(.source))]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is no topology.
    #[error("{} is larger than {limit_bytes} bytes: is it a topology (TOML)?", shown_path(.path))]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// Most bytes that are read.
        limit_bytes: u64,
    },
    /// The file is no text.
    #[error("{}:{line}:{column}: this is not text (UTF-8); {remedy}", shown_path(.path))]
    NotText {
        /// Which.
        path: PathBuf,
        /// Line of the first byte that is none of a text's.
        line: usize,
        /// Its column, in characters.
        column: usize,
        /// What to do.
        remedy: &'static str,
    },
    /// Neither a topology nor a model was named.
    #[error("no model is given; call EngineBuilder::model, or start from Engine::from_toml")]
    NoModel,
    /// Rules are broken: all of them at once.
    #[error("{}", listed(.violations))]
    Invalid {
        /// At least one.
        violations: Vec<Violation>,
    },
}

fn read_remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "nothing is there; check the path, which starts at the current directory",
        io::ErrorKind::PermissionDenied => "let this user read it",
        io::ErrorKind::IsADirectory => {
            "it is a folder; give a topology file, or a model's folder under a \
                                        name that does not end in .toml"
        }
        _ => "give a topology file (TOML)",
    }
}

impl TopologyError {
    /// The broken rules; empty where the file could not be read.
    pub fn violations(&self) -> &[Violation] {
        match self {
            TopologyError::Invalid { violations } => violations,
            _ => &[],
        }
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    key: String,
    at: Place,
    problem: String,
    remedy: String,
    /// The other end of a contradiction, and what is there.
    other: Option<(Place, String)>,
}

impl Violation {
    pub(super) fn new(key: &str, at: Place, problem: String, remedy: String) -> Violation {
        Violation { key: key.to_owned(), at, problem, remedy, other: None }
    }

    pub(super) fn against(mut self, other: Option<(Place, String)>) -> Violation {
        self.other = other;
        self
    }

    /// Dotted key, such as `parallel.tensor_parallel_size`.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Where the value was given: `file:line:column`, an environment variable, or a flag.
    pub fn place(&self) -> &str {
        &self.at.name
    }

    /// Where the value stands that this one contradicts, if it contradicts one.
    pub fn other_place(&self) -> Option<&str> {
        self.other.as_ref().map(|(place, _)| place.name.as_str())
    }

    /// What is wrong.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// What to do.
    pub fn remedy(&self) -> &str {
        &self.remedy
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}; {}", self.at.name, self.key, self.problem, self.remedy)?;
        if let Some(excerpt) = &self.at.excerpt {
            write!(f, "\n{excerpt}")?;
        }
        let Some((place, note)) = &self.other else { return Ok(()) };
        write!(f, "\n  {}: {note}", place.name)?;
        match &place.excerpt {
            Some(excerpt) => write!(f, "\n{excerpt}"),
            None => Ok(()),
        }
    }
}

fn listed(violations: &[Violation]) -> String {
    let count = violations.len();
    let many = if count >= VIOLATIONS_MAX { "or more " } else { "" };
    let noun = if count == 1 { "problem" } else { "problems" };
    let mut text = format!("the configuration has {count} {many}{noun}:");
    for violation in &violations[..count.min(LISTED_MAX)] {
        text.push_str(&format!("\n{violation}"));
    }
    if count > LISTED_MAX {
        text.push_str(&format!("\nand {} more", count - LISTED_MAX));
    }
    text
}

/// Violations as they are found.
#[derive(Debug, Default)]
pub(super) struct Violations {
    source: Option<Source>,
    list: Vec<Violation>,
    /// Keys that were probably meant by something told already: that they are missing is no news.
    meant: BTreeSet<String>,
    /// Whether the file is no TOML, so that nobody knows what it says.
    is_unread: bool,
}

impl Violations {
    pub(super) fn of_file(name: &str, text: &str) -> Violations {
        Violations { source: Some(Source::new(name, text)), ..Violations::default() }
    }

    pub(super) fn add(
        &mut self,
        key: impl AsRef<str>,
        origin: &Origin,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        // Before the place is looked up, which takes time: a file can have a million mistakes.
        if self.is_full() {
            return;
        }
        let violation = Violation::new(key.as_ref(), self.place(origin), problem.into(), remedy.into());
        self.list.push(violation);
    }

    /// A violation by two values that cannot both be: `note` says what the other is.
    pub(super) fn add_clash(
        &mut self,
        (key, origin): (&str, &Origin),
        problem: String,
        remedy: String,
        (other, note): (&Origin, String),
    ) {
        if self.is_full() {
            return;
        }
        let violation = Violation::new(key, self.place(origin), problem, remedy);
        let other = (self.place(other), note);
        self.list.push(violation.against(Some(other)));
    }

    /// A violation of a value that is nowhere.
    pub(super) fn add_missing(&mut self, key: &str, problem: &str, remedy: &str) {
        if self.is_full() || self.is_unread {
            return;
        }
        // A value of the wrong type was left out, and a misspelt key is told already.
        let is_told = self.list.iter().map(|violation| &violation.key).chain(&self.meant);
        if is_told.into_iter().any(|told| key.strip_prefix(told.as_str()).is_some_and(is_inside)) {
            return;
        }
        let file = self.source.as_ref().map_or("configuration", Source::name).to_owned();
        self.list.push(Violation::new(key, Place::outside(file), problem.to_owned(), remedy.to_owned()));
    }

    /// Notes that something told stands for this key or table.
    pub(super) fn was_meant(&mut self, key: String) {
        self.meant.insert(key);
    }

    /// Notes that what the file says is not known: what stands outside of it can be checked nevertheless.
    pub(super) fn set_unread(&mut self) {
        self.is_unread = true;
    }

    pub(super) fn is_unread(&self) -> bool {
        self.is_unread
    }

    /// Keys whose values are not known, or not what was meant.
    pub(super) fn doubtful(&self) -> BTreeSet<String> {
        self.list.iter().map(|violation| &violation.key).chain(&self.meant).cloned().collect()
    }

    /// Whether the file has this text anywhere.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.source.as_ref().is_some_and(|source| source.text().contains(text))
    }

    /// A part of the file.
    pub(super) fn text_at(&self, span: std::ops::Range<usize>) -> &str {
        self.source.as_ref().and_then(|source| source.text().get(span)).unwrap_or_default()
    }

    /// Whether further ones would be dropped: no reason to look for what was meant.
    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= VIOLATIONS_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// All of them, each once, in the order of the file.
    pub(super) fn into_error(self) -> TopologyError {
        invalid(self.list)
    }

    pub(super) fn place(&self, origin: &Origin) -> Place {
        match (origin, &self.source) {
            (Origin::File(span), Some(source)) => source.place(span.clone()),
            (Origin::File(_), None) => Place::outside("configuration".to_owned()),
            (Origin::Variable(name), _) => Place::outside(format!("environment variable {name}")),
            (Origin::Given(name), _) => Place::outside(name.clone()),
        }
    }
}

/// Violations as an error: each once, in the order of the file.
pub(super) fn invalid(mut violations: Vec<Violation>) -> TopologyError {
    violations.sort_by_key(|violation| violation.at.offset);
    let mut kept: Vec<Violation> = Vec::with_capacity(violations.len());
    for violation in violations {
        let same = |other: &&Violation| other.at.offset == violation.at.offset;
        if !kept.iter().rev().take_while(same).any(|other| *other == violation) {
            kept.push(violation);
        }
    }
    TopologyError::Invalid { violations: kept }
}

/// Whether the rest of a key, after the key of something else, makes it that or a part of it.
fn is_inside(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(['.', '['])
}
