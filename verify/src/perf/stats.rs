//! Means with their uncertainty.
//!
//! Rates are compared as logarithms of ratios, one for each pair of neighbouring measurements: what slows both of a pair falls out, twice as fast and
//! half as fast are equally far from equal, and the mean over pairs has Student's t distribution. No figure depends on a random draw, so a report can
//! be computed again from its pairs.

use serde::Serialize;

/// A geometric mean with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom (Student, 1908; as tabled in any textbook).
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];
/// The same for infinitely many, and how it is approached.
const NORMAL: f64 = 1.960;

fn student(degrees: usize) -> f64 {
    match STUDENT.get(degrees.wrapping_sub(1)) {
        Some(quantile) => *quantile,
        // The first two terms of the Cornish-Fisher expansion; off by less than 0.0005 from 31 on.
        None => {
            let degrees = degrees as f64;
            let z = NORMAL;
            z + (z.powi(3) + z) / (4.0 * degrees)
                + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * degrees.powi(2))
        }
    }
}

/// The geometric mean of positive ratios; `None` for fewer than two, which have no spread.
pub fn interval(ratios: &[f64]) -> Option<Interval> {
    if ratios.len() < 2 {
        return None;
    }
    let count = ratios.len() as f64;
    let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    let mean = logs.iter().sum::<f64>() / count;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let error = (squares / (count - 1.0) / count).sqrt();
    let reach = student(ratios.len() - 1) * error;
    Some(Interval {
        mean: mean.exp(),
        low: (mean - reach).exp(),
        high: (mean + reach).exp(),
    })
}

/// The value that a share of the values is not above, `None` of none.
pub fn percentile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(share * last as f64).round() as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_that_of_student_on_logarithms() {
        assert_eq!(interval(&[1.2]), None);
        let equal = interval(&[2.0, 2.0, 2.0]).unwrap();
        assert!((equal.mean - 2.0).abs() < 1e-12 && (equal.high - equal.low).abs() < 1e-12);
        // Logs -0.1, 0, 0.1: mean 0, standard error 0.1 / sqrt 3, t(2) = 4.303.
        let found = interval(&[(-0.1_f64).exp(), 1.0, 0.1_f64.exp()]).unwrap();
        let reach = 4.303 * 0.1 / 3.0_f64.sqrt();
        assert!((found.mean - 1.0).abs() < 1e-12);
        assert!((found.high.ln() - reach).abs() < 1e-12, "{found:?}");
        assert!((found.low.ln() + reach).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn the_quantile_goes_on_smoothly_behind_its_table() {
        assert!((student(31) - 2.0395).abs() < 5e-4);
        assert!((student(60) - 2.0003).abs() < 5e-4);
        assert!((student(1_000_000) - 1.96).abs() < 1e-3);
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 0.5), Some(2.0));
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 1.0), Some(3.0));
    }
}
