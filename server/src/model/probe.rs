//! The width probe: what this graph, on this machine, with this library, can promise about equal output.
//!
//! Kernels may be chosen by the number of rows they are given, so a token's logits can depend on how many tokens were fed with it.
//! At load the probe feeds a fixed sequence whole and in the widths and batches the engine will use, and compares logits bit for bit.
//! It finds the weakest [`WidthRule`] under which all of them are equal, or says that there is none.

use super::{Batch, BatchRow, ModelError, Target};

/// Widths that are compared: every one that a block of up to 16 can have, and some around the tile sizes of common kernels.
const WIDTHS: [usize; 19] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32, 33,
];

/// Widths that are compared again at another position and in batches.
const FEW_WIDTHS: [usize; 4] = [1, 2, 3, 8];

/// How far behind the shared beginning widths are tried in a lone sequence, and which ones.
const TRIALS: [(usize, &[usize]); 2] = [(0, &WIDTHS), (11, &FEW_WIDTHS)];

/// Length of the shared beginning of every sequence, which is fed to all slots at once; half of the sequence where the context is short.
const PREFIX_TOKENS: usize = 16;

/// Length of the fixed sequence.
const SEQUENCE_TOKENS: usize = 64;

/// How far equal output can be promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LosslessClass {
    /// Under the width rule every width and batch gives bit-equal logits.
    Exact,
    /// Rows do not influence each other, but kernels chosen by shape give slightly different logits; a fixed shape would be exact.
    NearTie,
    /// A token's logits depend on other rows of the same pass (for example through a quantisation scale shared by them).
    None,
}

impl LosslessClass {
    /// The name that interfaces show.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::NearTie => "near-tie",
            Self::None => "none",
        }
    }
}

/// How many rows a pass must have so that its logits do not depend on how many it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WidthRule {
    /// Fewest rows of a sequence, and fewest rows of logits, in a pass.
    pub min_width: usize,
    /// Whether widths are rounded up to even numbers.
    pub even: bool,
}

impl WidthRule {
    /// From the weakest to the strictest.
    const ALL: [Self; 3] = [
        Self {
            min_width: 1,
            even: false,
        },
        Self {
            min_width: 2,
            even: false,
        },
        Self {
            min_width: 2,
            even: true,
        },
    ];

    /// The width of a pass that has `rows` rows to compute.
    pub fn width(self, rows: usize) -> usize {
        let width = rows.max(self.min_width);
        if self.even {
            width.next_multiple_of(2)
        } else {
            width
        }
    }

    fn allows(self, width: usize) -> bool {
        self.width(width) == width
    }
}

/// What the probe found.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeReport {
    /// How far equal output can be promised.
    pub class: LosslessClass,
    /// The weakest rule that makes all compared passes equal, or the strictest one when none does.
    pub rule: WidthRule,
    /// Largest difference of a logit that remains under the rule; 0 when the class is exact.
    pub noise: f32,
    /// Forward passes the probe ran.
    pub passes: usize,
}

/// Runs the probe. All slots must be free; their cache contents are overwritten.
///
/// # Errors
///
/// A pass failed, or the reference pass gave logits that are not finite.
pub fn probe(target: &mut dyn Target) -> Result<ProbeReport, ModelError> {
    let mut probe = Probe::new(target)?;
    let influence = probe.influence_of_other_rows()?;
    let differences = probe.differences_by_shape()?;
    let remaining = |rule: WidthRule| {
        let allowed = differences
            .iter()
            .filter(|found| rule.allows(found.width) && rule.allows(found.logit_width));
        allowed.map(|found| found.difference).fold(0.0, f32::max)
    };
    let rule = WidthRule::ALL
        .into_iter()
        .find(|&rule| remaining(rule) == 0.0);
    let strictest = WidthRule::ALL[WidthRule::ALL.len() - 1];
    let (class, rule, noise) = match rule {
        _ if influence > 0.0 => (
            LosslessClass::None,
            strictest,
            influence.max(remaining(strictest)),
        ),
        Some(rule) => (LosslessClass::Exact, rule, 0.0),
        None => (LosslessClass::NearTie, strictest, remaining(strictest)),
    };
    Ok(ProbeReport {
        class,
        rule,
        noise,
        passes: probe.passes,
    })
}

/// Largest difference to the reference in one shape.
struct Difference {
    width: usize,
    logit_width: usize,
    difference: f32,
}

struct Probe<'a> {
    target: &'a mut dyn Target,
    sequence: Vec<u32>,
    /// Logits of the whole sequence fed at once, `[sequence, vocab_size]`.
    reference: Vec<f32>,
    passes: usize,
}

impl<'a> Probe<'a> {
    fn new(target: &'a mut dyn Target) -> Result<Self, ModelError> {
        let shape = target.shape();
        let length = SEQUENCE_TOKENS.min(shape.context_tokens / 2 * 2);
        let sequence = fixed_sequence(length, shape.vocab_size);
        let mut probe = Self {
            target,
            sequence,
            reference: Vec::new(),
            passes: 0,
        };
        let whole = probe.sequence.clone();
        probe.reference = probe.run(
            0,
            &[BatchRow {
                start: 0,
                tokens: whole,
                logits: 0..length,
            }],
            length,
            length,
        )?;
        if probe
            .reference
            .iter()
            .any(|logit| logit.is_nan() || *logit == f32::INFINITY)
        {
            return Err(ModelError::Batch(
                "the model returned non-finite logits for the probe's fixed sequence".to_owned(),
            ));
        }
        Ok(probe)
    }

    /// Runs a pass and returns the logits asked for, row after row.
    fn run(
        &mut self,
        first_slot: usize,
        rows: &[BatchRow],
        width: usize,
        logit_width: usize,
    ) -> Result<Vec<f32>, ModelError> {
        self.passes += 1;
        self.target.forward(&Batch {
            first_slot,
            rows: rows.to_vec(),
            width,
            logit_width,
            taps: false,
        })?;
        let mut logits = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            for logit in 0..row.logits.len() {
                logits.extend_from_slice(self.target.logits(index, logit));
            }
        }
        Ok(logits)
    }

    /// The part of the sequence at `start`, as a row that wants the logits of its last `logits` tokens.
    fn row(&self, start: usize, width: usize, logits: usize) -> BatchRow {
        BatchRow {
            start,
            tokens: self.sequence[start..start + width].to_vec(),
            logits: width - logits..width,
        }
    }

    fn reference_rows(&self, start: usize, end: usize) -> &[f32] {
        let vocab_size = self.target.shape().vocab_size;
        &self.reference[start * vocab_size..end * vocab_size]
    }

    /// Feeds one token before, and beside, others that should not matter to it: same shapes, other content.
    fn influence_of_other_rows(&mut self) -> Result<f32, ModelError> {
        let mut influence = 0.0f32;
        let width = 8.min(self.sequence.len());
        let slots = self.target.shape().slots.min(2);
        let vocab_size = self.target.shape().vocab_size as u32;
        let mut first: Option<Vec<f32>> = None;
        for variant in 0..4u32 {
            let token = self.sequence[0];
            let others = |row: u32| {
                (1..width as u32).map(move |index| {
                    (index * 7919 + row * 104_729 + variant * 1_299_709) % vocab_size
                })
            };
            let tested = BatchRow {
                start: 0,
                tokens: std::iter::once(token).chain(others(0)).collect(),
                logits: 0..1,
            };
            let beside = BatchRow {
                start: 0,
                tokens: others(1).chain(others(2)).take(width).collect(),
                logits: 0..0,
            };
            let rows: Vec<BatchRow> = std::iter::once(tested)
                .chain(std::iter::repeat_n(beside, slots - 1))
                .collect();
            let logits = self.run(0, &rows, width, 2)?;
            match &first {
                None => first = Some(logits),
                Some(first) => influence = influence.max(largest_difference(first, &logits)),
            }
        }
        Ok(influence)
    }

    fn differences_by_shape(&mut self) -> Result<Vec<Difference>, ModelError> {
        let mut found = Vec::new();
        let (slots, length, prefix) = (
            self.target.shape().slots,
            self.sequence.len(),
            PREFIX_TOKENS.min(self.sequence.len() / 2),
        );

        let prefix_rows = vec![self.row(0, prefix, 1); slots];
        let logits = self.run(0, &prefix_rows, prefix, 2)?;
        self.compare(&mut found, prefix, 2, prefix - 1, prefix, slots, &logits);
        for (behind, widths) in TRIALS {
            let start = prefix + behind;
            // Cache rows left by a width that differs must not reach the next start.
            if length > prefix {
                self.run(
                    0,
                    &[self.row(prefix, length - prefix, 1)],
                    length - prefix,
                    2,
                )?;
            }
            for width in widths
                .iter()
                .copied()
                .filter(|width| start + width <= length)
            {
                let logits = self.run(0, &[self.row(start, width, width)], width, width)?;
                self.compare(&mut found, width, width, start, start + width, 1, &logits);
            }
        }
        for (width, logit_width) in [(16, 1), (16, 2), (33, 1), (33, 2)] {
            if prefix + width <= length {
                let logits = self.run(0, &[self.row(prefix, width, 1)], width, logit_width)?;
                self.compare(
                    &mut found,
                    width,
                    logit_width,
                    prefix + width - 1,
                    prefix + width,
                    1,
                    &logits,
                );
            }
        }
        let mut batches = vec![2, 3, slots];
        batches.retain(|&batch| batch > 1 && batch <= slots);
        batches.sort_unstable();
        batches.dedup();
        for batch in batches {
            for width in FEW_WIDTHS
                .into_iter()
                .filter(|width| prefix + width <= length)
            {
                let rows = vec![self.row(prefix, width, width); batch];
                let logits = self.run(slots - batch, &rows, width, width)?;
                self.compare(
                    &mut found,
                    width,
                    width,
                    prefix,
                    prefix + width,
                    batch,
                    &logits,
                );
            }
        }
        Ok(found)
    }

    /// Compares `copies` equal rows of logits with the reference rows `start..end`.
    #[expect(
        clippy::too_many_arguments,
        reason = "a shape and a range, used in this file only"
    )]
    fn compare(
        &self,
        found: &mut Vec<Difference>,
        width: usize,
        logit_width: usize,
        start: usize,
        end: usize,
        copies: usize,
        logits: &[f32],
    ) {
        let reference = self.reference_rows(start, end);
        assert_eq!(
            logits.len(),
            reference.len() * copies,
            "every copy has the rows of the reference"
        );
        let difference = logits
            .chunks_exact(reference.len())
            .map(|copy| largest_difference(reference, copy))
            .fold(0.0, f32::max);
        found.push(Difference {
            width,
            logit_width,
            difference,
        });
    }
}

/// Largest absolute difference; 0 only for bit-equal slices.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let differing = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits());
    differing
        .map(|(a, b)| (a - b).abs().max(f32::MIN_POSITIVE))
        .fold(0.0, |largest, difference| {
            if difference > largest || difference.is_nan() {
                difference
            } else {
                largest
            }
        })
}

/// Tokens spread over the vocabulary by a multiplicative step; the same for every run of the same model.
fn fixed_sequence(length: usize, vocab_size: usize) -> Vec<u32> {
    (0..length as u64)
        .map(|index| ((index * 2_654_435_761 + 12_345) % vocab_size as u64) as u32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fake::FakeTarget;

    #[test]
    fn finds_the_weakest_rule_that_makes_all_shapes_equal() {
        type Disturbance = fn(&Batch) -> f32;
        let cases: [(&str, Disturbance, LosslessClass, usize, bool); 5] = [
            ("equal everywhere", |_| 0.0, LosslessClass::Exact, 1, false),
            (
                "one-row passes differ",
                |batch| if batch.width == 1 { 0.5 } else { 0.0 },
                LosslessClass::Exact,
                2,
                false,
            ),
            (
                "one row of logits differs",
                |batch| if batch.logit_width == 1 { 0.5 } else { 0.0 },
                LosslessClass::Exact,
                2,
                false,
            ),
            (
                "odd widths differ",
                |batch| if batch.width % 2 == 1 { 0.5 } else { 0.0 },
                LosslessClass::Exact,
                2,
                true,
            ),
            (
                "every width differs",
                |batch| batch.width as f32,
                LosslessClass::NearTie,
                2,
                true,
            ),
        ];
        for (name, disturb, class, min_width, even) in cases {
            let report = probe(&mut FakeTarget::disturbed(disturb)).expect(name);
            assert_eq!(
                (report.class, report.rule),
                (class, WidthRule { min_width, even }),
                "{name}"
            );
            assert_eq!(report.noise > 0.0, class != LosslessClass::Exact, "{name}");
        }
    }

    #[test]
    fn a_batch_that_differs_from_a_lone_sequence_is_not_exact() {
        let report = probe(&mut FakeTarget::disturbed(|batch| batch.rows.len() as f32))
            .expect("the probe runs");
        assert_eq!(report.class, LosslessClass::NearTie);
    }

    #[test]
    fn influence_between_rows_is_class_none_even_when_shapes_agree() {
        let by_content: fn(&Batch) -> f32 = |batch| {
            batch
                .rows
                .iter()
                .flat_map(|row| &row.tokens)
                .map(|&token| token as f32)
                .fold(0.0, f32::max)
        };
        let report = probe(&mut FakeTarget::disturbed(by_content)).expect("the probe runs");
        assert_eq!(report.class, LosslessClass::None);
    }
}
