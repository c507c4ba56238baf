//! The suite over the reference pair: every prompt once, in the rows of a covering array.

use anyhow::ensure;
use outrider_bundle::manifest::Precision;
use serde_json::json;

use super::cases::{
    self, Ask, Block, Drafter, REQUEST_FACTORS, Run, ServerKey, Switch, Vocabulary,
};
use super::covering;
use crate::prompts;
use crate::reference::precision_name;

/// Widths of blocks; the largest is the drafter's own.
pub const BLOCKS: [Block; 5] = cases::blocks([2, 3, 5, 8]);
/// Requests in flight.
pub const CONCURRENCIES: [usize; 3] = [1, 4, 8];
/// Numeric forms of the bundle.
pub const PRECISIONS: [Precision; 3] = [Precision::Fp32, Precision::Int8, Precision::Int4];

/// Prompts of a run, even when one at a time is asked.
const LEAST_PROMPTS: usize = 2;

/// How much of the suite is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Whether a row has no more prompts than its concurrency needs, and only rows of the int8 bundle are run.
    pub quick: bool,
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Most tokens of an answer with other drafters and with the switch flipped; `None` leaves those out.
    pub variant_tokens: Option<usize>,
}

impl Extent {
    /// All of it.
    pub const FULL: Self = Self {
        quick: false,
        max_tokens: 256,
        variant_tokens: Some(48),
    };

    /// What a test run has time for; other drafters and the switch are left to the tiny pair.
    pub const QUICK: Self = Self {
        quick: true,
        max_tokens: 24,
        variant_tokens: None,
    };
}

/// One row: what all its requests have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The kind of its prompts.
    pub kind: &'static str,
    /// Numeric form of the bundle.
    pub precision: Precision,
    /// Width of blocks.
    pub block: Block,
    /// Requests in flight.
    pub concurrency: usize,
    /// Values of [`REQUEST_FACTORS`].
    pub choices: [usize; 5],
}

/// The rows of the covering array over prompt kinds, bundles, widths of blocks, concurrency and [`REQUEST_FACTORS`].
pub fn rows() -> Vec<Row> {
    let row = |values: &Vec<usize>| Row {
        kind: prompts::KINDS[values[0]],
        precision: PRECISIONS[values[1]],
        block: BLOCKS[values[2]],
        concurrency: CONCURRENCIES[values[3]],
        choices: std::array::from_fn(|factor| values[4 + factor]),
    };
    covering::rows(&sizes()).iter().map(row).collect()
}

fn sizes() -> Vec<usize> {
    let mut sizes = vec![
        prompts::KINDS.len(),
        PRECISIONS.len(),
        BLOCKS.len(),
        CONCURRENCIES.len(),
    ];
    sizes.extend(REQUEST_FACTORS.iter().map(|(_, values)| values.len()));
    sizes
}

/// The runs over [`rows`].
pub fn runs(extent: Extent) -> anyhow::Result<Vec<Run>> {
    let mut rows = rows();
    if extent.quick {
        rows.retain(|row| row.precision == Precision::Int8);
    }
    let vocabulary = Vocabulary {
        // " the", ".", a line break and " of" in the reference vocabulary.
        bias: json!({ "260": 1.5, "30": -2, "198": -1, "282": -100 }),
        stop: json!(["4.", " because", "\n\n\n", "});"]),
    };
    let mut runs = Vec::new();
    for kind in prompts::KINDS {
        let prompts = prompts::of_kind(kind)?;
        let of_kind: Vec<&Row> = rows.iter().filter(|row| row.kind == kind).collect();
        for (place, row) in of_kind.iter().enumerate() {
            let dealt = prompts
                .iter()
                .enumerate()
                .skip(place)
                .step_by(of_kind.len());
            let most = match extent.quick {
                true => row.concurrency.max(LEAST_PROMPTS),
                false => usize::MAX,
            };
            let asks: Vec<Ask> = dealt
                .take(most)
                .map(|(number, prompt)| {
                    let (id, seed) = (prompt.id.clone(), 1000 + number);
                    let tokens = extent.max_tokens;
                    let choices = row.choices;
                    Ask::new(
                        id,
                        prompt.api,
                        &prompt.fields,
                        choices,
                        seed,
                        tokens,
                        &vocabulary,
                    )
                })
                .collect();
            ensure!(!asks.is_empty(), "no prompt is left for {row:?}");
            let mut factors = vec![("prompts", kind.to_owned())];
            factors.extend(cases::describe(row.choices));
            let run = |drafter, switch, limit_tokens, asks| Run {
                server: ServerKey {
                    drafter,
                    bundle: precision_name(row.precision),
                    block: row.block,
                },
                concurrency: row.concurrency,
                switch,
                factors: factors.clone(),
                limit_tokens,
                asks,
            };
            if let Some(limit) = extent.variant_tokens {
                let some: Vec<Ask> =
                    asks[..asks.len().min(row.concurrency.max(LEAST_PROMPTS))].to_vec();
                for (drafter, switch) in [
                    (Drafter::Trained, Switch::Flipped),
                    (Drafter::Random, Switch::On),
                    (Drafter::Wrong, Switch::On),
                ] {
                    runs.push(run(drafter, switch, Some(limit), some.clone()));
                }
            }
            // Last, so that the sort by server, which keeps the order, lets the switch be flipped in the middle of a server's life.
            runs.push(run(Drafter::Trained, Switch::On, None, asks));
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_pair_of_factor_values_meets_and_every_prompt_is_asked() {
        let rows = rows();
        let values: Vec<Vec<usize>> = rows
            .iter()
            .map(|row| {
                let place = |found: Option<usize>| found.expect("a value of the factor");
                let mut values = vec![
                    place(prompts::KINDS.iter().position(|&kind| kind == row.kind)),
                    place(PRECISIONS.iter().position(|&form| form == row.precision)),
                    place(BLOCKS.iter().position(|&block| block == row.block)),
                    place(
                        CONCURRENCIES
                            .iter()
                            .position(|&many| many == row.concurrency),
                    ),
                ];
                values.extend(row.choices);
                values
            })
            .collect();
        assert_eq!(covering::uncovered(&sizes(), &values), []);

        let runs = runs(Extent::FULL).unwrap();
        let main = runs
            .iter()
            .filter(|run| run.server.drafter == Drafter::Trained && run.switch == Switch::On);
        let asked: Vec<&str> = main
            .flat_map(|run| run.asks.iter().map(|ask| ask.id.as_str()))
            .collect();
        let different: HashSet<&str> = asked.iter().copied().collect();
        assert!(different.len() >= 200, "{} prompts", different.len());
        assert_eq!(
            asked.len(),
            different.len(),
            "a prompt is asked in two rows"
        );
        // With fewer requests than are in flight the concurrency would be another.
        for run in &runs {
            assert!(
                run.asks.len() >= run.concurrency.max(LEAST_PROMPTS),
                "{:?}",
                run.factors
            );
        }
    }
}
