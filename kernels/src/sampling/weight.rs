//! How likely a token is, relative to the best one: an integer, so that sums depend on no order.
//!
//! Everything is computed by single f32 operations, so that every device gets the same integers: candidates that end on
//! top-p end at the same token everywhere.

/// Weight of the likeliest token. Sums of up to 2^24 tokens fit, and what is lost by rounding down, below 2^-40 a
/// token, is less than two steps of an f32 `top_p` near 1 in a vocabulary of 200,000.
pub(super) const WHOLE: u64 = 1 << 40;

/// From here on weights are zero: e^-28 is less than 2^-40.
const DISTANCE_MAX: f32 = 28.0;

/// `floor(2^40 e^(logit - largest))`, from numbers that are not NaN. Infinities among themselves are not apart.
pub(super) fn weight(logit: f32, largest: f32) -> u64 {
    let distance = if logit == largest { 0.0 } else { largest - logit };
    if distance < DISTANCE_MAX { (exp_of_minus(distance) * WHOLE as f32) as u64 } else { 0 }
}

/// `e^-distance` for distances from 0 to 87: a whole power of two times the Taylor polynomial of degree 7 of the rest,
/// within 2^-22 of itself at 0 and within 2^-19 at 28 (the product with log2 e is rounded).
fn exp_of_minus(distance: f32) -> f32 {
    // 1.5 · 2^23: there is no place for a fraction beside it, so adding it rounds.
    const ROUNDER: f32 = 12_582_912.0;
    const COEFFICIENTS: [f32; 8] = [
        1.525_273_4e-5,
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        2.402_265e-1,
        6.931_472e-1,
        1.0,
    ];
    let x = distance * -std::f32::consts::LOG2_E;
    let whole = (x + ROUNDER) - ROUNDER;
    let fraction = x - whole;
    let sum = COEFFICIENTS.iter().skip(1).fold(COEFFICIENTS[0], |sum, next| sum * fraction + next);
    sum * f32::from_bits(((127 + whole as i32) as u32) << 23)
}

/// What top-p keeps of `mass`, at least 1: the rest is at most `1 - p` of it.
pub(super) fn mass_to_keep(mass: u64, p: f32) -> u64 {
    let budget = ((1.0 - f64::from(p)) * mass as f64) as u64;
    (mass - budget.min(mass)).max(1)
}

#[cfg(test)]
mod tests {
    use super::{DISTANCE_MAX, WHOLE, exp_of_minus, weight};

    #[test]
    fn the_exponential_is_as_near_as_it_says_and_falls() {
        let mut before = 1.0;
        for step in 0..280_000u32 {
            let distance = step as f32 * 1e-4;
            let (got, exact) = (exp_of_minus(distance), (-f64::from(distance)).exp());
            let bound = 2f64.powi(-22) + f64::from(distance) / 28.0 * 2f64.powi(-19);
            assert!((f64::from(got) - exact).abs() <= bound * exact, "e^-{distance} = {got}");
            assert!(got <= before, "e^-{distance} rises");
            before = got;
        }
        assert_eq!(exp_of_minus(0.0), 1.0);
    }

    #[test]
    fn weights_end_where_they_would_be_less_than_one() {
        assert_eq!(weight(3.0, 3.0), WHOLE);
        assert_eq!(weight(f32::INFINITY, f32::INFINITY), WHOLE);
        assert_eq!(weight(3.0, f32::INFINITY), 0);
        assert!(exp_of_minus(DISTANCE_MAX) * (WHOLE as f32) < 1.0);
        assert_eq!(weight(f32::NEG_INFINITY, 0.0), 0);
    }
}
