//! What people read of a bench.

use std::fmt::Write as _;

use super::{Case, Report, Round};
use crate::cli::report::size;

pub(super) const HEADER: &str = "\
case            first token     prefill tok/s        decode tok/s          end to end tok/s";

/// A case's medians, with ranges.
pub(super) fn line(case: Case, rounds: &[Round]) -> String {
    let of = |number: &dyn Fn(&Round) -> f64| spread(rounds.iter().map(number).collect());
    let (first, prefill) = (of(&|round| round.first_token_s * 1e3), of(&|round| round.prefill_tokens_per_s));
    let decode: Vec<f64> = rounds.iter().filter_map(|round| round.decode_tokens_per_s).collect();
    let decode = if decode.is_empty() { "-".to_owned() } else { shown(spread(decode)) };
    let end = of(&|round| round.end_to_end_tokens_per_s);
    let first = format!("{:.1} ms", first.1);
    format!("{:<14} {first:>12}  {:<20} {decode:<21} {}", case.to_string(), shown(prefill), shown(end))
}

/// The least, the median and the most.
fn spread(mut numbers: Vec<f64>) -> (f64, f64, f64) {
    numbers.sort_by(f64::total_cmp);
    let at = |index: usize| numbers.get(index).copied().unwrap_or(f64::NAN);
    (at(0), at(numbers.len() / 2), at(numbers.len().saturating_sub(1)))
}

fn shown((least, median, most): (f64, f64, f64)) -> String {
    format!("{median:.1} ({least:.0} to {most:.0})")
}

pub(super) fn footer(report: &Report) -> String {
    let memory = report.peak_rss_bytes.map(|bytes| format!(", {} of memory at most", size(bytes)));
    let mut text = format!("loaded in {:.2} s{}", report.load_s, memory.unwrap_or_default());
    if let Some(machine) = report.machine {
        let _ = write!(
            text,
            "\nat most, {} of weights are read {:.0} times a second ({:.1} GB/s), and {:.2} TFLOP/s are multiplied",
            size(report.weight_bytes),
            machine.decode_tokens_per_s,
            machine.read_bytes_per_s / 1e9,
            machine.flops / 1e12
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(end: f64, decode: Option<f64>) -> Round {
        Round {
            first_token_s: 0.0125,
            prefill_tokens_per_s: 1000.0,
            decode_tokens_per_s: decode,
            end_to_end_tokens_per_s: end,
        }
    }

    #[test]
    fn a_line_tells_medians_and_ranges() {
        let case: Case = "128+128x8".parse().expect("a case");
        let rounds = [round(30.0, Some(9.0)), round(10.0, Some(7.0)), round(20.4, Some(8.0))];
        let line = line(case, &rounds);
        for part in ["128+128x8", "12.5 ms", "1000.0 (1000 to 1000)", "8.0 (7 to 9)", "20.4 (10 to 30)"] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn one_token_has_no_decode() {
        let case: Case = "512+1".parse().expect("a case");
        assert!(line(case, &[round(3.0, None)]).contains(" - "));
    }
}
