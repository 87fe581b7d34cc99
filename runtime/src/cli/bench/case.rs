//! What is asked, as in `128+128x8`.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

/// Requests that are asked at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// Tokens of each prompt.
    pub(super) prompt_tokens: usize,
    /// Tokens of each answer.
    pub(super) tokens: usize,
    pub(super) at_once: usize,
}

impl Case {
    /// Drawn tokens: others for another seed from the first token on.
    pub(super) fn prompt(&self, seed: u64, vocabulary: u64) -> Vec<u32> {
        let draw = |at: u64| {
            // splitmix64
            let mut z =
                seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at.wrapping_mul(0xd1b5_4a32_d192_ed03));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % vocabulary.max(1)) as u32
        };
        (0..self.prompt_tokens as u64).map(draw).collect()
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let malformed =
            || format!("{text:?} is no case; write PROMPT+TOKENS or PROMPT+TOKENSxN, as in 128+128x8");
        let (prompt, rest) = text.split_once('+').ok_or_else(malformed)?;
        let (tokens, at_once) = rest.split_once('x').unwrap_or((rest, "1"));
        let number = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(malformed()),
            Ok(number) => Ok(number),
        };
        Ok(Case { prompt_tokens: number(prompt)?, tokens: number(tokens)?, at_once: number(at_once)? })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.prompt_tokens, self.tokens)?;
        if self.at_once > 1 { write!(f, "x{}", self.at_once) } else { Ok(()) }
    }
}

impl Serialize for Case {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_read_as_they_are_written() {
        for text in ["32+128", "512+1", "128+128x32"] {
            assert_eq!(text.parse::<Case>().expect("a case").to_string(), text);
        }
        assert_eq!("8+9x1".parse::<Case>().expect("a case").to_string(), "8+9");
        for text in ["", "32", "+1", "0+1", "1+0", "1+1x0", "1+1x", "a+1", "1+1x2x3", "-1+2"] {
            let error = text.parse::<Case>().expect_err(text);
            assert!(error.contains("write PROMPT+TOKENS"), "{error}");
        }
    }

    #[test]
    fn prompts_share_no_beginning() {
        let case: Case = "64+1".parse().expect("a case");
        let prompts: Vec<_> = (0..50).map(|seed| case.prompt(seed, 49_152)).collect();
        assert!(prompts.iter().flatten().all(|token| *token < 49_152));
        for (at, prompt) in prompts.iter().enumerate() {
            assert_eq!(prompt.len(), 64);
            assert!(prompts[..at].iter().all(|other| other[..16] != prompt[..16]));
        }
    }
}
