//! What was measured, as JSON and as tables.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{figure, peers::Engine};

/// Of one engine.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) name: &'static str,
    about: String,
    pub(super) starts_s: Vec<f64>,
    pub(super) peak_rss_bytes: Option<f64>,
    /// Cases with what each round took, in the order of asking.
    pub(super) cases: Vec<(String, Vec<Value>)>,
    /// Why it is not asked any more.
    pub(super) failure: Option<String>,
}

#[derive(Default)]
pub(super) struct Report {
    pub(super) date: String,
    pub(super) commit: String,
    pub(super) cpu: String,
    pub(super) threads: usize,
    pub(super) model: String,
    pub(super) rounds: usize,
    pub(super) command: String,
    /// Consort first.
    pub(super) engines: Vec<(Engine, Entry)>,
    /// What the machine read and multiplied at most, after each round.
    pub(super) walls: Vec<Value>,
}

/// A line of the table: what each engine reached.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) unit: &'static str,
    pub(super) more_is_better: bool,
    /// Of each engine; empty where it has none.
    pub(super) numbers: Vec<Vec<f64>>,
    /// What no engine can exceed.
    wall: Option<f64>,
}

impl Entry {
    pub(super) fn new(name: &'static str, about: &str) -> Entry {
        Entry { name, about: about.to_owned(), ..Entry::default() }
    }

    pub(super) fn fail(&mut self, error: &anyhow::Error) {
        let failure = format!("{error:#}");
        eprintln!("error: {failure}");
        self.failure = Some(failure);
    }

    pub(super) fn take(&mut self, case: &str, round: &Value) {
        match self.cases.iter_mut().find(|(name, _)| name == case) {
            Some((_, rounds)) => rounds.push(round.clone()),
            None => self.cases.push((case.to_owned(), vec![round.clone()])),
        }
    }
}

impl Row {
    /// The best median of the engines after the first, and their place.
    fn best_peer(&self) -> Option<f64> {
        let peers = self.numbers.iter().skip(1).filter_map(|numbers| median(numbers));
        peers.reduce(|a, b| if self.more_is_better == (b > a) { b } else { a })
    }

    /// Consort's median by the best peer's, or the other way round where less is better: above one, Consort is better.
    pub(super) fn ratio(&self) -> Option<f64> {
        let (ours, best) = (median(self.numbers.first()?)?, self.best_peer()?);
        Some(if self.more_is_better { ours / best } else { best / ours })
    }
}

impl Report {
    pub(super) fn default_name(&self, is_random: bool) -> String {
        format!("docs/measurements/{}-cpu{}", self.date, if is_random { "-random" } else { "" })
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let of_all = |numbers: &dyn Fn(&Entry) -> Vec<f64>| {
            self.engines.iter().map(|(_, entry)| numbers(entry)).collect::<Vec<_>>()
        };
        let cases = self.engines.first().map(|(_, entry)| &entry.cases[..]).unwrap_or_default();
        let mut rows: Vec<Row> = Vec::new();
        for (case, _) in cases {
            let (what, figure_name) = asked(case);
            let numbers = of_all(&|entry| {
                let rounds = entry.cases.iter().find(|(name, _)| name == case).map(|(_, rounds)| &rounds[..]);
                rounds.unwrap_or_default().iter().filter_map(|round| figure(round, figure_name)).collect()
            });
            let walls: Vec<f64> = match figure_name {
                "decode_tokens_per_s" => {
                    self.walls.iter().filter_map(|wall| figure(wall, figure_name)).collect()
                }
                _ => Vec::new(),
            };
            let wall = median(&walls);
            rows.push(Row {
                name: format!("{what}, {case}"),
                unit: "tokens/s",
                more_is_better: true,
                numbers,
                wall,
            });
        }
        rows.push(Row {
            name: "start to first token".to_owned(),
            unit: "s",
            more_is_better: false,
            numbers: of_all(&|entry| entry.starts_s.clone()),
            wall: None,
        });
        rows.push(Row {
            name: "most memory, context 2,048".to_owned(),
            unit: "MB",
            more_is_better: false,
            numbers: of_all(&|entry| entry.peak_rss_bytes.iter().map(|bytes| bytes / 1e6).collect()),
            wall: None,
        });
        rows
    }

    /// A page: what was asked of whom, on what, and what came.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {} on {} threads of {}\n\n", self.model, self.threads, self.cpu);
        let wall =
            |name: &str| median(&self.walls.iter().filter_map(|wall| figure(wall, name)).collect::<Vec<_>>());
        let _ = write!(
            text,
            "{}, commit {}, `{}`: medians of {} interleaved rounds, least and most in brackets.",
            self.date, self.commit, self.command, self.rounds
        );
        if let (Some(read), Some(flops)) = (wall("read_bytes_per_s"), wall("flops")) {
            let _ = write!(
                text,
                " At most {:.1} GB/s of memory as large as the weights are read, and {:.2} TFLOP/s multiplied.",
                read / 1e9,
                flops / 1e12
            );
        }
        text += "\n\n|";
        for (_, entry) in &self.engines {
            let _ = write!(text, " | {}", entry.name);
        }
        let has_peers = self.engines.len() > 1;
        text += if has_peers { " | to the best peer |\n|---|" } else { " |\n|---|" };
        text += &"--:|".repeat(self.engines.len() + usize::from(has_peers));
        text.push('\n');
        for row in self.rows() {
            let _ = write!(text, "| {} ({})", row.name, row.unit);
            for (at, numbers) in row.numbers.iter().enumerate() {
                let _ = write!(text, " | {}", spread(numbers));
                if let (0, Some(wall), Some(ours)) = (at, row.wall, median(numbers)) {
                    let _ = write!(text, ", {:.0} % of {}", 100.0 * ours / wall, rounded(wall));
                }
            }
            if has_peers {
                let _ =
                    write!(text, " | {}", row.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.2}")));
            }
            text += " |\n";
        }
        text.push('\n');
        for (_, entry) in &self.engines {
            let _ = writeln!(text, "- {}: {}", entry.name, entry.about);
            if let Some(failure) = &entry.failure {
                let _ = writeln!(text, "  **failed**: {failure}");
            }
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let engines = self.engines.iter().map(|(_, entry)| {
            let cases = entry.cases.iter().map(|(case, rounds)| json!({ "case": case, "rounds": rounds }));
            json!({
                "name": entry.name,
                "about": entry.about,
                "starts_s": entry.starts_s,
                "peak_rss_bytes": entry.peak_rss_bytes,
                "cases": cases.collect::<Vec<_>>(),
                "failure": entry.failure,
            })
        });
        json!({
            "date": self.date,
            "commit": self.commit,
            "cpu": self.cpu,
            "threads": self.threads,
            "model": self.model,
            "command": self.command,
            "machine": self.walls,
            "engines": engines.collect::<Vec<_>>(),
        })
    }
}

/// What a case is asked for, and the number of a round that tells it.
fn asked(case: &str) -> (&'static str, &'static str) {
    if case.contains('x') {
        ("many at once, end to end", "end_to_end_tokens_per_s")
    } else if case.ends_with("+1") {
        ("prefill", "prefill_tokens_per_s")
    } else {
        ("decode", "decode_tokens_per_s")
    }
}

pub(super) fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

fn spread(numbers: &[f64]) -> String {
    let (least, most) = numbers.iter().fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
    match (median(numbers), numbers.len()) {
        (None, _) => "-".to_owned(),
        (Some(median), 1) => rounded(median),
        (Some(median), _) => format!("{} ({} to {})", rounded(median), rounded(least), rounded(most)),
    }
}

/// Three digits at least.
pub(super) fn rounded(number: f64) -> String {
    match number {
        number if number < 10.0 => format!("{number:.2}"),
        number if number < 100.0 => format!("{number:.1}"),
        number => format!("{number:.0}"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Consort and two peers, one of which failed.
    pub(in super::super) fn report() -> Report {
        let entry = |name, speeds: &[f64], start, rss: f64| {
            let mut entry = Entry::new(name, "a setting");
            for speed in speeds {
                let (decode, prefill) =
                    (json!({ "decode_tokens_per_s": speed }), json!({ "prefill_tokens_per_s": 9.0 }));
                entry.take("32+128", &decode);
                entry.take("512+1", &prefill);
            }
            entry.starts_s = vec![start];
            entry.peak_rss_bytes = Some(rss * 1e6);
            entry
        };
        let engine = |name| Engine::new(name, "a setting", &["true"], "log".into());
        let mut failed = Entry::new("third", "a setting");
        failed.fail(&anyhow::anyhow!("third ended"));
        Report {
            engines: vec![
                (engine("Consort"), entry("Consort", &[100.0, 80.0, 90.0], 0.2, 350.0)),
                (engine("second"), entry("second", &[30.0, 45.0, 50.0], 0.1, 700.0)),
                (engine("third"), failed),
            ],
            walls: vec![json!({ "decode_tokens_per_s": 120.0, "read_bytes_per_s": 3e10, "flops": 7e12 })],
            ..Report::default()
        }
    }

    #[test]
    fn ratios_are_of_medians_and_above_one_where_consort_is_better() {
        let rows = report().rows();
        let ratio = |at: usize| rows[at].ratio().expect("two engines have it");
        assert!((ratio(0) - 2.0).abs() < 1e-9, "90 by 45");
        assert!((ratio(1) - 1.0).abs() < 1e-9);
        assert!((ratio(2) - 0.5).abs() < 1e-9, "the start is twice as long");
        assert!((ratio(3) - 2.0).abs() < 1e-9, "half the memory");
    }

    #[test]
    fn a_page_has_every_engine_and_what_failed() {
        let text = report().markdown();
        for part in [
            "| Consort | second | third | to the best peer |",
            "| decode, 32+128 (tokens/s) | 90.0 (80.0 to 100), 75 % of 120 | 45.0 (30.0 to 50.0) | - | 2.00 |",
            "| most memory, context 2,048 (MB) | 350 | 700 | - | 2.00 |",
            "**failed**: third ended",
            "30.0 GB/s",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert_eq!(report().json()["engines"][1]["cases"][0]["rounds"].as_array().expect("rounds").len(), 3);
    }
}
