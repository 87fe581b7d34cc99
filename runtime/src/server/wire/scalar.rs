//! Fields that are a single value, and what is said of one that is not.

use serde::{Deserialize, Deserializer, de::Visitor};

/// Most characters of a value that are repeated in an error.
const SHOWN_CHARS_MAX: usize = 60;

/// A single value, read from JSON text.
pub(crate) trait Scalar: Sized {
    /// The value, or what is wrong with it: `must be …, got …`.
    fn read(raw: &str) -> Result<Self, String>;
}

impl Scalar for bool {
    fn read(raw: &str) -> Result<Self, String> {
        serde_json::from_str(raw).map_err(|_| must_be("true or false", raw))
    }
}

impl Scalar for String {
    fn read(raw: &str) -> Result<Self, String> {
        serde_json::from_str(raw)
            .map_err(|error| if raw.starts_with('"') { reason(&error) } else { must_be("a string", raw) })
    }
}

impl Scalar for f32 {
    fn read(raw: &str) -> Result<Self, String> {
        if !is_number(raw) {
            return Err(must_be("a number", raw));
        }
        // What overflows must not become an infinity that nobody sent.
        let value = serde_json::from_str::<f64>(raw).map(|value| value as f32);
        value
            .ok()
            .filter(|value| value.is_finite())
            .ok_or_else(|| must_be("a number in float32's range", raw))
    }
}

macro_rules! integers {
    ($($kind:ty),*) => {$(
        impl Scalar for $kind {
            fn read(raw: &str) -> Result<Self, String> {
                serde_json::from_str(raw).map_err(|_| {
                    if !is_number(raw) || raw.contains(['.', 'e', 'E']) {
                        must_be("an integer", raw)
                    } else if <$kind>::MIN == 0 && raw.starts_with('-') {
                        must_be("at least 0", raw)
                    } else {
                        must_be(&format!("in [{}, {}]", <$kind>::MIN, <$kind>::MAX), raw)
                    }
                })
            }
        }
    )*};
}

integers!(i32, i64, u32, usize);

fn is_number(raw: &str) -> bool {
    raw.starts_with(|first: char| first == '-' || first.is_ascii_digit())
}

/// `must be a number, got "hot"`.
pub(super) fn must_be(what: &str, raw: &str) -> String {
    match raw.char_indices().nth(SHOWN_CHARS_MAX) {
        None => format!("must be {what}, got {raw}"),
        Some((end, _)) => format!("must be {what}, got {}...", &raw[..end]),
    }
}

/// What the parser says, without its place: that counts from the beginning of the field, which nobody sees.
pub(super) fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    if text.contains("surrogate") || text.contains("hex escape") {
        return "has a string with half a surrogate pair (as in \\ud800); send whole characters".into();
    }
    if text.contains("recursion limit") {
        return "is nested too deeply".into();
    }
    if let Some(name) = text.strip_prefix("missing field ") {
        return format!("must have the field {name}");
    }
    let unexpected = ["invalid type: ", "invalid value: "].iter().find_map(|kind| text.strip_prefix(kind));
    match unexpected.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((got, expected)) => must_be(in_json(expected), in_json(got)),
        None => text.to_owned(),
    }
}

/// JSON's words for serde's: `integer `5`` is a 5, a sequence an array.
fn in_json(words: &str) -> &str {
    match words {
        "sequence" | "a sequence" => "an array",
        "map" | "a map" => "an object",
        "a boolean" => "true or false",
        _ => match words.split_once('`') {
            Some(("integer " | "floating point " | "boolean ", value)) => value.trim_end_matches('`'),
            _ => words.strip_prefix("string ").unwrap_or(words),
        },
    }
}

/// A token id. Whether it is in the vocabulary is for the engine to say.
pub(super) struct TokenId(pub(super) u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenIdVisitor;

        impl Visitor<'_> for TokenIdVisitor {
            type Value = TokenId;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a token id (an integer in [0, {}])", u32::MAX)
            }

            fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<TokenId, E> {
                let refused = |_| E::invalid_value(serde::de::Unexpected::Unsigned(id), &self);
                u32::try_from(id).map(TokenId).map_err(refused)
            }
        }

        deserializer.deserialize_u32(TokenIdVisitor)
    }
}

/// A number of an array or object, named as such in errors.
pub(super) struct Number(pub(super) f32);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw: Box<serde_json::value::RawValue> = Deserialize::deserialize(deserializer)?;
        f32::read(raw.get()).map(Self).map_err(serde::de::Error::custom)
    }
}
