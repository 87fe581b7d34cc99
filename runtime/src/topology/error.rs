//! Violations of a topology's rules, each with its place.

use std::{fmt, io, path::PathBuf};

use super::raw::Origin;

/// A topology could not be read, or breaks its rules.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The file could not be read.
    #[error("cannot read the topology {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is no topology.
    #[error("{} is larger than {limit_bytes} bytes: is it a topology (TOML)?", .path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// Most bytes that are read.
        limit_bytes: u64,
    },
    /// Rules are broken: all of them at once.
    #[error("{}", listed(.violations))]
    Invalid {
        /// At least one.
        violations: Vec<Violation>,
    },
}

impl TopologyError {
    /// The broken rules; empty where the file could not be read.
    pub fn violations(&self) -> &[Violation] {
        match self {
            TopologyError::Invalid { violations } => violations,
            TopologyError::Read { .. } | TopologyError::TooLarge { .. } => &[],
        }
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    key: String,
    place: String,
    problem: String,
    remedy: String,
    /// The line, and a caret under the value.
    excerpt: Option<String>,
    /// Where in the file; what stands in no file comes last.
    offset: usize,
}

impl Violation {
    /// Dotted key, such as `parallel.tensor_parallel_size`.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Where the value was given: `file:line:column`, an environment variable, or a flag.
    pub fn place(&self) -> &str {
        &self.place
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
        write!(f, "{}: {}: {}; {}", self.place, self.key, self.problem, self.remedy)?;
        match &self.excerpt {
            Some(excerpt) => write!(f, "\n{excerpt}"),
            None => Ok(()),
        }
    }
}

fn listed(violations: &[Violation]) -> String {
    let count = violations.len();
    let noun = if count == 1 { "problem" } else { "problems" };
    let list: Vec<String> = violations.iter().map(Violation::to_string).collect();
    format!("the topology has {count} {noun}:\n{}", list.join("\n"))
}

/// Violations as they are found.
#[derive(Debug, Default)]
pub(super) struct Violations {
    file: Option<File>,
    list: Vec<Violation>,
}

#[derive(Debug)]
struct File {
    name: String,
    text: String,
}

impl Violations {
    pub(super) fn of_file(name: &str, text: &str) -> Violations {
        let file = File { name: name.to_owned(), text: text.to_owned() };
        Violations { file: Some(file), list: Vec::new() }
    }

    pub(super) fn add(
        &mut self,
        key: impl Into<String>,
        origin: &Origin,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (place, excerpt) = self.locate(origin);
        let offset = if let Origin::File(span) = origin { span.start } else { usize::MAX };
        let (key, problem, remedy) = (key.into(), problem.into(), remedy.into());
        self.list.push(Violation { key, place, problem, remedy, excerpt, offset });
    }

    /// A violation of a value that is nowhere.
    pub(super) fn add_missing(&mut self, key: &str, problem: &str, remedy: &str) {
        // A value of the wrong type was taken out, which is told already.
        let is_told = |violation: &Violation| key.strip_prefix(&violation.key).is_some_and(is_inside);
        if self.list.iter().any(is_told) {
            return;
        }
        let place = self.file.as_ref().map_or("configuration", |file| &file.name).to_owned();
        let (key, problem, remedy) = (key.to_owned(), problem.to_owned(), remedy.to_owned());
        self.list.push(Violation { key, place, problem, remedy, excerpt: None, offset: usize::MAX });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// All of them, in the order of the file.
    pub(super) fn into_error(mut self) -> TopologyError {
        self.list.sort_by_key(|violation| violation.offset);
        TopologyError::Invalid { violations: self.list }
    }

    fn locate(&self, origin: &Origin) -> (String, Option<String>) {
        match (origin, &self.file) {
            (Origin::File(span), Some(file)) => {
                let start = span.start.min(file.text.len());
                let before = file.text.get(..start).unwrap_or_default();
                let line_start = before.rfind('\n').map_or(0, |at| at + 1);
                let line = file.text[line_start..].lines().next().unwrap_or_default();
                let number = before.matches('\n').count() + 1;
                let column = before[line_start..].chars().count() + 1;
                let marked =
                    file.text.get(span.clone()).unwrap_or_default().lines().next().unwrap_or_default();
                (format!("{}:{number}:{column}", file.name), Some(excerpt(line, number, column, marked)))
            }
            (Origin::File(_), None) => ("configuration".to_owned(), None),
            (Origin::Variable(name), _) => (format!("environment variable {name}"), None),
            (Origin::Given(name), _) => (name.clone(), None),
        }
    }
}

/// Whether the rest of a key, after the key of something else, makes it that or a part of it.
fn is_inside(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(['.', '['])
}

fn excerpt(line: &str, number: usize, column: usize, marked: &str) -> String {
    let gutter = " ".repeat(number.to_string().len());
    // Tabs are kept, so that the caret stands under the value however wide the terminal shows them.
    let indent: String = line.chars().take(column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
    let carets = "^".repeat(marked.chars().count().max(1));
    format!("  {number} | {line}\n  {gutter} | {indent}{carets}")
}
