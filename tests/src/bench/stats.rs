//! Samples and what is told of them: medians and quartiles, because a machine that does other things has outliers.

use serde::Serialize;

/// What is told of a set of samples, in the samples' unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// How many samples.
    pub samples: usize,
    /// Smallest.
    pub min: f64,
    /// First quartile.
    pub q1: f64,
    pub median: f64,
    /// Third quartile.
    pub q3: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// Summary of samples; `None` without any, or with one that is not a finite number.
    #[must_use]
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.iter().any(|s| !s.is_finite()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            samples: sorted.len(),
            min: *sorted.first()?,
            q1: quantile(&sorted, 1)?,
            median: quantile(&sorted, 2)?,
            q3: quantile(&sorted, 3)?,
            max: *sorted.last()?,
        })
    }
}

/// The smallest sample that at least 99 of 100 samples do not exceed; `None` without any.
#[must_use]
pub fn p99(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * 99).div_ceil(100).checked_sub(1)?).copied()
}

/// The quartile of sorted samples, linear between the two nearest.
fn quantile(sorted: &[f64], quarters: usize) -> Option<f64> {
    let position = sorted.len().checked_sub(1)? * quarters;
    let (below, rest) = (position / 4, position % 4);
    let low = *sorted.get(below)?;
    let high = *sorted.get(below + usize::from(rest > 0))?;
    // `rest` is 0 to 3.
    Some(low + (high - low) * f64::from(u8::try_from(rest).ok()?) / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_the_samples() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(summary, Summary { samples: 4, min: 1.0, q1: 1.75, median: 2.5, q3: 3.25, max: 4.0 });
        let one = Summary::of(&[7.0]).unwrap();
        assert_eq!((one.min, one.median, one.max), (7.0, 7.0, 7.0));
    }

    #[test]
    fn one_sample_in_a_hundred_may_exceed_p99() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(p99(&hundred), Some(99.0));
        assert_eq!(p99(&[1.0, 3.0, 2.0]), Some(3.0));
        assert_eq!(p99(&[]), None);
    }

    #[test]
    fn nothing_and_nonsense_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
    }
}
