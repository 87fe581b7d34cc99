//! Strict TOML: every unknown key and wrong type of a file, not only the first.

use std::{fs::File, io::Read, ops::Range, path::Path};

use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

use super::{
    error::{TopologyError, Violations},
    raw::{Origin, RawTopology},
};

/// No topology is larger; a wrong path (a model file) should not be read into memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

pub(super) fn read(path: &Path) -> Result<String, TopologyError> {
    let fail = |source| TopologyError::Read { path: path.to_path_buf(), source };
    let mut text = String::new();
    File::open(path).map_err(fail)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(fail)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(TopologyError::TooLarge { path: path.to_path_buf(), limit_bytes: FILE_BYTES_MAX });
    }
    Ok(text)
}

/// Parses a file. `None` where it is not TOML at all, or not a table of tables: rules about values would only
/// add noise then.
pub(super) fn parse(text: &str, violations: &mut Violations) -> Option<RawTopology> {
    let (mut document, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        violations.add("TOML", &origin(error.span()), error.message().trim(), "correct the TOML syntax");
    }
    if !errors.is_empty() {
        return None;
    }
    // serde stops at the first mismatch: take the offending entry out, and look again. Each round removes one
    // entry.
    loop {
        let error = match RawTopology::deserialize(toml::Deserializer::from(document.clone())) {
            Ok(raw) => return Some(raw),
            Err(error) => error,
        };
        let span = error.span();
        let removed = span.as_ref().and_then(|span| remove(document.get_mut(), span));
        let key = removed.as_deref().unwrap_or("topology");
        violations.add(key, &origin(span), error.message().trim(), remedy(error.message()));
        removed?;
    }
}

fn origin(span: Option<Range<usize>>) -> Origin {
    Origin::File(span.unwrap_or(0..0))
}

fn remedy(message: &str) -> &'static str {
    if message.starts_with("unknown field") {
        "remove the key, or correct its spelling"
    } else {
        "give a value of the expected type"
    }
}

/// Removes the innermost entry around `span`, and returns its dotted key.
fn remove(table: &mut DeTable<'_>, span: &Range<usize>) -> Option<String> {
    let around = |other: Range<usize>| other.start <= span.start && span.end <= other.end;
    let (key, on_key) = table.iter().find_map(|(key, value)| {
        let on_key = key.span() == *span;
        (on_key || around(value.span()) || holds(value.get_ref(), span)).then(|| (key.clone(), on_key))
    })?;
    let name = key.get_ref().to_string();
    let inner = if on_key { None } else { table.get_mut(&key).and_then(|value| remove_inside(value, span)) };
    match inner {
        Some(inner) => Some(format!("{name}{inner}")),
        None => table.remove(&key).map(|_| name),
    }
}

fn remove_inside(value: &mut Spanned<DeValue<'_>>, span: &Range<usize>) -> Option<String> {
    match value.get_mut() {
        DeValue::Table(table) => remove(table, span).map(|inner| format!(".{inner}")),
        DeValue::Array(items) => items.iter_mut().enumerate().find_map(|(at, item)| match item.get_mut() {
            DeValue::Table(table) => remove(table, span).map(|inner| format!("[{at}].{inner}")),
            _ => None,
        }),
        _ => None,
    }
}

/// Whether an entry somewhere inside lies at `span`: the span of `[table]` covers its header only.
fn holds(value: &DeValue<'_>, span: &Range<usize>) -> bool {
    let at = |other: Range<usize>| other.start <= span.start && span.end <= other.end;
    let in_array =
        |items: &DeArray<'_>| items.iter().any(|item| at(item.span()) || holds(item.get_ref(), span));
    match value {
        DeValue::Table(table) => table
            .iter()
            .any(|(key, value)| key.span() == *span || at(value.span()) || holds(value.get_ref(), span)),
        DeValue::Array(items) => in_array(items),
        _ => false,
    }
}
