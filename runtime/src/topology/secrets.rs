//! The parts of a file that messages must not show: what follows a word that stands before secrets.

use std::ops::Range;

/// Words that stand before secrets, wherever in a name.
const WORDS: [&str; 10] = [
    "api_key",
    "api-key",
    "api key",
    "apikey",
    "passw",
    "passphrase",
    "secret",
    "credential",
    "bearer",
    "private_key",
];
/// Words that do so only as a whole part of a name: `hf_token` is a secret, but `max_num_batched_tokens` is none.
const PARTS: [&str; 6] = ["token", "key", "keys", "auth", "pwd", "pass"];
/// The longest names of variables that are single words; what is longer without a `_` is probably a key.
const SINGLE_WORD_MAX: usize = 16;

/// The bytes of a text that are not shown: in order, apart, and each up to the end of a line.
pub(super) fn hidden(text: &str) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    // A value that goes on behind its line, and how its end is known.
    let mut open = Open::None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let start = at;
        at += line.len();
        let content = line.trim_end_matches(['\n', '\r']);
        let cut = match open {
            Open::None => {
                [cut(content), user_of_address(content).map(|user| user.start)].into_iter().flatten().min()
            }
            _ => Some(0),
        };
        let Some(cut) = cut else { continue };
        open = open.after(&content[cut..]);
        let hidden = start + cut..start + content.len();
        if !hidden.is_empty() {
            found.push(hidden);
        }
    }
    found
}

/// Where in a line that which may be a secret begins.
fn cut(line: &str) -> Option<usize> {
    let lower = line.to_ascii_lowercase();
    let in_name = WORDS.iter().filter_map(|word| Some((lower.find(word)?, word.len())));
    let parts = PARTS.iter().filter_map(|word| Some((part(&lower, word)?, word.len())));
    let (word, length) = in_name.chain(parts).min()?;
    if is_naming(line) {
        return None;
    }
    // The rest of the name and the sign behind it are shown if this is a name with a value.
    let end = word + length;
    let behind = &line[end..];
    let rest = behind.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "_-.".contains(c));
    let sign = rest.trim_start_matches([' ', '\t', '"', '\'']);
    Some(if sign.starts_with(['=', ':']) { line.len() - sign.len() + 1 } else { end })
}

/// What stands before the `@` of the first address like `scheme://user:password@host`.
pub(super) fn user_of_address(text: &str) -> Option<Range<usize>> {
    let start = text.find("://")? + 3;
    let rest = &text[start..];
    let authority = &rest[..rest.find(['/', '"', '\'', ' ', '?', '#']).unwrap_or(rest.len())];
    authority.rfind('@').map(|at| start..start + at)
}

/// Where a word stands by itself, between characters that are no letters.
fn part(lower: &str, word: &str) -> Option<usize> {
    let is_letter = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    lower.match_indices(word).map(|(at, _)| at).find(|&at| {
        !is_letter(lower[..at].chars().next_back()) && !is_letter(lower[at + word.len()..].chars().next())
    })
}

/// Whether a line does no more than to name a variable, as in `api_key_env = "API_KEY"`.
fn is_naming(line: &str) -> bool {
    let Some((key, value)) = line.split_once('=') else { return false };
    let name = value.trim().strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    let is_key = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let key = key.trim();
    key.to_ascii_lowercase().ends_with("env") && key.chars().all(is_key) && name.is_some_and(is_plain_name)
}

/// Whether a text can name an environment variable, rather than be what should stand in one.
pub(super) fn is_variable_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether a variable of that name is more likely than a key of those characters: capitals, few digits, and words.
pub(crate) fn is_plain_name(text: &str) -> bool {
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    is_variable_name(text)
        && !text.bytes().any(|byte| byte.is_ascii_lowercase())
        && digits * 4 <= text.len()
        && (text.len() <= SINGLE_WORD_MAX || text.contains('_'))
}

/// How a hidden value goes on below its line.
#[derive(Clone, Copy)]
enum Open {
    None,
    /// To these three quotes.
    Quotes(&'static str),
    /// To as many closing brackets.
    Brackets(usize),
    /// To the end of the next line.
    Line,
}

impl Open {
    /// What is open behind a further hidden part.
    fn after(self, hidden: &str) -> Open {
        match self {
            Open::Quotes(quotes) if !hidden.contains(quotes) => return self,
            Open::Brackets(depth) => return brackets(depth, hidden),
            // The items of a list as YAML has it.
            Open::Line if hidden.trim_start().starts_with('-') => return Open::Line,
            Open::Quotes(_) | Open::Line => return Open::None,
            Open::None => {}
        }
        for quotes in ["\"\"\"", "'''"] {
            if hidden.matches(quotes).count() % 2 == 1 {
                return Open::Quotes(quotes);
            }
        }
        // A value on the next line, as YAML and JSON have it, or a quote that nobody closed.
        let value = hidden.split('#').next().unwrap_or_default();
        let is_empty = matches!(value.trim(), "" | "|" | ">" | "|-" | ">-" | "\\");
        let is_odd = |text: &str, quote: &str| text.matches(quote).count() % 2 == 1;
        let is_torn = ["\"", "'"].iter().any(|quote| is_odd(hidden, quote) && is_odd(value, quote));
        match brackets(0, hidden) {
            Open::None if is_empty || is_torn => Open::Line,
            open => open,
        }
    }
}

fn brackets(depth: usize, hidden: &str) -> Open {
    let depth = hidden.chars().fold(depth, |depth, c| match c {
        '[' | '{' | '(' => depth + 1,
        ']' | '}' | ')' => depth.saturating_sub(1),
        _ => depth,
    });
    if depth == 0 { Open::None } else { Open::Brackets(depth) }
}
