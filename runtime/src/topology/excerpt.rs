//! A line of a file with carets under a part of it, as terminals show it.

use std::ops::Range;

use unicode_width::UnicodeWidthChar;

/// Characters of a line that are shown; a longer line is cut around the carets.
const LINE_CHARS_MAX: usize = 110;
/// Characters kept before the carets where a line is cut.
const LEAD_CHARS: usize = 50;
/// Characters of a value that messages repeat.
const SHOWN_CHARS_MAX: usize = 60;

/// The text of a file, and where its lines begin.
#[derive(Debug)]
pub(super) struct Source {
    name: String,
    text: String,
    line_starts: Vec<usize>,
}

/// A place: its name, and what stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) name: String,
    pub(super) excerpt: Option<String>,
    /// Where in the file; what stands in no file comes last.
    pub(super) offset: usize,
}

impl Place {
    /// A place outside the file.
    pub(super) fn outside(name: String) -> Place {
        Place { name, excerpt: None, offset: usize::MAX }
    }
}

impl Source {
    pub(super) fn new(name: &str, text: &str) -> Source {
        let starts = text.match_indices('\n').map(|(at, _)| at + 1);
        let line_starts = std::iter::once(0).chain(starts).collect();
        Source { name: shown_whole(name), text: text.to_owned(), line_starts }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Where a part of the file is, by the file's name, line and column.
    pub(super) fn place(&self, span: Range<usize>) -> Place {
        let mut start = span.start.min(self.text.len());
        while !self.text.is_char_boundary(start) {
            start -= 1;
        }
        let index = self.line_starts.partition_point(|&line| line <= start) - 1;
        let line_start = self.line_starts[index];
        let line = self.text[line_start..].lines().next().unwrap_or_default();
        // A span behind the last line's end, as of a missing quote, marks the end.
        let column = self.text[line_start..start].chars().count();
        let marked = self.text.get(start..span.end.max(start)).unwrap_or_default();
        let marked = marked.lines().next().unwrap_or_default().chars().count();
        let line = mask(line);
        Place {
            name: format!("{}:{}:{}", self.name, index + 1, column + 1),
            excerpt: Some(excerpt(&line, index + 1, column, marked)),
            offset: span.start,
        }
    }
}

/// Parts of keys whose values are secrets. (`token` is not among them: tokens are what models count.)
const SECRETS: [&str; 5] = ["api_key", "api-key", "apikey", "secret", "password"];

/// A line without what may be a secret: what follows such a key is shown only if it is the name of a variable.
fn mask(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let key = SECRETS.iter().filter_map(|secret| lower.find(secret)).min();
    let Some(equals) = key.and_then(|key| Some(key + line[key..].find('=')?)) else { return line.to_owned() };
    let (before, value) = line.split_at(equals + 1);
    let value = value.split(['#', ',', '}']).next().unwrap_or_default().trim();
    let name = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    if name.is_some_and(is_variable_name) { line.to_owned() } else { format!("{before} (hidden)") }
}

/// Whether a text can name an environment variable, rather than be what should stand in one.
pub(super) fn is_variable_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn excerpt(line: &str, number: usize, column: usize, marked: usize) -> String {
    let gutter = " ".repeat(number.to_string().len());
    let length = line.chars().count();
    let skipped = if length > LINE_CHARS_MAX { column.saturating_sub(LEAD_CHARS) } else { 0 };
    let mut visible: String = line.chars().skip(skipped).take(LINE_CHARS_MAX).map(visible).collect();
    let mut indent: String = if skipped > 0 { " ".to_owned() } else { String::new() };
    if skipped > 0 {
        visible.insert(0, '…');
    }
    if length > skipped + LINE_CHARS_MAX {
        visible.push('…');
    }
    // Tabs are kept, so that the caret stands under the value however wide the terminal shows them; a wide
    // character takes two columns.
    for c in line.chars().take(column).skip(skipped) {
        if c == '\t' { indent.push('\t') } else { indent.push_str(&" ".repeat(columns(c))) }
    }
    let marked = line.chars().skip(column).take(marked.min(LINE_CHARS_MAX)).map(columns).sum::<usize>();
    format!("  {number} | {visible}\n  {gutter} | {indent}{}", "^".repeat(marked.max(1)))
}

fn columns(c: char) -> usize {
    visible(c).width().unwrap_or(1)
}

/// A character as it is shown: terminals obey control characters, so those become pictures of themselves.
fn visible(c: char) -> char {
    match c {
        '\t' => '\t',
        '\u{7f}' => '␡',
        c if c < ' ' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        // The second set of control characters, and those that turn the direction of a line.
        '\u{80}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            '\u{fffd}'
        }
        c => c,
    }
}

/// A value as messages repeat it: without control characters, and not all of a long one.
pub(super) fn shown(text: &str) -> String {
    if text.chars().nth(SHOWN_CHARS_MAX).is_none() {
        return shown_whole(text);
    }
    shown_whole(&text.chars().take(SHOWN_CHARS_MAX).collect::<String>()) + "…"
}

fn shown_whole(text: &str) -> String {
    text.chars().map(|c| if c == '\t' { '␉' } else { visible(c) }).collect()
}
