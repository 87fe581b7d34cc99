//! What a request changes in a row of logits before a token is chosen: a mask, a bias, penalties.
//!
//! Order, as in vLLM: minimum length (mask), bias, repetition, frequency, presence. With `l` a token's logit, `n` how
//! often the sequence generated it, and `r`, `f`, `p` the penalties:
//!
//! * repetition: `l / r` if `l > 0`, else `l * r`, for every token of prompt and output;
//! * frequency: `l - f * n`; presence: `l - p` if `n > 0`. The prompt does not count.
//!
//! The result depends on the row, the sequence's tokens and the request alone.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

/// Changes of logits that a request asks for. The default changes nothing. Validated by whoever builds it; token ids
/// beyond the row are passed over.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct Adjustments {
    /// Tokens to generate before one of `masked_until_min` can be drawn.
    pub min_tokens: u32,
    /// What cannot be drawn until then: whatever would end the generation.
    pub masked_until_min: Vec<u32>,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides positive logits of tokens that the sequence holds, and multiplies negative ones; 1 is neutral.
    pub repetition_penalty: f32,
    /// Taken off a token's logit for each time it was generated; 0 is neutral.
    pub frequency_penalty: f32,
    /// Taken off the logit of a token that was generated at all; 0 is neutral.
    pub presence_penalty: f32,
}

impl Default for Adjustments {
    fn default() -> Self {
        Self {
            min_tokens: 0,
            masked_until_min: Vec::new(),
            logit_bias: Vec::new(),
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
        }
    }
}

impl Adjustments {
    fn counts_prompt(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    fn counts_output(&self) -> bool {
        self.counts_prompt() || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Changes the row from which the sequence's next token is chosen. Costs as many operations as there are masked
    /// and biased tokens, and distinct tokens in the history; none where nothing is asked for.
    pub fn apply(&self, logits: &mut [f32], history: &TokenHistory) {
        if history.generated < u64::from(self.min_tokens) {
            for &token in &self.masked_until_min {
                change(logits, token, |_| f32::NEG_INFINITY);
            }
        }
        for &(token, bias) in &self.logit_bias {
            change(logits, token, |logit| logit + bias);
        }
        let repetition = self.repetition_penalty;
        for (&token, &count) in &history.counts {
            change(logits, token, |mut logit| {
                if self.counts_prompt() {
                    logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
                }
                if count > 0 {
                    logit -= self.frequency_penalty * count as f32;
                    logit -= self.presence_penalty;
                }
                logit
            });
        }
    }
}

/// A change of one token's logit, for devices that apply them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    /// It becomes minus infinity.
    Masked,
    /// This is added.
    Biased(f32),
    /// The history holds the token, and generated it this often.
    Seen(u32),
}

impl Adjustments {
    /// The changes that [`Adjustments::apply`] makes, by token, those of one token in its order.
    pub(super) fn changes(&self, history: &TokenHistory) -> Vec<(u32, Change)> {
        let mut changes = Vec::new();
        if history.generated < u64::from(self.min_tokens) {
            changes.extend(self.masked_until_min.iter().map(|&token| (token, Change::Masked)));
        }
        changes.extend(self.logit_bias.iter().map(|&(token, bias)| (token, Change::Biased(bias))));
        changes.extend(history.counts.iter().map(|(&token, &count)| (token, Change::Seen(count))));
        changes.sort_by_key(|&(token, _)| token);
        changes
    }
}

fn change(logits: &mut [f32], token: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = to(*logit);
    }
}

/// What penalties must know of a sequence. Keeps one entry per distinct token, and none where no penalty asks for it.
#[derive(Clone, Debug, Default)]
pub struct TokenHistory {
    /// How often a token was generated; 0 for one that only the prompt holds.
    counts: BTreeMap<u32, u32>,
    prompt_len: u64,
    len: u64,
    /// Tokens after the prompt.
    generated: u64,
    keeps_prompt: bool,
    keeps_output: bool,
}

impl TokenHistory {
    /// The history of a sequence without tokens, of which the first `prompt_len` will be its prompt. A sequence that
    /// is computed again passes its generated tokens like prompt tokens; this is how they are told apart.
    pub fn new(prompt_len: usize, adjustments: &Adjustments) -> Self {
        Self {
            prompt_len: prompt_len as u64,
            keeps_prompt: adjustments.counts_prompt(),
            keeps_output: adjustments.counts_output(),
            ..Self::default()
        }
    }

    /// Whether anything depends on which tokens are generated, and not only on how many.
    pub fn counts_output(&self) -> bool {
        self.keeps_output
    }

    /// Appends tokens, in order.
    pub fn extend(&mut self, tokens: &[u32]) {
        let of_prompt = self.prompt_len.saturating_sub(self.len).min(tokens.len() as u64) as usize;
        let (prompt, output) = tokens.split_at(of_prompt);
        self.len += tokens.len() as u64;
        self.generated += output.len() as u64;
        if self.keeps_prompt {
            for &token in prompt {
                self.counts.entry(token).or_insert(0);
            }
        }
        if self.keeps_output {
            for &token in output {
                let count = self.counts.entry(token).or_insert(0);
                *count = count.saturating_add(1);
            }
        }
    }

    /// Tokens that an entry is kept for.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.counts.len()
    }
}
