//! How each row of a batch is sampled, in the form that the kernels read.

use crate::sampling::{
    Adjustments, GREEDY_BELOW, SamplingParams, TokenHistory, adjust::Change, random::draw_key,
};

/// Words of a row's numbers on the device.
pub const ROW_WORDS: usize = 16;
/// Words of one change of a logit on the device.
pub const ENTRY_WORDS: usize = 4;

const GREEDY: u32 = 1;
const MIN_P: u32 = 2;
const TOP_P: u32 = 4;

/// What the rows of one step ask for; built on the host and copied to the device as two arrays.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    rows: Vec<u32>,
    entries: Vec<u32>,
    shape: BatchShape,
}

/// How much a batch asks for: it decides what is launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows.
    pub rows: usize,
    /// Changes of logits, of all rows together.
    pub entries: usize,
    /// Whether any row is drawn: not greedy.
    pub draws: bool,
    /// Whether any row is drawn with top-k or top-p.
    pub filters: bool,
}

impl Batch {
    /// Without rows.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Takes all rows out again and keeps the memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.entries.clear();
        self.shape = BatchShape::default();
    }

    /// Appends a row: the token at `position` of a sequence with this history.
    pub fn push(&mut self, params: &SamplingParams, history: &TokenHistory, position: u64) {
        let first_entry = self.shape.entries;
        for (token, change) in params.adjustments.changes(history) {
            let (kind, amount) = match change {
                Change::Masked => (0, 0),
                Change::Biased(bias) => (1, bias.to_bits()),
                Change::Seen(count) => (2, count),
            };
            self.entries.extend([token, kind, amount, 0]);
            self.shape.entries += 1;
        }
        let greedy = params.temperature < GREEDY_BELOW;
        let top_k = params.top_k.filter(|_| !greedy).map_or(0, |k| k.max(1));
        let top_p = !greedy && params.top_p < 1.0;
        let min_p = !greedy && params.min_p > 0.0;
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let Adjustments { repetition_penalty, frequency_penalty, presence_penalty, .. } = params.adjustments;
        let share = 1.0 - f64::from(params.top_p);
        let log_min_p = if min_p { libm::logf(params.min_p) } else { 0.0 };
        self.rows.extend(words_of(draw_key(params.seed, position)));
        self.rows.extend(words_of(share.to_bits()));
        self.rows.extend([(1.0 / params.temperature).to_bits(), log_min_p.to_bits(), top_k]);
        self.rows.push(flag(greedy, GREEDY) | flag(min_p, MIN_P) | flag(top_p, TOP_P));
        self.rows.extend([repetition_penalty, frequency_penalty, presence_penalty].map(f32::to_bits));
        self.rows.extend([first_entry as u32, self.shape.entries as u32, 0, 0, 0]);
        self.shape.rows += 1;
        self.shape.draws |= !greedy;
        self.shape.filters |= top_k != 0 || top_p;
    }

    /// Changes of logits that [`Batch::push`] would add.
    pub fn changes_of(params: &SamplingParams, history: &TokenHistory) -> usize {
        params.adjustments.changes(history).len()
    }

    /// How much it asks for.
    pub fn shape(&self) -> BatchShape {
        self.shape
    }

    /// The rows' numbers, to copy to the device.
    pub fn row_words(&self) -> &[u32] {
        &self.rows
    }

    /// The rows' changes of logits, to copy to the device.
    pub fn entry_words(&self) -> &[u32] {
        &self.entries
    }
}

fn words_of(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}
