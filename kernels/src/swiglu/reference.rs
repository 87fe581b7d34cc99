//! The truth in f64.

/// `silu(gate) · up`, element by element.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter()
        .zip(up)
        .map(|(&gate, &up)| (f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up)) as f32)
        .collect()
}
