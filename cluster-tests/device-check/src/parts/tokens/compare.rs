//! How far logits and tokens are from those they should be.

/// Largest and root-mean-square difference. What is not a number stays one.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::parts) struct Differences {
    pub(in crate::parts) largest: f64,
    squares: f64,
    /// Of what they were compared with.
    squares_of_expected: f64,
    count: usize,
}

impl Differences {
    /// Between rows, of which there are as many.
    pub(in crate::parts) fn between(got: &[Vec<f32>], expected: &[Vec<f32>]) -> Differences {
        let mut all = Differences::default();
        if got.len() != expected.len() {
            all.largest = f64::NAN;
        }
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            let difference = (f64::from(*got) - f64::from(*expected)).abs();
            all.largest = worst([all.largest, difference]);
            all.squares += difference.powi(2);
            all.squares_of_expected += f64::from(*expected).powi(2);
            all.count += 1;
        }
        all
    }

    pub(in crate::parts) fn rms(&self) -> f64 {
        (self.squares / self.count as f64).sqrt()
    }

    /// By the root mean square of what was expected.
    pub(in crate::parts) fn relative(&self) -> f64 {
        (self.squares / self.squares_of_expected).sqrt()
    }
}

/// The largest of several numbers that are not negative, and NaN where one is.
pub(in crate::parts) fn worst(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, larger)
}

/// How much likelier than `token` the likeliest is.
pub(in crate::parts) fn margin(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().map(|logit| f64::from(*logit)).fold(f64::NEG_INFINITY, larger);
    logits.get(token as usize).map_or(f64::NAN, |logit| largest - f64::from(*logit))
}

/// Unlike [`f64::max`], keeps NaN.
fn larger(most: f64, value: f64) -> f64 {
    if most.is_nan() || value <= most { most } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_the_largest_and_the_mean_and_nan_stays() {
        let found = Differences::between(&[vec![1.0, 2.0], vec![3.0]], &[vec![1.0, 5.0], vec![-1.0]]);
        assert_eq!((found.largest, found.rms()), (4.0, (25.0f64 / 3.0).sqrt()));
        assert_eq!(found.relative(), (25.0f64 / 27.0).sqrt());
        let broken = Differences::between(&[vec![f32::NAN, 2.0]], &[vec![1.0, 2.0]]);
        assert!(broken.largest.is_nan() && broken.rms().is_nan());
        assert!(Differences::between(&[], &[vec![1.0]]).largest.is_nan(), "a row is missing");
    }

    #[test]
    fn the_worst_of_numbers_is_nan_where_one_is() {
        assert_eq!(worst([1.0, 3.0, 2.0]), 3.0);
        assert!(worst([1.0, f64::NAN, 2.0]).is_nan());
    }

    #[test]
    fn a_margin_is_the_distance_to_the_likeliest() {
        assert_eq!(margin(&[1.0, 4.0, 2.5], 2), 1.5);
        assert_eq!(margin(&[1.0, 4.0], 1), 0.0);
        assert!(margin(&[1.0], 7).is_nan() && margin(&[1.0, f32::NAN, 2.0], 0).is_nan());
    }
}
