//! Strict TOML: every unknown key and wrong type of a file, not only the first.

use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    path::Path,
};

use toml::{
    Spanned,
    de::{DeString, DeTable, DeValue},
};

use super::{
    error::{TopologyError, Violations},
    excerpt::shown,
    raw::{Origin, RawNode, RawTopology, Slot},
    schema, suggest, value,
};

/// No topology is larger; a wrong path (a model file) should not be read into memory.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Violations of TOML's own rules that are told: behind the first few, the parser has lost its way.
const SYNTAX_ERRORS_MAX: usize = 5;
const DUPLICATE: &str = "duplicate key";

pub(super) fn read(path: &Path) -> Result<String, TopologyError> {
    let fail = |source| TopologyError::Read { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(fail)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(fail)?;
    let remedy = if bytes.starts_with(b"GGUF") {
        "it is a model in GGUF format: give it a name that ends in .gguf and serve it as it is"
    } else {
        "give a topology file (TOML)"
    };
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TopologyError::TooLarge { path: path.to_path_buf(), limit_bytes: FILE_BYTES_MAX });
    }
    // A byte that is no character's, or one that no text has: the first of either.
    let text_end = match std::str::from_utf8(&bytes) {
        Ok(text) => text.find('\0'),
        Err(error) => Some(
            bytes[..error.valid_up_to()].iter().position(|byte| *byte == 0).unwrap_or(error.valid_up_to()),
        ),
    };
    let Some(end) = text_end else {
        return String::from_utf8(bytes).map_err(|error| fail(io::Error::other(error)));
    };
    let before = String::from_utf8_lossy(&bytes[..end]);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    Err(TopologyError::NotText { path: path.to_path_buf(), line, column, remedy })
}

/// Parses a file. `None` where it is not TOML at all: rules about values would only add noise then.
pub(super) fn parse(text: &str, violations: &mut Violations) -> Option<RawTopology> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let document = document.get_ref();
    let mut syntax_errors = 0;
    for error in &errors {
        let span = error.span().unwrap_or(0..0);
        if error.message() == DUPLICATE {
            duplicate(document, span, violations);
            continue;
        }
        syntax_errors += 1;
        if syntax_errors <= SYNTAX_ERRORS_MAX {
            let problem = shown(error.message().trim());
            violations.add("TOML", &Origin::File(span), problem, "correct the TOML syntax");
        }
    }
    if syntax_errors > 0 {
        violations.set_unread();
        return None;
    }
    let mut raw = RawTopology::default();
    for (name, value) in document {
        match schema::TABLES.iter().find(|table| **table == name.get_ref()) {
            Some(&table) => read_table(table, name, value, &mut raw, violations),
            None => unknown_table(name, value, violations),
        }
    }
    Some(raw)
}

/// Both places of a key that is there twice.
fn duplicate(document: &DeTable<'_>, span: Range<usize>, violations: &mut Violations) {
    if violations.is_full() {
        return;
    }
    let name = shown(violations.text_at(span.clone()).trim_matches(['"', '\'']));
    let mut first = None;
    earlier(document, &name, span.start, &mut first);
    // Of a table that is there twice, the document has the later name only.
    let header = format!("[{name}]");
    let first = first.or_else(|| {
        let at = violations.text_at(0..span.start.saturating_sub(1)).rfind(&header)?;
        Some(at + 1..at + 1 + name.len())
    });
    let (problem, remedy) = (format!("`{name}` is given twice"), "keep one of the two".to_owned());
    let origin = Origin::File(span);
    match first {
        Some(first) => {
            let note = (&Origin::File(first), "the first one is here".to_owned());
            violations.add_clash((&name, &origin), problem, remedy, note);
        }
        None => violations.add(&name, &origin, problem, remedy),
    }
}

/// The last key of that name before a place.
fn earlier(table: &DeTable<'_>, name: &str, before: usize, found: &mut Option<Range<usize>>) {
    for (key, value) in table {
        let span = key.span();
        let is_later = found.as_ref().is_none_or(|found| found.start < span.start);
        if key.get_ref() == name && span.start < before && is_later {
            *found = Some(span);
        }
        match value.get_ref() {
            DeValue::Table(inner) => earlier(inner, name, before, found),
            DeValue::Array(items) => {
                for item in items.iter() {
                    if let DeValue::Table(inner) = item.get_ref() {
                        earlier(inner, name, before, found);
                    }
                }
            }
            _ => {}
        }
    }
}

type Name<'a> = Spanned<DeString<'a>>;

fn unknown_table(name: &Name<'_>, value: &Spanned<DeValue<'_>>, violations: &mut Violations) {
    if violations.is_full() {
        return;
    }
    let given = name.get_ref();
    let (remedy, meant) = suggest::for_table(given);
    let is_table = match value.get_ref() {
        DeValue::Table(_) => true,
        DeValue::Array(items) => items.iter().any(|item| matches!(item.get_ref(), DeValue::Table(_))),
        _ => false,
    };
    let problem = if is_table {
        format!("unknown table [{}]", shown(given))
    } else {
        format!("unknown key `{}` outside of the tables", shown(given))
    };
    violations.add(shown(given), &Origin::File(name.span()), problem, remedy);
    meant.into_iter().for_each(|meant| violations.was_meant(meant));
}

fn read_table(
    table: &'static str,
    name: &Name<'_>,
    value: &Spanned<DeValue<'_>>,
    raw: &mut RawTopology,
    violations: &mut Violations,
) {
    // The span of a table given by its header is that of the header.
    let origin = Origin::File(name.span());
    match value.get_ref() {
        DeValue::Table(_) if table == "node" => {
            violations.add(table, &origin, "[node] is one table where a list is expected", "write [[node]]");
        }
        DeValue::Table(keys) => read_keys(table, table, keys, violations, |key, value, violations| {
            let dotted = format!("{table}.{key}");
            raw.slot(&dotted).is_some_and(|slot| fill(slot, &dotted, value, violations))
        }),
        DeValue::Array(nodes) if table == "node" => {
            for (at, node) in nodes.iter().enumerate() {
                if violations.is_full() {
                    return;
                }
                read_node(at, node, raw, violations);
            }
        }
        DeValue::Array(items) if matches!(items.first().map(Spanned::get_ref), Some(DeValue::Table(_))) => {
            let problem = format!("[[{table}]] is a list where one table is expected");
            violations.add(table, &origin, problem, format!("write [{table}], once"));
        }
        other => {
            let problem = format!("{} where a table is expected", value::found(other));
            let remedy =
                format!("write {} on a line of its own, and the keys below it", schema::header(table));
            violations.add(table, &Origin::File(value.span()), problem, remedy);
        }
    }
}

fn read_node(at: usize, node: &Spanned<DeValue<'_>>, raw: &mut RawTopology, violations: &mut Violations) {
    let path = format!("node[{at}]");
    let mut read = RawNode::default();
    match node.get_ref() {
        DeValue::Table(keys) => read_keys("node", &path, keys, violations, |key, value, violations| {
            let dotted = format!("{path}.{key}");
            read.slot(key).is_some_and(|slot| fill(slot, &dotted, value, violations))
        }),
        other => {
            let problem = format!("{} where a table is expected", value::found(other));
            violations.add(
                &path,
                &Origin::File(node.span()),
                problem,
                "write [[node]], and its devices below it",
            );
        }
    }
    raw.node.push(read);
}

fn fill(slot: Slot<'_>, key: &str, value: &Spanned<DeValue<'_>>, violations: &mut Violations) -> bool {
    value::of_file(slot, key, value, violations);
    true
}

/// Reads each key that a file may have here, and tells of the others.
fn read_keys(
    table: &'static str,
    path: &str,
    keys: &DeTable<'_>,
    violations: &mut Violations,
    mut read: impl FnMut(&str, &Spanned<DeValue<'_>>, &mut Violations) -> bool,
) {
    for (name, value) in keys {
        let given: &str = name.get_ref();
        if schema::keys_of(table).any(|key| key == given) && read(given, value, violations) {
            continue;
        }
        if violations.is_full() {
            return;
        }
        let (remedy, meant) = suggest::for_key(given, table);
        let given = shown(given);
        let problem = format!("unknown key `{given}`");
        violations.add(format!("{path}.{given}"), &Origin::File(name.span()), problem, remedy);
        let meant = meant.map(|meant| match meant.strip_prefix("node.") {
            Some(rest) => format!("{path}.{rest}"),
            None => meant,
        });
        meant.into_iter().for_each(|meant| violations.was_meant(meant));
    }
}
