//! The one place that reads the process's environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt,
};

/// Environment variables, as of one moment.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    /// Names of variables whose values are no text.
    not_unicode: BTreeSet<String>,
}

/// Names only: values may be secrets.
impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.variables.keys()).entries(&self.not_unicode).finish()
    }
}

impl Environment {
    /// The process's. A setting whose value is not Unicode is refused where it is needed.
    pub fn of_process() -> Environment {
        Environment::of(std::env::vars_os())
    }

    pub(super) fn of(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        let mut environment = Environment::default();
        for (name, value) in variables {
            // Nothing that Consort reads has a name that is no text.
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                Ok(value) => drop(environment.variables.insert(name, value)),
                Err(_) => drop(environment.not_unicode.insert(name)),
            }
        }
        environment
    }

    /// Names of variables whose values are no text.
    pub(super) fn not_unicode(&self) -> impl Iterator<Item = &str> {
        self.not_unicode.iter().map(String::as_str)
    }

    /// Whether a variable is there whose value is no text.
    pub(super) fn is_not_unicode(&self, name: &str) -> bool {
        self.not_unicode.contains(name)
    }

    /// No variables: for engines that must not depend on where they run.
    pub fn empty() -> Environment {
        Environment::default()
    }

    /// A variable's value.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// All variables, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Environment {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Environment { variables, not_unicode: BTreeSet::new() }
    }
}
