//! Values spelled as Python spells them, because templates are written against Python's Jinja: `tojson` as
//! `json.dumps` does, `{{ value }}` as `str` does.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, Output, State, Value as Jinja,
    value::{Kwargs, ValueKind},
};
use serde_json::Value as Json;

use super::OUTPUT_BYTES_MAX;

/// serde_json refuses deeper documents, and values built by a template itself need no more.
const DEPTH_MAX: usize = 128;
/// Bytes that minijinja makes a template pay one step of its budget for.
const BYTES_PER_FUEL: usize = 64;

/// A JSON value for templates.
pub(super) fn from_json(value: &Json) -> Jinja {
    match value {
        Json::Null => Jinja::from(()),
        Json::Bool(value) => Jinja::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), _, _) => Jinja::from(integer),
            (_, Some(integer), _) => Jinja::from(integer),
            (_, _, float) => Jinja::from(float),
        },
        Json::String(text) => Jinja::from(text.as_str()),
        Json::Array(items) => Jinja::from(items.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(fields) => {
            Jinja::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), from_json(value))))
        }
    }
}

/// `{{ value }}`.
pub(super) fn write(out: &mut Output<'_>, _state: &mut State<'_, '_>, value: &Jinja) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None if value.is_undefined() => {}
        None => {
            let mut writer = Writer::new(Notation::Python);
            writer.value(value, 0)?;
            out.write_str(&writer.out)?;
        }
    }
    Ok(())
}

/// The filter `tojson`, with the arguments that `transformers` gives it.
pub(super) fn tojson(state: &State<'_, '_>, value: &Jinja, kwargs: Kwargs) -> Result<Jinja, Error> {
    let mut writer = Writer::new(Notation::Json);
    if let Some(indent) = kwargs.get::<Option<usize>>("indent")? {
        writer.indent = Some(indent.min(16));
        writer.item_separator = ",".to_owned();
    }
    if let Some(separators) = kwargs.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "separators must be a pair of strings"))?;
        (writer.item_separator, writer.key_separator) = (item, key);
    }
    writer.ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    writer.sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    writer.value(value, 0)?;
    state.consume_fuel((writer.out.len() / BYTES_PER_FUEL) as u64)?;
    Ok(Jinja::from(writer.out))
}

#[derive(Clone, Copy, PartialEq)]
enum Notation {
    /// `{"a": [1.0, null, true]}`
    Json,
    /// `{'a': [1.0, None, True]}`
    Python,
}

struct Writer {
    out: String,
    notation: Notation,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    ascii: bool,
    sort_keys: bool,
}

impl Writer {
    fn new(notation: Notation) -> Writer {
        Writer {
            out: String::new(),
            notation,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ascii: false,
            sort_keys: false,
        }
    }

    fn value(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            let reason = format!("value is nested deeper than {DEPTH_MAX} levels");
            return Err(Error::new(ErrorKind::BadSerialization, reason));
        }
        // A value can hold another many times over, so its text can be far larger than itself.
        if self.out.len() > OUTPUT_BYTES_MAX {
            return Err(Error::new(ErrorKind::OutOfFuel, "the text of a value is too long"));
        }
        let json = self.notation == Notation::Json;
        match value.kind() {
            ValueKind::Undefined if json => {
                return Err(Error::new(ErrorKind::BadSerialization, "an undefined value is not JSON"));
            }
            ValueKind::Undefined => self.out.push_str("Undefined"),
            ValueKind::None => self.out.push_str(if json { "null" } else { "None" }),
            ValueKind::Bool => self.out.push_str(match (value.is_true(), json) {
                (true, true) => "true",
                (true, false) => "True",
                (false, true) => "false",
                (false, false) => "False",
            }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.sequence(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            _ if json => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("a {} is not JSON", value.kind()),
                ));
            }
            _ => {
                let _ = write!(self.out, "{value}");
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Jinja) {
        let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
        match float {
            Some(float) => self.out.push_str(&float_text(float, self.notation)),
            None => {
                let _ = write!(self.out, "{value}");
            }
        }
    }

    fn sequence(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        let mut empty = true;
        self.out.push('[');
        for item in value.try_iter()? {
            self.begin_item(empty, depth);
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.end_container(empty, depth, ']');
        Ok(())
    }

    fn map(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Jinja> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        self.out.push('{');
        for (at, key) in keys.iter().enumerate() {
            self.begin_item(at == 0, depth);
            match key.as_str() {
                None if self.notation == Notation::Json => {
                    self.out.push('"');
                    self.value(key, depth + 1)?;
                    self.out.push('"');
                }
                None => self.value(key, depth + 1)?,
                Some(text) => self.string(text),
            }
            self.out.push_str(&self.key_separator);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.end_container(keys.is_empty(), depth, '}');
        Ok(())
    }

    fn begin_item(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.item_separator);
        }
        self.line_break(depth + 1);
    }

    fn end_container(&mut self, empty: bool, depth: usize, close: char) {
        if !empty {
            self.line_break(depth);
        }
        self.out.push(close);
    }

    fn line_break(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        let json = self.notation == Notation::Json;
        // Python's repr prefers single quotes, and double ones where that saves escapes.
        let quote = if json || (text.contains('\'') && !text.contains('"')) { '"' } else { '\'' };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' if json => self.out.push_str("\\b"),
                '\u{c}' if json => self.out.push_str("\\f"),
                _ if c == quote => self.out.extend(['\\', c]),
                _ if !json && (c < ' ' || c == '\u{7f}') => {
                    let _ = write!(self.out, "\\x{:02x}", u32::from(c));
                }
                _ if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                _ => self.out.push(c),
            }
        }
        self.out.push(quote);
    }
}

/// A float as Python's `repr` writes it: shortest digits, an exponent of two digits below 1e-4 and from 1e16.
fn float_text(value: f64, notation: Notation) -> String {
    if !value.is_finite() {
        let infinity = if notation == Notation::Json { "Infinity" } else { "inf" };
        let nan = if notation == Notation::Json { "NaN" } else { "nan" };
        let sign = if value < 0.0 { "-" } else { "" };
        return if value.is_nan() { nan.to_owned() } else { format!("{sign}{infinity}") };
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = format!("{value}");
    if text.contains('.') { text } else { format!("{text}.0") }
}
