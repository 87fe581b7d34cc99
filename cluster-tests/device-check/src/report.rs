//! The reports of all parts, as a table and as JSON.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};

use crate::figures::Row;

/// How a part ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome", content = "reason")]
pub(crate) enum Outcome {
    /// It ran to its end.
    Done,
    /// It ended with an error, after the rows that it has.
    Failed(String),
    /// It was ended.
    TimedOut(String),
    /// It was not begun.
    Skipped(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::Failed(reason) => write!(f, "FAILED: {reason}"),
            Outcome::TimedOut(reason) => write!(f, "ENDED: {reason}"),
            Outcome::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

/// What is known of a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PartReport {
    pub(crate) part: String,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    pub(crate) seconds: f64,
    pub(crate) rows: Vec<Row>,
}

/// What is known of the machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Seconds since 1970.
    pub(crate) time: u64,
    /// The commit this was built from.
    pub(crate) commit: String,
    pub(crate) card: String,
    pub(crate) driver: String,
    pub(crate) libraries: Vec<String>,
    pub(crate) peer: String,
}

/// All of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) parts: Vec<PartReport>,
}

impl Machine {
    /// Takes what another part found; the first of them looked for more libraries.
    pub(crate) fn learn(&mut self, found: Machine) {
        let keep = self.libraries.len() > found.libraries.len();
        let libraries = if keep { std::mem::take(&mut self.libraries) } else { found.libraries.clone() };
        *self = Machine { libraries, ..found };
    }
}

impl Report {
    /// Whether all parts that were begun ended well, and nothing is wrong.
    pub(crate) fn is_good(&self) -> bool {
        let ended = |part: &PartReport| matches!(part.outcome, Outcome::Done | Outcome::Skipped(_));
        self.parts.iter().all(|part| ended(part) && !part.rows.iter().any(Row::is_wrong))
    }

    /// In Markdown, as it stands in a document.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let Machine { commit, card, driver, libraries, peer, .. } = &self.machine;
        let _ = writeln!(text, "card: {card}\ndriver: {driver}\nlibraries: {}", libraries.join("; "));
        let _ = writeln!(text, "peer: {peer}\ncommit: {commit}\n");
        let headings =
            ["part", "case", "ours", "PyTorch", "ours / PyTorch", "goal", "met", "note"].map(str::to_owned);
        let mut lines = vec![headings.to_vec()];
        for part in &self.parts {
            lines.extend(part.rows.iter().map(|row| cells(&part.part, row)));
            if part.outcome == Outcome::Done {
                continue;
            }
            let mut cells = vec![String::new(); headings.len()];
            cells[0].clone_from(&part.part);
            cells[7] = part.outcome.to_string().replace(['\n', '|'], " ");
            lines.push(cells);
        }
        write_table(&mut text, &lines);
        text
    }

    /// A few lines: how each part ended, and which goals were missed.
    pub(crate) fn summary(&self) -> String {
        self.parts.iter().map(said_of).collect()
    }
}

fn said_of(part: &PartReport) -> String {
    let missed = part.rows.iter().filter(|row| row.met() == Some(false));
    let missed: Vec<String> = missed
        .map(|row| format!("\n    {}{}", if row.is_wrong() { "WRONG: " } else { "missed: " }, row.case))
        .collect();
    format!(
        "{}: {} rows in {:.1} s, {}{}\n",
        part.part,
        part.rows.len(),
        part.seconds,
        part.outcome,
        missed.concat()
    )
}

fn cells(part: &str, row: &Row) -> Vec<String> {
    let goal = row.goal.as_ref();
    let sign = match row.ours.as_ref().map(|ours| ours.better) {
        Some(crate::figures::Better::Lower) => "<=",
        _ => ">=",
    };
    vec![
        part.to_owned(),
        row.case.clone(),
        row.ours.as_ref().map_or_else(String::new, |ours| format!("{} {}", number(ours.value), ours.unit)),
        row.peer.map_or_else(String::new, number),
        row.ours
            .as_ref()
            .zip(row.peer)
            .map_or_else(String::new, |(ours, peer)| format!("{:.2}", ours.times(peer))),
        goal.map_or_else(String::new, |goal| format!("{sign} {} ({})", number(goal.value), goal.of)),
        row.met().map_or_else(String::new, |met| if met { "yes" } else { "NO" }.to_owned()),
        row.note.replace(['\n', '|'], " "),
    ]
}

/// Three or more significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 1000.0 => format!("{value:.0}"),
        magnitude if magnitude >= 100.0 => format!("{value:.1}"),
        magnitude if magnitude >= 1.0 => format!("{value:.2}"),
        magnitude if magnitude >= 1e-3 || magnitude == 0.0 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

fn write_table(text: &mut String, lines: &[Vec<String>]) {
    let columns = lines.first().map_or(0, Vec::len);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut line = |cells: &[String]| {
        for (at, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            // Notes, which come last, are as long as they are.
            let fill = if at + 1 < columns { width - cell.chars().count() } else { 0 };
            let _ = write!(text, "| {cell}{} ", " ".repeat(fill));
        }
        text.push_str("|\n");
    };
    for (at, cells) in lines.iter().enumerate() {
        line(cells);
        if at == 0 {
            line(&widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Figure, Goal};

    fn report(rows: Vec<Row>, outcome: Outcome) -> Report {
        let part = PartReport { part: "linears".into(), outcome, seconds: 1.0, rows };
        Report { machine: Machine::default(), parts: vec![part] }
    }

    #[test]
    fn a_row_of_the_table_has_both_numbers_their_ratio_and_whether_the_goal_is_met() {
        let row = Row::new("m=1", Figure::rate(3.456, "TB/s"))
            .beside(Some(3.0))
            .goal(Goal::hoped(3.5, "80 % of copy"));
        let text = report(vec![row], Outcome::Failed("a | b\nc".into())).table();
        let row = text.lines().find(|line| line.contains("m=1")).unwrap();
        let cells: Vec<&str> = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        assert_eq!(cells, ["linears", "m=1", "3.46 TB/s", "3.00", "1.15", ">= 3.50 (80 % of copy)", "NO"]);
        assert!(text.contains("FAILED: a   b c"), "{text}");
    }

    #[test]
    fn what_is_wrong_fails_a_run_and_what_is_slow_or_skipped_does_not() {
        let slow = Row::new("m=1", Figure::rate(1.0, "TB/s")).goal(Goal::hoped(3.5, "80 % of copy"));
        let wrong =
            Row::new("rms_norm", Figure::cost(9.0, "of tolerance")).goal(Goal::required(1.0, "tolerance"));
        assert!(report(vec![slow.clone()], Outcome::Done).is_good());
        assert!(report(vec![slow.clone()], Outcome::Skipped("no time".into())).is_good());
        assert!(!report(vec![slow.clone(), wrong], Outcome::Done).is_good());
        assert!(!report(vec![slow], Outcome::TimedOut("after 30 s".into())).is_good());
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let row = Row::without("m=1", "no peer");
        let written = serde_json::to_string(&report(vec![row], Outcome::Failed("lost".into()))).unwrap();
        let read: Report = serde_json::from_str(&written).unwrap();
        assert_eq!(read.parts[0].outcome, Outcome::Failed("lost".into()));
        assert_eq!(read.parts[0].rows[0].note, "no peer");
    }
}
