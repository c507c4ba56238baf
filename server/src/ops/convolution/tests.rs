use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::ops::testing::{Backwards, Numbers, Threads, bits, exact, relative_error};

/// Sizes of one random call.
#[derive(Clone, Debug)]
pub struct Setting {
    pub attributes: Attributes,
    pub batch: usize,
    pub rows: usize,
    pub groups: usize,
    pub taps: usize,
    pub seed: u64,
}

prop_compose! {
    /// Any call.
    pub fn settings()(
        side in 0..2_usize,
        group_size in prop_oneof![Just(1_usize), Just(16), 1..40_usize],
        groups in prop_oneof![1..6_usize, Just(40)],
        (batch, rows, taps) in (1..4_usize, prop_oneof![1..10_usize, Just(33)], 1..5_usize),
        seed in any::<u64>(),
    ) -> Setting {
        Setting { attributes: Attributes { side, group_size }, batch, rows, groups, taps, seed }
    }
}

pub struct Tensors<T> {
    pub x: Vec<T>,
    pub coefficients: Vec<T>,
    pub base: Vec<T>,
}

impl Setting {
    fn channels(&self) -> usize {
        self.groups * self.attributes.group_size
    }

    pub fn tensors<T: Element>(&self) -> Tensors<T> {
        let mut numbers = Numbers(self.seed);
        let rows = self.batch * self.rows;
        Tensors {
            x: numbers.elements(rows * self.channels(), 2.0),
            coefficients: numbers.elements(rows * 2 * self.taps * self.groups, 1.0),
            base: numbers.elements(2 * self.taps * self.channels(), 1.0),
        }
    }

    pub fn geometry(&self) -> Geometry {
        let [batch, rows, channels, taps, groups] = [
            self.batch,
            self.rows,
            self.channels(),
            self.taps,
            self.groups,
        ]
        .map(|size| size as i64);
        let shapes = Shapes {
            x: &[batch, rows, channels],
            coefficients: &[batch, rows, 2 * taps * groups],
            base: &[2, taps, channels],
        };
        Geometry::new(self.attributes, &shapes).unwrap()
    }

    pub fn run<T: Element>(&self, tensors: &Tensors<T>, pool: &impl Pool) -> Vec<T> {
        let inputs = Inputs {
            x: &tensors.x,
            coefficients: &tensors.coefficients,
            base: &tensors.base,
        };
        let mut output = vec![T::default(); tensors.x.len()];
        convolve(&self.geometry(), &inputs, &mut output, pool).unwrap();
        output
    }

    /// The definition, element by element in `f64`.
    fn reference<T: Element>(&self, tensors: &Tensors<T>) -> Vec<f64> {
        let [x, coefficients, base] =
            [&tensors.x, &tensors.coefficients, &tensors.base].map(|elements| exact(elements));
        let (channels, side) = (self.channels(), self.attributes.side);
        let mut output = Vec::new();
        for batch in 0..self.batch {
            for row in 0..self.rows {
                for channel in 0..channels {
                    let group = channel / self.attributes.group_size;
                    let mut sum = 0.0;
                    for tap in 0..self.taps {
                        let Some(source) = row.checked_sub(tap) else {
                            break;
                        };
                        let weight = base[(side * self.taps + tap) * channels + channel]
                            + coefficients[((batch * self.rows + row) * 2 + side)
                                * self.taps
                                * self.groups
                                + tap * self.groups
                                + group];
                        sum += weight * x[(batch * self.rows + source) * channels + channel];
                    }
                    output.push(sum);
                }
            }
        }
        output
    }

    fn check<T: Element>(&self, tolerance: f64) {
        let tensors = self.tensors::<T>();
        let error = relative_error(&self.run(&tensors, &Backwards), &self.reference(&tensors));
        assert!(error <= tolerance, "relative error {error:e} with {self:?}");
    }
}

proptest! {
    #[test]
    fn the_output_is_what_the_definition_says(setting in settings()) {
        setting.check::<f32>(1e-6);
        setting.check::<f16>(1e-3);
        setting.check::<bf16>(8e-3);
    }

    #[test]
    fn a_sequence_has_the_bits_it_has_alone_whatever_pads_it(setting in settings(), valid in 1..10_usize) {
        let mut tensors = setting.tensors::<f32>();
        let (channels, valid) = (setting.channels(), valid.min(setting.rows));
        // What pads a block must not reach its rows.
        for batch in 0..setting.batch {
            tensors.x[(batch * setting.rows + valid) * channels..(batch + 1) * setting.rows * channels].fill(f32::NAN);
        }
        let together = setting.run(&tensors, &Threads);
        let coefficient_width = 2 * setting.taps * setting.groups;
        let alone = Setting { batch: 1, rows: valid, ..setting.clone() };
        for batch in 0..setting.batch {
            let first = batch * setting.rows;
            let own = Tensors {
                x: tensors.x[first * channels..][..valid * channels].to_vec(),
                coefficients: tensors.coefficients[first * coefficient_width..][..valid * coefficient_width].to_vec(),
                base: tensors.base.clone(),
            };
            let output = alone.run(&own, &Backwards);
            prop_assert!(output.iter().all(|element| element.is_finite()));
            prop_assert_eq!(bits(&output), bits(&together[first * channels..][..valid * channels]));
        }
    }
}

#[test]
fn what_is_wrong_with_shapes_and_attributes_is_named() {
    let check = |attributes: Attributes, change: &dyn Fn(&mut Shapes<'_>), message: &str| {
        let mut shapes = Shapes {
            x: &[2, 4, 32],
            coefficients: &[2, 4, 24],
            base: &[2, 3, 32],
        };
        change(&mut shapes);
        assert_eq!(
            Geometry::new(attributes, &shapes).unwrap_err().to_string(),
            message
        );
    };
    let good = Attributes {
        side: 0,
        group_size: 8,
    };
    check(
        Attributes { side: 2, ..good },
        &|_| {},
        "attribute side is 2; allowed is 0 or 1",
    );
    check(
        Attributes {
            group_size: 0,
            ..good
        },
        &|_| {},
        "attribute group_size is 0; allowed is at least 1",
    );
    check(
        Attributes {
            group_size: 5,
            ..good
        },
        &|_| {},
        "input x has shape [2, 4, 32]; expected is a last dimension that is a multiple of group_size = 5",
    );
    check(
        good,
        &|shapes| shapes.x = &[4, 32],
        "input x has shape [4, 32]; expected is [batch, rows, channels]",
    );
    check(
        good,
        &|shapes| shapes.base = &[2, 0, 32],
        "input base has shape [2, 0, 32]; expected is [2, taps, 32] with at least 1 tap",
    );
    check(
        good,
        &|shapes| shapes.base = &[1, 3, 32],
        "input base has shape [1, 3, 32]; expected is [2, taps, 32] with at least 1 tap",
    );
    check(
        good,
        &|shapes| shapes.coefficients = &[2, 4, 12],
        "input coefficients has shape [2, 4, 12]; expected is [2, 4, 24]",
    );
}
