//! The truth: plain loops in the one order of summation.

/// `y[row][output]` for row-major `x [rows, inputs]` and `weight [outputs, inputs]`.
pub fn linear(x: &[f32], weight: &[f32], inputs: usize, outputs: usize) -> Vec<f32> {
    let mut y = Vec::new();
    for x in x.chunks_exact(inputs) {
        for output in 0..outputs {
            let weight = &weight[output * inputs..][..inputs];
            let mut sum = 0.0;
            for (x, weight) in x.chunks(super::BLOCK).zip(weight.chunks(super::BLOCK)) {
                let chain = |half: usize| {
                    (half..x.len()).step_by(2).fold(0.0f32, |sum, input| x[input].mul_add(weight[input], sum))
                };
                sum += chain(0) + chain(1);
            }
            y.push(sum);
        }
    }
    y
}
