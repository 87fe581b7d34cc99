//! The truth in f64.

/// `silu(gate) · up`, element by element.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter()
        .zip(up)
        .map(|(&gate, &up)| (f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up)) as f32)
        .collect()
}

/// `gelu(gate) · up`, element by element, with the approximation `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
pub fn geglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
        // `1 + tanh(y)` = `2 / (1 + e^-2y)`, which stays exact where the tangent is next to -1.
        x / (1.0 + (-2.0 * inner).exp())
    };
    gate.iter().zip(up).map(|(&gate, &up)| (gelu(f64::from(gate)) * f64::from(up)) as f32).collect()
}

/// `(u + 1) · g · σ(1.702 g)` of gates `g` up to 7 and ups `u` within -7 and 7; each gate stands before its up.
pub fn clamped_swiglu(gate_up: &[f32]) -> Vec<f32> {
    let pair = |pair: &[f32]| {
        let (gate, up) = (f64::from(pair[0]).min(7.0), f64::from(pair[1]).clamp(-7.0, 7.0));
        ((up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())) as f32
    };
    gate_up.chunks_exact(2).map(pair).collect()
}
