//! The counter-based generator and the draw.

/// 64 well-mixed bits of (seed, position): the key of one draw.
pub(super) fn draw_key(seed: u64, position: u64) -> u64 {
    mix(mix(seed ^ 0x6a09_e667_f3bc_c908).wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// The finaliser of splitmix64 (Stafford's variant 13): a bijection whose output bits each depend on every input bit.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A uniform number in (0, 1) for one token of a draw, from 52 bits: never 0 and never 1.
fn uniform(key: u64, token: u32) -> f64 {
    let bits = mix(key.wrapping_add(u64::from(token).wrapping_mul(0xd134_2543_de82_ef95))) >> 12;
    (bits as f64 + 0.5) * (0.5f64).powi(52)
}

/// The natural logarithm of a positive normal number, within 4 ulp (tested), by single f64 operations: the same bits on
/// every device, so that none draws another token.
///
/// `x = m 2^e` with `m` around 1, and `ln m = 2 artanh((m - 1) / (m + 1))` by its series; its first dropped term is
/// below 2^-60.
fn natural_log(x: f64) -> f64 {
    /// The bits of the square root of 1/2, the least `m`.
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    let bits = x.to_bits();
    let exponent = (bits.wrapping_sub(SQRT_HALF) as i64) >> 52;
    let m = f64::from_bits(bits.wrapping_sub((exponent << 52) as u64));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let odd = [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0];
    let sum = odd.iter().fold(1.0 / 21.0, |sum, odd| sum * z + 1.0 / odd);
    let twice = s + s;
    exponent as f64 * std::f64::consts::LN_2 + (twice + twice * z * sum)
}

/// The token that maximises `logit + gumbel`, i.e. one draw from the softmax of `logits`; ties to the lowest id.
pub(super) fn gumbel_argmax(logits: &[f32], seed: u64, position: u64) -> u32 {
    let key = draw_key(seed, position);
    let start = super::argmax(logits);
    let noisy =
        |token: u32, uniform: f64| f64::from(logits[token as usize]) - natural_log(-natural_log(uniform));
    if logits.is_empty() {
        return 0;
    }
    // Beginning with the likeliest token, nearly all others fail the cheap test below.
    let mut best = (start, noisy(start, uniform(key, start)));
    for (token, &logit) in logits.iter().enumerate() {
        let token = token as u32;
        if logit == f32::NEG_INFINITY || token == start {
            continue;
        }
        let uniform = uniform(key, token);
        // g >= d means -ln u <= e^-d, and -ln u >= 1 - u: so 1 - u > e^-d cannot win.
        let gap = (best.1 - f64::from(logit)) as f32 - 1e-3;
        if gap > 0.0 && (1.0 - uniform) as f32 > 1.001 * libm::expf(-gap) {
            continue;
        }
        let value = noisy(token, uniform);
        if value > best.1 || (value == best.1 && token < best.0) {
            best = (token, value);
        }
    }
    best.0
}

/// The uniform number of one token at one position, for tests that redo a draw the long way.
#[cfg(test)]
pub(super) fn uniform_of(seed: u64, position: u64, token: u32) -> f64 {
    uniform(draw_key(seed, position), token)
}

#[cfg(test)]
mod tests {
    use super::natural_log;
    use crate::testing::Numbers;

    #[test]
    fn the_logarithm_is_within_four_ulp() {
        let mut numbers = Numbers(11);
        let check = |x: f64| {
            let (got, expected) = (natural_log(x), libm::log(x));
            assert!((got - expected).abs() <= 4.0 * f64::EPSILON * expected.abs(), "ln {x} = {got}");
        };
        for _ in 0..200_000 {
            let bits = numbers.next_u64();
            check(((bits >> 12) as f64 + 0.5) * 0.5f64.powi(52));
            check(1.0 - ((bits >> 12) as f64 + 0.5) * 0.5f64.powi(52 + (bits % 50) as i32));
            check(((bits >> 12) as f64 + 0.5) * 0.5f64.powi(47));
        }
        for x in [0.5f64.powi(53), 1.0 - 0.5f64.powi(53), std::f64::consts::FRAC_1_SQRT_2, 1.0, 37.0] {
            check(x);
        }
    }
}
