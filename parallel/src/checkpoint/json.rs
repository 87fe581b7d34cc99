//! JSON files of a checkpoint folder: read within a bound, and looked up with errors that name the key.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::CheckpointError;

/// Largest configuration that is read, in bytes: some list the labels of a classifier, and real ones still stay far
/// below. It bounds what the tree of values takes in memory.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Reads a configuration, a file that must hold a JSON object. Of a key that is there twice the last one counts, as
/// in Python.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let bytes = read_bytes(path, CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|source| CheckpointError::Json { path: path.to_owned(), source })
}

/// Reads a regular file of at most `bytes_max` bytes.
pub(super) fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
    let io = |source| CheckpointError::Io { action: "read", path: path.to_owned(), source };
    let refuse = |problem: String| Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return refuse("it is not a regular file".to_owned());
    }
    if metadata.len() > bytes_max {
        return refuse(format!("{} bytes of JSON exceed the limit of {bytes_max}", metadata.len()));
    }
    std::fs::read(path).map_err(io)
}

/// An object of a JSON file. `null` counts as absent, as `transformers` writes it for an unset key.
pub(super) struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The file's outermost object.
    pub(super) fn new(path: &'a Path, object: &'a Map<String, Value>) -> Self {
        Self { path, prefix: String::new(), object }
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there and says that it is unset.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(Value::is_null)
    }

    /// Whether no key is there.
    pub(super) fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    /// An object under a key.
    pub(super) fn child(&self, key: &str) -> Result<Option<Fields<'a>>, CheckpointError> {
        let object = self.typed(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields { path: self.path, prefix: format!("{}{key}.", self.prefix), object }))
    }

    /// A size or count.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        self.typed(key, "a non-negative integer", |value| value.as_u64()?.try_into().ok())
    }

    /// A size or count without which there is no model.
    pub(super) fn required_size(&self, key: &str) -> Result<usize, CheckpointError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number, with or without a fraction.
    pub(super) fn float(&self, key: &str) -> Result<Option<f32>, CheckpointError> {
        self.typed(key, "a finite number", |value| {
            let value = value.as_f64()? as f32;
            value.is_finite().then_some(value)
        })
    }

    /// A number without which there is no model.
    pub(super) fn required_float(&self, key: &str) -> Result<f32, CheckpointError> {
        self.float(key)?.ok_or_else(|| self.missing(key))
    }

    /// A truth value.
    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A token id.
    pub(super) fn token(&self, key: &str) -> Result<Option<u32>, CheckpointError> {
        self.typed(key, "a token id", token)
    }

    /// Token ids: one, or a list of them.
    pub(super) fn tokens(&self, key: &str) -> Result<Vec<u32>, CheckpointError> {
        let tokens = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(values) => values.iter().map(token).collect(),
            one => token(one).map(|token| vec![token]),
        })?;
        Ok(tokens.unwrap_or_default())
    }

    /// The error of a key whose value is of the right type and yet impossible.
    pub(super) fn bad(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Key {
            path: self.path.to_owned(),
            key: format!("{}{key}", self.prefix),
            problem: problem.into(),
        }
    }

    fn missing(&self, key: &str) -> CheckpointError {
        self.bad(key, "is missing")
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(self.bad(key, format!("must be {expected}, but is {}", shortened(value)))),
        }
    }
}

fn token(value: &Value) -> Option<u32> {
    value.as_u64()?.try_into().ok()
}

/// A value as it stands in a message: a damaged file must not fill the log.
fn shortened(value: &Value) -> String {
    const CHARS_MAX: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
