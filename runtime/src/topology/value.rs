//! One value, from a file or from text, into the place of its type.

use toml::{
    Spanned,
    de::{DeFloat, DeInteger, DeValue},
};

use super::{
    error::Violations,
    excerpt::shown,
    raw::{Leaf, Origin, RawBytes, Slot, Sourced},
};

const API_KEY_ENV: &str = "server.api_key_env";

/// What a file says, for people.
pub(super) fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the text \"{}\"", shown(text)),
        DeValue::Integer(number) => format!("the whole number {}", shown(&number.to_string())),
        DeValue::Float(number) => format!("the number {}", shown(number.as_str())),
        DeValue::Boolean(truth) => truth.to_string(),
        DeValue::Datetime(moment) => format!("the moment {moment}"),
        DeValue::Array(items) if items.is_empty() => "an empty list".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// Reads a value of the file, or tells why it cannot stand there.
pub(super) fn of_file(slot: Slot<'_>, key: &str, given: &Spanned<DeValue<'_>>, violations: &mut Violations) {
    let (expected, example) = (slot.expected(), slot.example());
    let origin = Origin::File(given.span());
    let refuse =
        |value: &Spanned<DeValue<'_>>, expected: &str, remedy: String, violations: &mut Violations| {
            let origin = Origin::File(value.span());
            let problem = format!("{} where {expected} is expected", found(value.get_ref()));
            violations.add(key, &origin, problem, remedy);
        };
    if key == API_KEY_ENV && !matches!(given.get_ref(), DeValue::String(_)) {
        // Probably the key itself: it is not repeated here.
        let remedy = "put the key into a variable, and give the variable's name, such as \"API_KEY\"";
        violations.add(key, &origin, "this is not the name of an environment variable", remedy);
        return;
    }
    let such = || format!("give {expected}, such as {example}");
    match (slot, given.get_ref()) {
        (Slot::Text(leaf), DeValue::String(text)) => put(leaf, text.to_string(), origin),
        (Slot::Bytes(leaf), DeValue::String(text)) => put(leaf, RawBytes::Text(text.to_string()), origin),
        (Slot::Whole(leaf), DeValue::Integer(number)) => match whole(number) {
            Some(number) => put(leaf, number, origin),
            None => too_large(key, number, &origin, violations),
        },
        (Slot::Bytes(leaf), DeValue::Integer(number)) => match whole(number) {
            Some(number) => put(leaf, RawBytes::Count(number), origin),
            None => too_large(key, number, &origin, violations),
        },
        (Slot::Number(leaf), DeValue::Float(_) | DeValue::Integer(_)) => match number(given.get_ref()) {
            Some(number) => put(leaf, number, origin),
            None => refuse(given, expected, such(), violations),
        },
        (Slot::Truth(leaf), DeValue::Boolean(truth)) => put(leaf, *truth, origin),
        (Slot::Numbers(leaf), DeValue::Array(items)) => {
            let mut numbers = Vec::with_capacity(items.len());
            for item in items.iter() {
                if violations.is_full() {
                    return;
                }
                match number(item.get_ref()) {
                    Some(value) => numbers.push(Sourced { value, origin: Origin::File(item.span()) }),
                    None => refuse(item, "a number", such(), violations),
                }
            }
            if numbers.len() == items.len() {
                put(leaf, numbers, origin);
            }
        }
        (Slot::Texts(leaf), DeValue::Array(items)) => {
            let mut texts = Vec::with_capacity(items.len());
            for item in items.iter() {
                if violations.is_full() {
                    return;
                }
                match item.get_ref() {
                    DeValue::String(text) => {
                        texts.push(Sourced { value: text.to_string(), origin: Origin::File(item.span()) });
                    }
                    _ => refuse(item, "text", such(), violations),
                }
            }
            if texts.len() == items.len() {
                put(leaf, texts, origin);
            }
        }
        (slot, value) => {
            let remedy = rewritten(&slot, value).unwrap_or_else(such);
            refuse(given, expected, remedy, violations);
        }
    }
}

/// How the same value would be written right, where it has a right form.
fn rewritten(slot: &Slot<'_>, value: &DeValue<'_>) -> Option<String> {
    match (slot, value) {
        (Slot::Whole(_), DeValue::String(text)) if text.trim().parse::<i64>().is_ok() => {
            Some(format!("write {} without quotes", text.trim()))
        }
        (Slot::Number(_), DeValue::String(text)) if text.trim().parse::<f64>().is_ok() => {
            Some(format!("write {} without quotes", text.trim()))
        }
        (Slot::Whole(_), DeValue::Float(number)) => {
            let number = float(number).filter(|number| number.fract() == 0.0 && number.abs() < 1e15)?;
            Some(format!("write {number}"))
        }
        (Slot::Bytes(_), DeValue::Float(_)) => {
            Some("give whole bytes, or text with a unit such as \"1.5GiB\"".into())
        }
        (Slot::Truth(_), DeValue::String(text)) => Some(format!("write {} without quotes", truth(text)?)),
        (Slot::Truth(_), DeValue::Integer(number)) => Some(format!("write {}", truth(number.as_str())?)),
        (Slot::Text(_), DeValue::Integer(number)) => {
            Some(format!("put it in quotes: \"{}\"", shown(&number.to_string())))
        }
        (Slot::Texts(_), DeValue::String(text)) => Some(format!("write a list: [\"{}\"]", shown(text))),
        (Slot::Numbers(_), DeValue::Integer(number)) => {
            Some(format!("write a list: [{}]", shown(&number.to_string())))
        }
        _ => None,
    }
}

fn too_large(key: &str, number: &DeInteger<'_>, origin: &Origin, violations: &mut Violations) {
    let problem = format!("{} does not fit into 64 bits", shown(&number.to_string()));
    violations.add(key, origin, problem, "give a smaller number");
}

fn put<T>(leaf: &mut Leaf<T>, value: T, origin: Origin) {
    *leaf = Some(Sourced { value, origin });
}

fn whole(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// What a text means by yes or no. Other tools take 1 and 0 in variables.
fn truth(text: &str) -> Option<bool> {
    match text.trim().to_lowercase().as_str() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

fn float(number: &DeFloat<'_>) -> Option<f64> {
    number.as_str().parse().ok()
}

fn number(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Float(number) => float(number),
        DeValue::Integer(number) => whole(number).map(|number| number as f64),
        _ => None,
    }
}

/// Reads the text of a variable or flag, or tells why it cannot stand there.
pub(super) fn of_text(slot: Slot<'_>, key: &str, text: String, origin: Origin, violations: &mut Violations) {
    let expected = slot.expected();
    let mut refuse = |origin: &Origin, remedy: &str| {
        let problem = format!("`{}` where {expected} is expected", shown(&text));
        violations.add(key, origin, problem, remedy);
    };
    let trimmed = text.trim();
    match slot {
        Slot::Text(leaf) => put(leaf, text, origin),
        Slot::Bytes(leaf) => put(leaf, RawBytes::Text(text), origin),
        Slot::Whole(leaf) => match trimmed.parse() {
            Ok(number) => put(leaf, number, origin),
            Err(_) if is_whole(trimmed) => {
                refuse(&origin, "give a smaller number: it does not fit into 64 bits")
            }
            Err(_) => refuse(&origin, "give a whole number"),
        },
        Slot::Number(leaf) => match trimmed.parse() {
            Ok(number) => put(leaf, number, origin),
            Err(_) => refuse(&origin, "give a number"),
        },
        Slot::Truth(leaf) => match truth(trimmed) {
            Some(truth) => put(leaf, truth, origin),
            None => refuse(&origin, "give true or false"),
        },
        Slot::Numbers(leaf) => match items(trimmed).map(str::parse).collect::<Result<Vec<f64>, _>>() {
            Ok(numbers) => {
                let sourced = |value| Sourced { value, origin: origin.clone() };
                let numbers = numbers.into_iter().map(sourced).collect();
                put(leaf, numbers, origin);
            }
            Err(_) => refuse(&origin, "give numbers with commas between, such as 2,1,1"),
        },
        Slot::Texts(leaf) => {
            let unquoted = items(trimmed).map(|item| item.trim_matches('"')).filter(|item| !item.is_empty());
            let sourced = |item: &str| Sourced { value: item.to_owned(), origin: origin.clone() };
            let texts = unquoted.map(sourced).collect();
            put(leaf, texts, origin);
        }
    }
}

fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// The parts of a list: with commas between, in brackets or without.
fn items(text: &str) -> impl Iterator<Item = &str> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    inner.split(',').map(str::trim)
}
