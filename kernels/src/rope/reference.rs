//! The truth: one head, angles from scratch.

use super::Pairs;

/// Turns one head at `position` and stretches it by `attention_factor`.
pub fn rope(head: &mut [f32], position: u32, frequencies: &[f32], attention_factor: f32, pairs: Pairs) {
    let half = frequencies.len();
    for (i, frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
        let (at_a, at_b) = match pairs {
            Pairs::HalfSplit => (i, i + half),
            Pairs::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (f64::from(head[at_a]), f64::from(head[at_b]));
        head[at_a] = (f64::from(attention_factor) * (a * cos - b * sin)) as f32;
        head[at_b] = (f64::from(attention_factor) * (b * cos + a * sin)) as f32;
    }
}
