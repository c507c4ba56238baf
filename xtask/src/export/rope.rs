//! Rotary tables: cosine and sine of every position, in double precision with portable functions, so that every machine writes the same bytes.

use std::f64::consts::PI;

use rayon::prelude::*;

use crate::checkpoint::{Rope, RopeScaling};

/// Cosines and sines `[positions, head_dim / 2]`, row-major.
pub struct Tables {
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
}

/// Computes the tables for positions from 0.
pub fn tables(rope: &Rope, head_dim: usize, positions: usize) -> Tables {
    let (frequencies, magnitude) = frequencies(rope, head_dim);
    let table = |function: fn(f64) -> f64| {
        (0..positions)
            .into_par_iter()
            .flat_map_iter(|position| {
                frequencies.iter().map(move |frequency| {
                    (function(position as f64 * frequency) * magnitude) as f32
                })
            })
            .collect()
    };
    Tables {
        cos: table(libm::cos),
        sin: table(libm::sin),
    }
}

/// Radians per position of each channel pair, and the factor of cosine and sine.
fn frequencies(rope: &Rope, head_dim: usize) -> (Vec<f64>, f64) {
    let base: Vec<f64> = (0..head_dim / 2)
        .map(|pair| 1.0 / libm::pow(rope.theta, (2 * pair) as f64 / head_dim as f64))
        .collect();
    match rope.scaling {
        RopeScaling::None => (base, 1.0),
        RopeScaling::Linear { factor } => (base.iter().map(|f| f / factor).collect(), 1.0),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let context = original_context as f64;
            let scaled = |&frequency: &f64| {
                let wavelength = 2.0 * PI / frequency;
                if wavelength < context / high_freq_factor {
                    frequency
                } else if wavelength > context / low_freq_factor {
                    frequency / factor
                } else {
                    let kept = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - kept) * frequency / factor + kept * frequency
                }
            };
            (base.iter().map(scaled).collect(), 1.0)
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => {
            // The channel pair (as a real number) that turns `rotations` times within the original context.
            let pair_of = |rotations: f64| {
                head_dim as f64 * libm::log(original_context as f64 / (rotations * 2.0 * PI))
                    / (2.0 * libm::log(rope.theta))
            };
            let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
            if truncate {
                (low, high) = (libm::floor(low), libm::ceil(high));
            }
            low = low.max(0.0);
            high = high.min((head_dim - 1) as f64);
            if low == high {
                high += 0.001;
            }
            let scaled = |(pair, frequency): (usize, &f64)| {
                let interpolated = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                interpolated * frequency / factor + (1.0 - interpolated) * frequency
            };
            let frequencies = base.iter().enumerate().map(scaled).collect();
            (frequencies, attention_factor)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scaling: RopeScaling, expect: &[(usize, f64)], magnitude: f64) {
        let rope = Rope {
            theta: 10_000.0,
            scaling,
        };
        let (frequencies, factor) = frequencies(&rope, 64);
        assert_eq!(factor, magnitude);
        for &(pair, frequency) in expect {
            let relative = (frequencies[pair] / frequency - 1.0).abs();
            assert!(
                relative < 1e-6,
                "pair {pair}: {} is not {frequency}",
                frequencies[pair]
            );
        }
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let factor = 4.0;
        check(
            RopeScaling::Linear { factor },
            &[(0, 0.25), (16, 0.0025)],
            1.0,
        );
    }

    #[test]
    fn llama3_scaling_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 512,
        };
        let expect = [
            (0, 1.0),
            (10, 0.056234132519034905),
            (14, 0.004552029990871861),
            (17, 0.0009373677616655698),
            (31, 1.666901790204155e-05),
        ];
        check(scaling, &expect, 1.0);
    }

    #[test]
    fn yarn_blends_between_its_bounds_rounded_or_not() {
        let yarn = |truncate| RopeScaling::Yarn {
            factor: 8.0,
            original_context: 512,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
            truncate,
        };
        let rounded = [
            (0, 1.0),
            (6, 0.14192037599349094),
            (10, 0.029739204697566538),
            (15, 0.0025644642926217764),
            (31, 1.666901790204155e-05),
        ];
        check(yarn(true), &rounded, 1.25);
        let exact = [
            (6, 0.14225970581436242),
            (10, 0.02864096630206081),
            (15, 0.0019466815370847827),
        ];
        check(yarn(false), &exact, 1.25);
    }

    #[test]
    fn tables_hold_one_row_per_position() {
        let rope = Rope {
            theta: 100.0,
            scaling: RopeScaling::None,
        };
        let tables = tables(&rope, 4, 3);
        // Frequencies are 1 and 1/10.
        let angles = [0.0, 0.0, 1.0, 0.1, 2.0, 0.2f64];
        let near = |table: &[f32], function: fn(f64) -> f64| {
            table.len() == 6
                && table
                    .iter()
                    .zip(angles)
                    .all(|(&value, angle)| (f64::from(value) - function(angle)).abs() < 1e-7)
        };
        assert!(near(&tables.cos, f64::cos));
        assert!(near(&tables.sin, f64::sin));
    }
}
