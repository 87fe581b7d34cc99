//! A source file, with its comments and literals told apart from its code.

/// One file of the workspace.
pub(super) struct Source {
    /// Path below the root, with forward slashes.
    pub(super) path: String,
    /// The text as it is.
    pub(super) text: String,
    /// The text with comments and the insides of literals blanked out; lines stay lines.
    pub(super) code: String,
}

impl Source {
    pub(super) fn new(path: String, text: String) -> Self {
        let code = code_only(&text);
        Self { path, text, code }
    }

    /// Whether the whole file is test code.
    pub(super) fn is_test(&self) -> bool {
        let mut parts = self.path.split('/').rev();
        let file = parts.next().unwrap_or_default();
        file == "tests.rs" || parts.any(|folder| folder == "tests" || folder == "benches")
    }

    /// Lines before a trailing `#[cfg(test)] mod NAME { .. }`; all of them where there is none.
    pub(super) fn lines_without_tests(&self) -> usize {
        let lines: Vec<&str> = self.code.lines().collect();
        let starts = |at: usize| {
            let next = lines[at + 1..].iter().map(|line| line.trim()).find(|line| !line.is_empty());
            lines[at].trim() == "#[cfg(test)]"
                && next.is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
        };
        (0..lines.len()).find(|&at| starts(at)).unwrap_or(lines.len())
    }

    /// Line number (from 1) of the first use of a word in the code.
    pub(super) fn line_of_word(&self, word: &str) -> Option<usize> {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        self.code
            .lines()
            .position(|line| line.split(|c| !is_part(c)).any(|found| found == word))
            .map(|at| at + 1)
    }
}

/// Blanks comments (nested ones too) and the insides of strings and characters.
fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut previous = ' ';
    while let Some(c) = rest.chars().next() {
        let length = token_to_blank(rest, previous).unwrap_or(0);
        if length == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
            previous = c;
        } else {
            let (blanked, after) = rest.split_at(length);
            code.extend(blanked.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = after;
            previous = ' ';
        }
    }
    code
}

/// Bytes of the comment or literal that `rest` starts with. `previous` tells `r"` from the end of a name.
fn token_to_blank(rest: &str, previous: char) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return Some(block_comment(rest));
    }
    if rest.starts_with('"') {
        return Some(string(rest, 1));
    }
    if rest.starts_with('\'') {
        return character(rest);
    }
    let after_r =
        rest.strip_prefix('r').or_else(|| rest.strip_prefix("br")).or_else(|| rest.strip_prefix("cr"))?;
    if previous.is_alphanumeric() || previous == '_' {
        return None;
    }
    let hashes = after_r.len() - after_r.trim_start_matches('#').len();
    let inside = after_r[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let opening = rest.len() - inside.len();
    Some(inside.find(&end).map_or(rest.len(), |at| opening + at + end.len()))
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        let step = if rest[at..].starts_with("/*") {
            depth += 1;
            2
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        at += step;
        if depth == 0 {
            break;
        }
    }
    at.min(rest.len())
}

fn string(rest: &str, opening: usize) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(opening) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// A character literal, not a lifetime: `'x'`, or an escape up to the next quote.
fn character(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        chars.next()?;
        return chars.find(|(_, c)| *c == '\'').map(|(at, _)| at + 1);
    }
    let (at, second) = chars.next()?;
    (second == '\'' && first != '\'').then_some(at + 1)
}

#[cfg(test)]
mod tests;
