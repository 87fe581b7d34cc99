//! File sizes and line widths: a file that outgrows them usually holds two ideas.

use super::{Findings, source::Source};

/// Lines of a file without its tests from which on a split is due.
const LINES_WARN: usize = 500;
/// Lines of a file without its tests that are refused.
const LINES_MAX: usize = 600;

pub(super) fn check(sources: &[Source], line_width_max: usize) -> Findings {
    let mut found = Findings::default();
    for source in sources {
        if !source.is_test() {
            let lines = source.lines_without_tests();
            let text = format!("{} has {lines} lines without its tests", source.path);
            if lines > LINES_MAX {
                found.errors.push(format!("{text}, at most {LINES_MAX} are allowed: split it by idea"));
            } else if lines > LINES_WARN {
                found.warnings.push(format!("{text}, {LINES_WARN} are the aim"));
            }
        }
        for (index, line) in source.text.lines().enumerate() {
            let width = line.chars().count();
            // Addresses and raw strings (regular expressions) cannot be broken.
            let whole = line.contains("://") || line.contains("r\"") || line.contains("r#\"");
            if width > line_width_max && !whole {
                let place = format!("{}:{}", source.path, index + 1);
                found.errors.push(format!(
                    "{place} is {width} characters wide, at most {line_width_max} are allowed"
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests;
