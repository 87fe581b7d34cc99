//! Traces: recorded arrivals that are played back. A text file, one request a line:
//!
//! ```text
//! # comments and empty lines say nothing
//! family 3 512                 requests of family 3 begin with the same 512 tokens, or all of their prompt
//! 1250 900 120 3 0 1 2         arrival in ms, prompt tokens, generated tokens, family, priority, salt (0 for none), n
//! ```
//!
//! Families are declared before they are used; `-` is none. Arrivals do not go back.

use std::{collections::BTreeMap, fmt::Write as _};

use consort_kernels::sampling::SamplingParams;

use super::{
    Random, VOCAB,
    model::salt,
    rig::Ask,
    scenario::{Action, CHOICES_MAX, Scenario, Setup},
};
use crate::request::Request;

/// One day's busy minute at an office, made by [`write_office`].
pub(super) const OFFICE: &str = include_str!("traces/office.txt");

/// A line of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrival {
    at_ms: u64,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Number and shared tokens.
    family: Option<(u64, usize)>,
    priority: i32,
    salt: u64,
    choices: usize,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("line {line}: {what}: {text:?}")]
pub(super) struct TraceError {
    line: usize,
    what: &'static str,
    text: String,
}

fn read(trace: &str) -> Result<Vec<Arrival>, TraceError> {
    let (mut families, mut arrivals) = (BTreeMap::new(), Vec::<Arrival>::new());
    for (at, text) in trace.lines().enumerate() {
        let error = |what| TraceError { line: at + 1, what, text: text.to_owned() };
        let text = text.split('#').next().unwrap_or_default();
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            [] => {}
            ["family", number, tokens] => {
                let family = number.parse::<u64>().ok().zip(tokens.parse::<usize>().ok());
                let (number, tokens) = family.ok_or_else(|| error("family NUMBER TOKENS is due"))?;
                families.insert(number, tokens);
            }
            [at_ms, prompt, generated, family, priority, salt, choices] => {
                let arrival = (|| {
                    let family = match family {
                        "-" => None,
                        number => {
                            let number = number.parse().ok()?;
                            Some((number, *families.get(&number)?))
                        }
                    };
                    Some(Arrival {
                        at_ms: at_ms.parse().ok()?,
                        prompt_tokens: prompt.parse().ok().filter(|&tokens| tokens > 0)?,
                        generated_tokens: generated.parse().ok()?,
                        family,
                        priority: priority.parse().ok()?,
                        salt: salt.parse().ok().filter(|&salt| salt < 9)?,
                        choices: choices.parse().ok().filter(|n| (1..=CHOICES_MAX as usize).contains(n))?,
                    })
                })();
                let arrival = arrival.ok_or_else(|| error("a number or a declared family is due"))?;
                if arrivals.last().is_some_and(|last| last.at_ms > arrival.at_ms) {
                    return Err(error("arrivals go back in time"));
                }
                arrivals.push(arrival);
            }
            _ => return Err(error("seven words of a request, or three of a family, are due")),
        }
    }
    Ok(arrivals)
}

/// The scenario of a trace, played back `speed_percent` as fast as it was recorded.
pub(super) fn scenario(trace: &str, setup: Setup, speed_percent: u64) -> Result<Scenario, TraceError> {
    let actions = read(trace)?.into_iter().enumerate().map(|(at, arrival)| {
        let (family, shared) = arrival.family.unwrap_or((0, 0));
        let (mut common, mut own) = (Random::new(!family), Random::new(at as u64));
        let shared = shared.min(arrival.prompt_tokens);
        let prompt = (0..arrival.prompt_tokens)
            .map(|at| if at < shared { &mut common } else { &mut own }.below(VOCAB) as u32);
        let request = Request {
            prompt: prompt.collect(),
            sampling: SamplingParams { seed: at as u64, ..SamplingParams::default() },
            max_tokens: arrival.generated_tokens,
            stop_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            priority: arrival.priority,
            cache_salt: (arrival.salt > 0).then(|| salt(arrival.salt)),
            awaits_tokens: false,
        };
        let ask = Ask { request, choices: arrival.choices, breaks_after: None };
        (arrival.at_ms * 1_000_000 * 100 / speed_percent, Action::Submit(ask))
    });
    Ok(Scenario::new(setup, actions.collect()))
}

/// Writes [`OFFICE`]: chats with two system prompts, documents, a batch of low priority, and one who wants choices.
fn write_office() -> String {
    let mut text = String::from(
        "# A busy minute at an office, synthetic. Chats under two system prompts (families 1 and 2, the second\n\
         # salted), documents, a batch of low priority that arrives at once, and requests of several choices.\n\
         # arrival ms, prompt tokens, generated tokens, family, priority, salt, n\n\
         family 1 512\nfamily 2 1500\nfamily 3 64\n",
    );
    let mut random = Random::new(2026);
    let mut lines: Vec<(u64, String)> = Vec::new();
    let mut at_ms = 0;
    while at_ms < 60_000 {
        at_ms += random.exponential(250);
        let (user, answer) = (20 + random.exponential(180) as usize, 8 + random.exponential(110) as usize);
        let line = match random.below(10) {
            0..=4 => format!("{at_ms} {} {} 1 0 0 1", 512 + user.min(2000), answer.min(600)),
            5..=7 => format!("{at_ms} {} {} 2 0 1 1", 1500 + user.min(2000), answer.min(600)),
            8 => format!("{at_ms} {} {} - 0 0 1", 2000 + random.below(5000), 20 + random.below(100)),
            _ => format!("{at_ms} {} {} - -1 0 4", 30 + user.min(500), answer.min(200)),
        };
        lines.push((at_ms, line));
    }
    for _ in 0..48 {
        lines.push((20_000, format!("20000 {} {} 3 5 0 1", 64 + random.below(900), 1 + random.below(64))));
    }
    lines.sort_by_key(|(at_ms, _)| *at_ms);
    for (_, line) in lines {
        writeln!(text, "{line}").expect("a string takes everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `CONSORT_WRITE_TRACE` set it writes the file.
    #[test]
    fn the_committed_trace_is_what_its_generator_writes() {
        if std::env::var_os("CONSORT_WRITE_TRACE").is_some() {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/scheduler/simulation/traces/office.txt");
            std::fs::write(path, write_office()).expect("the trace can be written");
        } else {
            assert_eq!(OFFICE, write_office());
            assert!(read(OFFICE).expect("it can be read").len() > 200);
        }
    }

    #[test]
    fn a_line_is_read_as_it_is_documented_and_a_wrong_one_is_named() {
        let lines = "# a comment\nfamily 3 512\n\n1250 900 120 3 0 1 2 # and another\n";
        let expected = Arrival {
            at_ms: 1250,
            prompt_tokens: 900,
            generated_tokens: 120,
            family: Some((3, 512)),
            priority: 0,
            salt: 1,
            choices: 2,
        };
        assert_eq!(read(lines), Ok(vec![expected]));
        for (wrong, line) in [
            ("1 2 3", 1),
            ("1 2 3 7 0 0 1", 1),
            ("\n5 0 3 - 0 0 1", 2),
            ("5 1 1 - 0 0 1\n4 1 1 - 0 0 1", 2),
            ("5 1 1 - 0 0 0", 1),
        ] {
            assert_eq!(read(wrong).map_err(|error| error.line), Err(line), "{wrong:?}");
        }
    }
}
