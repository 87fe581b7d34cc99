//! What a model is asked of each output row, and what it answers.

use consort_kernels::sampling::{SamplingParams, TokenHistory, log_probabilities};

/// What an output row of the last forward is for.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowRequest<'a> {
    /// The prompt's own next token, where its log-probability is wanted.
    pub prompt: Option<PromptToken>,
    /// How to draw the sequence's next token, where the row is its last.
    pub draw: Option<Draw<'a>>,
}

/// A token of the prompt whose log-probability is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptToken {
    /// The token that follows the row.
    pub token: u32,
    /// How many best tokens to report with it.
    pub top: u32,
}

/// How a row's next token is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// What the request asked for.
    pub sampling: &'a SamplingParams,
    /// The sequence's tokens so far, as penalties see them.
    pub history: &'a TokenHistory,
    /// Index of the token in its sequence: with the seed it fixes the draw.
    pub position: u64,
    /// Log-probabilities to report: the drawn token's and this many best.
    pub logprobs: Option<u32>,
}

/// What became of a row. Empty where nothing was asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowOutcome {
    /// Log-probability of the prompt's next token; only where reports were wanted.
    pub prompt: Option<TokenLogprobs>,
    /// The next token.
    pub drawn: Option<Drawn>,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// Its id; `None` where the row held no finite logit, so that any token would be a lie.
    pub token: Option<u32>,
    /// Raw log-probabilities at its position, when asked for and reported.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities at one position, from raw logits (before temperature and filters).
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct TokenLogprobs {
    /// The token that stands there.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// Best tokens, best first; ties to the lower id.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of `token` and the `top` best, from one whole row of raw logits.
    pub fn of(logits: &[f32], token: u32, top: u32) -> TokenLogprobs {
        let (logprob, top) = log_probabilities(logits, token, top as usize);
        TokenLogprobs { token, logprob, top }
    }
}
