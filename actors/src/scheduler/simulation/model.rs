//! The pretended model. Like a real one's, its keys and values at a position depend on every token up to there, and its
//! draw on the whole history; unlike a real one's, they tell whose they are.

use super::{VOCAB, mix};
use crate::{plan::TokenLogprobs, prefix::CacheSalt};

/// What a history without tokens comes to.
pub(super) const EMPTY: u64 = 0x1234_5679;

/// What a history comes to after one more token. Odd, so never 0.
pub(super) fn link(history: u64, token: u32) -> u64 {
    mix(history ^ (u64::from(token) << 32)) | 1
}

pub(super) fn history_of(tokens: &[u32]) -> u64 {
    tokens.iter().fold(EMPTY, |history, &token| link(history, token))
}

/// The token after a history of `len` tokens. As with penalties, it matters how much of it is prompt.
pub(super) fn draw(history: u64, len: usize, prompt_len: usize, seed: u64) -> u32 {
    let key = mix(seed ^ len as u64) ^ mix(prompt_len as u64);
    (mix(history ^ key) % VOCAB as u64) as u32
}

pub(super) fn logprobs_of(history: u64, token: u32, top: u32) -> TokenLogprobs {
    let logprob = -((history % 1000) as f32) - token as f32;
    TokenLogprobs { token, logprob, top: (0..top).map(|id| (id, logprob)).collect() }
}

/// What one token leaves in a page, when its request had the salt of this number. Never 0, which is what was never
/// written.
pub(super) fn content(history: u64, salt: u64) -> u64 {
    history ^ salt_mark(salt)
}

/// The history that left `content`.
pub(super) fn history_in(content: u64, salt: u64) -> u64 {
    content ^ salt_mark(salt)
}

fn salt_mark(salt: u64) -> u64 {
    if salt == 0 { 0 } else { mix(salt) & !1 }
}

/// Salts by number from 1, so that pages can tell them apart.
pub(super) fn salt(number: u64) -> CacheSalt {
    CacheSalt::new(&number.to_le_bytes())
}

/// The number of a request's salt, 0 for none.
pub(super) fn salt_number(wanted: Option<CacheSalt>) -> u64 {
    let number = |wanted| (1..9).find(|&number| salt(number) == wanted);
    wanted.map_or(0, |wanted| number(wanted).expect("one of the simulation's salts"))
}
