//! The trained tiny pair of `tests/goldens/dflash2-e2e-tiny`: what is recorded of it, its bundles, and the suite over it.
//!
//! It is small enough for the full product of all values.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use outrider_bundle::manifest::{Attention, Precision};
use outrider_verify::wire::Api;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::bad_drafter::BadDrafter;
use super::cases::{
    self, Ask, Block, Drafter, REQUEST_FACTORS, Run, ServerKey, Switch, Vocabulary,
};
use super::covering;
use super::reference_pair::{CONCURRENCIES, PRECISIONS};
use crate::checkpoint;
use crate::export;
use crate::random::Random;
use crate::reference::precision_name;
use crate::workspace::Workspace;

/// Where the pair is, relative to the workspace.
const DIRECTORY: &str = "tests/goldens/dflash2-e2e-tiny";
/// Widths of blocks; the largest is the drafter's own.
pub const BLOCKS: [Block; 5] = cases::blocks([2, 3, 5, 6]);
/// Most tokens of an answer, as in the recorded runs.
pub const ANSWER_TOKENS: usize = 40;
/// Prompts of each combination: two that are recorded and two at random.
const PROMPTS: usize = 4;
/// Prompts of each row of the covering array.
const PROMPTS_OF_ROW: usize = 8;

/// A recorded greedy run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Token ids of the answer.
    pub output: Vec<u32>,
    /// For each pass the number of tokens that were proposed.
    pub proposed: Vec<usize>,
    /// For each pass the number of tokens it gave; the last may give more than were left.
    pub accept_lengths: Vec<usize>,
}

/// Every recorded run.
pub fn recorded(workspace: &Workspace) -> anyhow::Result<Vec<Recorded>> {
    let file = workspace.root().join(DIRECTORY).join("cases.safetensors");
    let cannot = || format!("cannot read {}", file.display());
    let bytes = fs::read(&file).with_context(cannot)?;
    let tensors = SafeTensors::deserialize(&bytes).with_context(cannot)?;
    let integers = |name: String| -> anyhow::Result<Vec<i64>> {
        let tensor = tensors.tensor(&name).with_context(cannot)?;
        let (values, rest) = tensor.data().as_chunks::<8>();
        ensure!(rest.is_empty(), "{name} holds no 64-bit integers");
        Ok(values
            .iter()
            .map(|value| i64::from_le_bytes(*value))
            .collect())
    };
    let ids = |name: String| -> anyhow::Result<Vec<u32>> {
        let ids = integers(name)?.into_iter().map(u32::try_from);
        Ok(ids.collect::<Result<_, _>>()?)
    };
    let run = |run: usize| -> anyhow::Result<Recorded> {
        let accept_lengths = integers(format!("run{run}.accept_lengths"))?;
        let drafts = integers(format!("run{run}.drafts"))?;
        let width = drafts.len() / accept_lengths.len().max(1);
        Ok(Recorded {
            prompt: ids(format!("run{run}.prompt"))?,
            output: ids(format!("run{run}.output"))?,
            proposed: drafts
                .chunks(width.max(1))
                .map(|pass| pass.iter().filter(|&&id| id >= 0).count())
                .collect(),
            accept_lengths: accept_lengths
                .into_iter()
                .map(usize::try_from)
                .collect::<Result<_, _>>()?,
        })
    };
    (0..5).map(run).collect()
}

/// Writes the bundle of the pair into `out`.
pub fn export(
    workspace: &Workspace,
    precision: Precision,
    drafter: Drafter,
    out: &Path,
) -> anyhow::Result<PathBuf> {
    let directory = workspace.root().join(DIRECTORY);
    let target = checkpoint::open(&directory.join("target"))?;
    let mut draft = checkpoint::open_draft(&directory.join("draft"), &[])?;
    draft.weights = Box::new(BadDrafter {
        weights: draft.weights,
        drafter,
    });
    let options = export::Options {
        precision,
        attention: Attention::Native,
        taps: draft.config.target_layer_ids.clone(),
    };
    let draft_options = export::DraftOptions {
        precision,
        form: Attention::Native,
        vocabulary: None,
        stages: false,
    };
    export::write_pair(&target, &options, &draft, &draft_options, out)?;
    Ok(out.to_owned())
}

/// The full product: every drafter, bundle, width of blocks, concurrency, switch and combination of [`REQUEST_FACTORS`].
pub fn every_run(workspace: &Workspace) -> anyhow::Result<Vec<Run>> {
    let material = Material::read(workspace)?;
    let mut runs = Vec::new();
    for drafter in Drafter::ALL {
        for precision in PRECISIONS {
            for block in BLOCKS {
                for concurrency in CONCURRENCIES {
                    for switch in Switch::ALL {
                        let choices = cases::every_choice();
                        let asks = choices
                            .into_iter()
                            .flat_map(|choices| (0..PROMPTS).map(move |prompt| (choices, prompt)));
                        runs.push(Run {
                            server: ServerKey {
                                drafter,
                                bundle: precision_name(precision),
                                block,
                            },
                            concurrency,
                            switch,
                            factors: vec![("settings", "every combination".to_owned())],
                            limit_tokens: None,
                            asks: asks
                                .map(|(choices, prompt)| material.ask(choices, prompt))
                                .collect(),
                        });
                    }
                }
            }
        }
    }
    Ok(runs)
}

/// A covering array over the same values.
pub fn covering_runs(workspace: &Workspace) -> anyhow::Result<Vec<Run>> {
    let material = Material::read(workspace)?;
    let rows = covering::rows(&sizes());
    let run = |row: Vec<usize>| {
        let choices = std::array::from_fn(|factor| row[5 + factor]);
        Run {
            server: ServerKey {
                drafter: Drafter::ALL[row[0]],
                bundle: precision_name(PRECISIONS[row[1]]),
                block: BLOCKS[row[2]],
            },
            concurrency: CONCURRENCIES[row[3]],
            switch: Switch::ALL[row[4]],
            factors: cases::describe(choices),
            limit_tokens: None,
            asks: (0..PROMPTS_OF_ROW)
                .map(|prompt| material.ask(choices, prompt))
                .collect(),
        }
    };
    Ok(rows.into_iter().map(run).collect())
}

fn sizes() -> Vec<usize> {
    let mut sizes = vec![
        Drafter::ALL.len(),
        PRECISIONS.len(),
        BLOCKS.len(),
        CONCURRENCIES.len(),
        Switch::ALL.len(),
    ];
    sizes.extend(REQUEST_FACTORS.iter().map(|(_, values)| values.len()));
    sizes
}

/// What requests of the pair are made of.
struct Material {
    prompts: Vec<(String, Value)>,
    vocabulary: Vocabulary,
}

impl Material {
    fn read(workspace: &Workspace) -> anyhow::Result<Self> {
        let recorded = recorded(workspace)?;
        let tokenizer = workspace
            .root()
            .join(DIRECTORY)
            .join("target/tokenizer.json");
        let tokenizer: Value = serde_json::from_str(
            &fs::read_to_string(&tokenizer)
                .with_context(|| format!("cannot read {}", tokenizer.display()))?,
        )?;
        let vocabulary = tokenizer["model"]["vocab"]
            .as_object()
            .context("the tokenizer has no vocabulary")?;
        let text = |ids: &[u32]| -> String {
            let token = |id: &u32| vocabulary.iter().find(|(_, value)| **value == json!(id));
            ids.iter()
                .filter_map(|id| token(id).map(|(token, _)| token.as_str()))
                .collect()
        };
        let stop: Vec<String> = recorded
            .iter()
            .zip([17, 24, 31, 36])
            .map(|(run, place)| text(&run.output[place..place + 3]))
            .collect();
        let mut random = Random::new(5);
        let mut prompts = Vec::new();
        for (number, run) in recorded.iter().enumerate() {
            let fields = json!({ "prompt": run.prompt, "ignore_eos": true });
            prompts.push((format!("recorded prompt {number}"), fields));
            let ids: Vec<usize> = (0..3 + random.below(30))
                .map(|_| 2 + random.below(60))
                .collect();
            prompts.push((format!("random prompt {number}"), json!({ "prompt": ids })));
        }
        Ok(Self {
            prompts,
            vocabulary: Vocabulary {
                bias: json!({ "5": 1.5, "9": -100, "17": 1, "40": -2 }),
                stop: json!(stop),
            },
        })
    }

    fn ask(&self, choices: [usize; 5], prompt: usize) -> Ask {
        let (name, fields) = &self.prompts[prompt];
        let settings: Vec<String> = cases::describe(choices)
            .into_iter()
            .map(|(_, value)| value)
            .collect();
        Ask::new(
            format!("{name} ({})", settings.join(", ")),
            Api::Completions,
            fields,
            choices,
            100 + prompt,
            ANSWER_TOKENS,
            &self.vocabulary,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_full_product_is_full() {
        let runs = every_run(&Workspace::find().unwrap()).unwrap();
        let combinations: HashSet<String> = runs
            .iter()
            .flat_map(|run| {
                let of_run = format!("{:?} {} {:?}", run.server, run.concurrency, run.switch);
                run.asks
                    .iter()
                    .map(move |ask| format!("{of_run} {} {}", ask.fields, ask.stream))
            })
            .collect();
        let sizes: usize = sizes().iter().product();
        assert_eq!(combinations.len(), sizes * PROMPTS);
    }

    #[test]
    fn the_recorded_runs_are_those_of_the_readme() {
        let recorded = recorded(&Workspace::find().unwrap()).unwrap();
        assert_eq!(recorded.len(), 5);
        for run in recorded {
            assert_eq!(run.output.len(), 40);
            assert_eq!(run.proposed.len(), run.accept_lengths.len());
            // The prompt gives the first token, passes give the rest.
            assert!(run.accept_lengths.iter().sum::<usize>() >= 39);
        }
    }
}
