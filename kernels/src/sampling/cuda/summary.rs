//! What log-probabilities are made of, as the kernel leaves it, and how ranks put theirs together.

/// A slice of one row of logits: enough for the log-probabilities of the chosen token and of the best ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The largest logit; minus infinity where there is none.
    largest: f32,
    /// The sum of `e^(logit - largest)`.
    sum: f64,
    /// The chosen token's logit; minus infinity in the slices that do not hold it.
    chosen: f32,
    /// The best tokens and their logits, best first, ties to the lower id.
    top: Vec<(u32, f32)>,
}

/// Words of the head of a summary.
const HEAD_WORDS: usize = 4;

impl Summary {
    /// Words that a summary with `top_max` tokens has on the device.
    pub fn words(top_max: usize) -> usize {
        HEAD_WORDS + 2 * top_max
    }

    /// Reads one from the device's words.
    pub fn from_words(words: &[u32]) -> Summary {
        let wide = |at: usize| {
            let word = |at: usize| u64::from(words.get(at).copied().unwrap_or(0));
            word(at) | word(at + 1) << 32
        };
        let float = |at: usize| f32::from_bits(words.get(at).copied().unwrap_or(0));
        let top =
            (HEAD_WORDS..words.len()).step_by(2).map(wide).take_while(|&place| place != 0).map(token_at);
        Summary { sum: f64::from_bits(wide(0)), largest: float(2), chosen: float(3), top: top.collect() }
    }

    /// That of the whole row from those of its slices.
    pub fn merge(slices: &[Summary]) -> Summary {
        let max = |of: fn(&Summary) -> f32| slices.iter().map(of).fold(f32::NEG_INFINITY, f32::max);
        let (largest, chosen) = (max(|slice| slice.largest), max(|slice| slice.chosen));
        let sum = slices
            .iter()
            .filter(|slice| slice.largest > f32::NEG_INFINITY)
            .map(|slice| slice.sum * libm::exp(below(slice.largest, largest)))
            .sum();
        let mut top: Vec<(u32, f32)> = slices.iter().flat_map(|slice| slice.top.iter().copied()).collect();
        top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        top.truncate(slices.iter().map(|slice| slice.top.len()).max().unwrap_or(0));
        Summary { largest, sum, chosen, top }
    }

    /// Log-probability of the chosen token and of the best `top`, as
    /// [`log_probabilities`](super::super::log_probabilities) has them.
    pub fn log_probabilities(&self, top: usize) -> (f32, Vec<(u32, f32)>) {
        let total = libm::log(self.sum);
        let of = |logit: f32| {
            if logit > f32::NEG_INFINITY {
                (below(logit, self.largest) - total) as f32
            } else {
                f32::NEG_INFINITY
            }
        };
        (of(self.chosen), self.top.iter().take(top).map(|&(token, logit)| (token, of(logit))).collect())
    }
}

/// How far `logit` is from the largest; infinities among themselves are not apart.
fn below(logit: f32, largest: f32) -> f64 {
    if logit == largest { 0.0 } else { f64::from(logit) - f64::from(largest) }
}

/// A token's place, read back: its logit's bits in the order of integers, then the complement of its id.
fn token_at(place: u64) -> (u32, f32) {
    let image = (place >> 32) as u32;
    let bits = if image >> 31 == 1 { image & 0x7fff_ffff } else { !image };
    (!(place as u32), f32::from_bits(bits))
}
