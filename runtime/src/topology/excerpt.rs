//! A line of a file with carets under a part of it, as terminals show it.

use std::{ops::Range, path::Path};

use unicode_width::UnicodeWidthChar;

use super::secrets;

/// Characters of a line that are shown; a longer line is cut around the carets.
const LINE_CHARS_MAX: usize = 110;
/// Characters kept before the carets where a line is cut.
const LEAD_CHARS: usize = 50;
/// Characters of a value that messages repeat.
const SHOWN_CHARS_MAX: usize = 60;
/// What stands in place of what may be a secret.
const HIDDEN: &str = "(hidden)";
const HIDDEN_BEHIND: &str = " (hidden)";
const BYTE_ORDER_MARK: char = '\u{feff}';

/// The text of a file, and where its lines begin.
#[derive(Debug)]
pub(super) struct Source {
    name: String,
    text: String,
    line_starts: Vec<usize>,
    /// What is not shown: in order, each up to the end of its line.
    hidden: Vec<Range<usize>>,
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
        // A mark of the byte order is no column.
        let first = if text.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len_utf8() } else { 0 };
        let line_starts = std::iter::once(first).chain(starts).collect();
        Source { name: shown_whole(name), hidden: secrets::hidden(text), text: text.to_owned(), line_starts }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Where a part of the file is, by the file's name, line and column.
    pub(super) fn place(&self, span: Range<usize>) -> Place {
        let mut start = span.start.clamp(self.line_starts[0], self.text.len());
        while !self.text.is_char_boundary(start) {
            start -= 1;
        }
        let index = self.line_starts.partition_point(|&line| line <= start) - 1;
        let from = self.line_starts[index];
        let to = self.line_starts.get(index + 1).copied().unwrap_or(self.text.len());
        let line = self.text[from..to].trim_end_matches(['\n', '\r']);
        let column = self.text[from..start].chars().count();
        let hidden = &self.hidden[self.hidden.partition_point(|hidden| hidden.end <= from)..];
        let cut = hidden.first().map(|hidden| hidden.start).filter(|&cut| cut < from + line.len());
        let shown = Shown {
            line: cut.map_or(line, |cut| &line[..cut.saturating_sub(from)]),
            is_cut: cut.is_some(),
            // A span behind the last line's end, as of a missing quote, marks the end.
            mark: (start - from).min(line.len())..span.end.saturating_sub(from),
        };
        Place {
            name: format!("{}:{}:{}", self.name, index + 1, column + 1),
            excerpt: Some(shown.excerpt(index + 1)),
            offset: span.start,
        }
    }
}

/// What of a line may be shown. A line may be as long as the file, and there may be many places in it, so nothing here
/// walks all of it.
struct Shown<'a> {
    line: &'a str,
    /// Whether something hidden follows.
    is_cut: bool,
    /// What the carets stand under, in bytes of the whole line.
    mark: Range<usize>,
}

impl Shown<'_> {
    fn excerpt(&self, number: usize) -> String {
        let gutter = " ".repeat(number.to_string().len());
        let start = self.mark.start.min(self.line.len());
        let is_long = self.line.chars().nth(LINE_CHARS_MAX).is_some();
        let first = match self.line[..start].char_indices().rev().nth(LEAD_CHARS - 1) {
            Some((at, _)) if is_long => at,
            _ => 0,
        };
        let lead = if first > 0 { "…" } else { "" };
        let window: String = self.line[first..].chars().take(LINE_CHARS_MAX).collect();
        let tail = match self.is_cut {
            _ if first + window.len() < self.line.len() => "…",
            true if window.is_empty() || window.ends_with(char::is_whitespace) => HIDDEN,
            true => HIDDEN_BEHIND,
            false => "",
        };
        // Tabs are kept, so that the caret stands under the value however wide the terminal shows them; a wide
        // character takes two columns.
        let mut indent = " ".repeat(lead.chars().count());
        for c in self.line[first..start].chars() {
            if c == '\t' { indent.push('\t') } else { indent.push_str(&" ".repeat(columns(c))) }
        }
        let marked = self.line[start..].char_indices().take_while(|(at, _)| start + at < self.mark.end);
        let mut carets = marked.take(LINE_CHARS_MAX).map(|(_, c)| columns(c)).sum::<usize>();
        if self.is_cut && tail.ends_with(HIDDEN) && self.mark.end > self.line.len() {
            if carets == 0 {
                indent.push_str(&" ".repeat(tail.len() - HIDDEN.len()));
                carets = HIDDEN.len();
            } else {
                carets += tail.len();
            }
        }
        let window: String = window.chars().map(visible).collect();
        let carets = "^".repeat(carets.max(1));
        format!("  {number} | {lead}{window}{tail}\n  {gutter} | {indent}{carets}")
    }
}

fn columns(c: char) -> usize {
    visible(c).width().unwrap_or(1)
}

/// Whether terminals obey a character instead of showing it: control characters, and those that turn the direction of
/// a line.
pub(super) fn is_obeyed(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A character as it is shown: those that terminals obey become pictures of themselves.
fn visible(c: char) -> char {
    match c {
        '\t' => '\t',
        '\u{7f}' => '␡',
        c if c < ' ' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        c if is_obeyed(c) => '\u{fffd}',
        c => c,
    }
}

/// A value as messages repeat it: without control characters, and not all of a long one.
pub(super) fn shown(text: &str) -> String {
    // What is hidden is so before the text is cut, which may take away what it is known by.
    let whole = shown_whole(text);
    match whole.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &whole[..end]),
        None => whole,
    }
}

/// A path as messages repeat it: all of it, without control characters.
pub(crate) fn shown_path(path: &Path) -> String {
    shown_whole(&path.to_string_lossy())
}

/// A name as messages repeat it: all of it, without control characters and without the password of an address.
pub(crate) fn shown_whole(text: &str) -> String {
    if let Some(user) = secrets::user_of_address(text) {
        return [&text[..user.start], HIDDEN, &text[user.end..]]
            .concat()
            .chars()
            .map(visible_in_line)
            .collect();
    }
    text.chars().map(visible_in_line).collect()
}

fn visible_in_line(c: char) -> char {
    if c == '\t' { '␉' } else { visible(c) }
}
