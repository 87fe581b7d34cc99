//! From facts to lines and advice. Knows no machine: what it is given is all there is.

mod cuda;
mod host;

use std::fmt::Write;

use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use super::{
    facts::{Facts, Variable},
    wanted::Verdict,
};
use crate::topology::shown_whole;

const ENVIRONMENT: &str = "environment";

/// All of it, as `--json` shows it.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    #[serde(flatten)]
    facts: &'a Facts,
    /// Null where nothing is asked for.
    asked: Option<&'a Verdict>,
    /// Devices that a model can be served on.
    can_serve: Vec<String>,
    /// All of them, in the order of the lines.
    gaps: Vec<Gap>,
    #[serde(skip)]
    groups: Vec<Group>,
}

/// Something that is missing, or not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Gap {
    /// The part of the report that it belongs to.
    pub(super) about: &'static str,
    pub(super) what: String,
    #[serde(rename = "what_to_do")]
    pub(super) remedy: String,
}

/// Lines under a title.
struct Group {
    /// As gaps name it.
    about: &'static str,
    title: &'static str,
    lines: Vec<Line>,
}

enum Line {
    Fact { label: String, text: String },
    Gap(Gap),
}

impl Group {
    fn new(about: &'static str, title: &'static str) -> Group {
        Group { about, title, lines: Vec::new() }
    }

    fn fact(&mut self, label: impl Into<String>, text: impl Into<String>) {
        self.lines.push(Line::Fact { label: label.into(), text: text.into() });
    }

    fn label_widths(&self) -> impl Iterator<Item = usize> {
        self.lines.iter().filter_map(|line| match line {
            Line::Fact { label, .. } => Some(label.width()),
            Line::Gap(_) => None,
        })
    }

    fn gap(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.lines.push(Line::Gap(Gap { about: self.about, what: what.into(), remedy: remedy.into() }));
    }
}

/// Facts and a verdict, if something was asked for, with what to do about each gap.
pub(super) fn report<'a>(facts: &'a Facts, asked: Option<&'a Verdict>) -> Report<'a> {
    let mut groups = vec![
        cuda::driver(facts),
        cuda::cards(facts),
        cuda::links(facts),
        cuda::libraries(facts),
        cuda::cubins(facts),
        host::host(facts),
        environment(&facts.environment),
        can_serve(facts),
    ];
    groups.extend(asked.map(|verdict| asked_for(verdict, facts)));
    groups.retain(|group| !group.lines.is_empty());
    let lines = groups.iter().flat_map(|group| &group.lines);
    let gaps = lines.filter_map(|line| match line {
        Line::Gap(gap) => Some(gap.clone()),
        Line::Fact { .. } => None,
    });
    let gaps = gaps.collect();
    let can_serve = std::iter::once("cpu".to_owned()).chain(facts.usable_cards().map(|card| card.label()));
    Report { facts, asked, can_serve: can_serve.collect(), gaps, groups }
}

impl Report<'_> {
    #[cfg(test)]
    pub(super) fn can_serve(&self) -> &[String] {
        &self.can_serve
    }

    /// For people: groups, each with aligned lines; a gap is one line, `! what -> what to do`.
    pub(super) fn text(&self) -> String {
        // Names of variables are longer than all labels: they make room for themselves alone.
        let ours = self.groups.iter().filter(|group| group.about != ENVIRONMENT);
        let common = ours.flat_map(Group::label_widths).max();
        let mut text = format!("Consort {}\n", self.facts.version);
        for group in &self.groups {
            let width = group.label_widths().max().max(common).unwrap_or(0);
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{}", group.title);
            for line in &group.lines {
                let line = match line {
                    Line::Fact { label, text: fact } => {
                        let pad = width - label.width();
                        format!("  {label}{:pad$}  {fact}", "")
                    }
                    Line::Gap(gap) => format!("  ! {} -> {}", gap.what, gap.remedy),
                };
                // Names come from drivers, files and variables: none of them moves a terminal's cursor.
                let _ = writeln!(text, "{}", shown_whole(line.trim_end()));
            }
        }
        text
    }
}

fn environment(variables: &[Variable]) -> Group {
    let mut group = Group::new(ENVIRONMENT, "Environment");
    for Variable { name, value } in variables {
        let shown = match value.as_deref() {
            Some("") => "(set, and empty)",
            Some(value) => value,
            None => "(set; its value is not shown)",
        };
        group.fact(name, shown);
    }
    group
}

fn can_serve(facts: &Facts) -> Group {
    let mut group = Group::new("can_serve", "A model can be served on");
    let (cores, isa) = (facts.host.cores, &facts.host.isa.used);
    group.fact("cpu", format!("{} with {isa}", counted(cores, "core")));
    for card in facts.usable_cards() {
        group.fact(card.label(), &card.name);
    }
    group
}

fn asked_for(verdict: &Verdict, facts: &Facts) -> Group {
    let mut group = Group::new("asked", "Asked for");
    for answer in &verdict.devices {
        let label = match answer.rank {
            Some(rank) => format!("rank {rank}"),
            None => "--device".to_owned(),
        };
        let card = facts.cards.iter().find(|card| Some(card.ordinal) == answer.card);
        let meant = card.map_or_else(String::new, |card| match card.label() {
            known if known == answer.device => format!(" ({})", card.name),
            label => format!(" ({label}, {})", card.name),
        });
        let can = if answer.is_usable { "can be used" } else { "cannot be used" };
        group.fact(label, format!("{}{meant} {can}", answer.device));
    }
    group.lines.extend(verdict.gaps.iter().cloned().map(Line::Gap));
    group
}

/// `1 core`, `2 cores`.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
