//! Mistakes that an exporter can make, each made on purpose: every one must show in the goldens.

use xtask::checkpoint::{DraftCheckpoint, DraftConfig, Weights};

use super::goldens::{all_differences, all_differences_of};
use super::support::*;

/// The weights of a draft with some of them changed.
struct Changed {
    inner: Box<dyn Weights>,
    change: fn(&dyn Weights, &str) -> Option<Vec<f32>>,
}

impl Weights for Changed {
    fn names(&self) -> Vec<String> {
        self.inner.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.inner.shape(name)
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        match (self.change)(self.inner.as_ref(), name) {
            Some(values) => Ok(values),
            None => self.inner.load(name),
        }
    }
}

type Change = fn(&dyn Weights, &str) -> Option<Vec<f32>>;

fn config(change: impl Fn(&mut DraftConfig) + 'static) -> Mistake {
    Box::new(move |checkpoint| change(&mut checkpoint.config))
}

fn weights(change: Change) -> Mistake {
    Box::new(move |checkpoint| {
        let none: Box<dyn Weights> = Box::new(Nothing);
        checkpoint.weights = Box::new(Changed {
            inner: std::mem::replace(&mut checkpoint.weights, none),
            change,
        });
    })
}

struct Nothing;

impl Weights for Nothing {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn shape(&self, _: &str) -> Option<Vec<usize>> {
        None
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        anyhow::bail!("there is no {name}")
    }
}

type Mistake = Box<dyn Fn(&mut DraftCheckpoint)>;

/// The halves of a tensor in the other order.
fn swapped_halves(mut values: Vec<f32>) -> Vec<f32> {
    let half = values.len() / 2;
    values.rotate_left(half);
    values
}

fn ones_for(part: &'static str) -> Change {
    match part {
        "hidden_norm" => |inner, name| {
            (name == "hidden_norm.weight").then(|| vec![1.0; inner.shape(name).unwrap()[0]])
        },
        _ => |inner, name| {
            name.ends_with("k_norm.weight")
                .then(|| vec![1.0; inner.shape(name).unwrap()[0]])
        },
    }
}

/// What is done wrong, and the goldens in which it can be seen.
fn mistakes() -> Vec<(&'static str, &'static [&'static str], Mistake)> {
    const ALL: &[&str] = &DRAFTS;
    const WINDOWS: &[&str] = &["dflash1-swa-tiny", "dflash2-tiny", "dflash2-scaled-tiny"];
    const SECOND: &[&str] = &["dflash2-tiny", "dflash2-scaled-tiny"];
    const SCALED: &[&str] = &["dflash2-scaled-tiny"];
    vec![
        (
            "causality flipped",
            ALL,
            config(|config| {
                for layer in &mut config.attention {
                    layer.causal = !layer.causal;
                }
            }),
        ),
        (
            "no window",
            WINDOWS,
            config(|config| {
                for layer in &mut config.attention {
                    layer.window = None;
                }
            }),
        ),
        (
            "window one too wide",
            WINDOWS,
            config(|config| {
                for layer in &mut config.attention {
                    layer.window = layer.window.map(|window| window + 1);
                }
            }),
        ),
        (
            "window one too narrow",
            WINDOWS,
            config(|config| {
                for layer in &mut config.attention {
                    layer.window = layer.window.map(|window| window - 1);
                }
            }),
        ),
        (
            "another rotary base",
            ALL,
            config(|config| config.rope.theta *= 2.0),
        ),
        (
            "hidden_norm left out",
            ALL,
            weights(ones_for("hidden_norm")),
        ),
        ("k_norm left out", ALL, weights(ones_for("k_norm"))),
        (
            "taps in another order",
            ALL,
            weights(|inner, name| {
                (name == "fc.weight").then(|| {
                    let shape = inner.shape(name).unwrap();
                    let rows = inner.load(name).unwrap();
                    let turned = rows.chunks(shape[1]).flat_map(|row| {
                        let mut row = row.to_vec();
                        row.rotate_left(shape[0]);
                        row
                    });
                    turned.collect()
                })
            }),
        ),
        (
            "sides of the convolutions swapped",
            SECOND,
            weights(|inner, name| {
                (name.ends_with("base_kernel") || name.ends_with("kernel_projection.weight"))
                    .then(|| swapped_halves(inner.load(name).unwrap()))
            }),
        ),
        (
            "taps of the convolutions swapped",
            SECOND,
            weights(|inner, name| {
                name.ends_with("base_kernel").then(|| {
                    let shape = inner.shape(name).unwrap();
                    let kernel = inner.load(name).unwrap();
                    let turned = kernel.chunks(shape[1] * shape[2]).flat_map(|side| {
                        let mut side = side.to_vec();
                        side.rotate_left(shape[2]);
                        side
                    });
                    turned.collect()
                })
            }),
        ),
        (
            "codebooks swapped",
            SECOND,
            weights(|inner, name| {
                let other = match name.strip_prefix("candidate_selector.")? {
                    "predecessor_codebook" => "successor_codebook",
                    "successor_codebook" => "predecessor_codebook",
                    _ => return None,
                };
                Some(inner.load(&format!("candidate_selector.{other}")).unwrap())
            }),
        ),
        (
            "no selector",
            SECOND,
            weights(|inner, name| {
                let is_projection = name == "candidate_selector.hidden_projection.weight";
                is_projection.then(|| vec![0.0; inner.shape(name).unwrap().iter().product()])
            }),
        ),
        (
            "no embedding scale",
            SCALED,
            config(|config| config.input_embedding_scale = 1.0),
        ),
        (
            "no output multiplier",
            SCALED,
            config(|config| config.output_multiplier = 1.0),
        ),
        (
            "no soft cap",
            SCALED,
            config(|config| config.logit_softcap = None),
        ),
    ]
}

#[test]
fn every_known_mistake_shows_in_the_goldens() {
    for form in FORMS {
        for (what, names, mistake) in mistakes() {
            for name in names {
                let (mut checkpoint, cases) = (draft(name), Cases::of(name));
                mistake(&mut checkpoint);
                let mut graph = Graph::load(&checkpoint, &cases, &options(form, true), 1);
                let found = all_differences(&mut graph, &cases);
                assert!(
                    !found.is_empty(),
                    "{name}, {form:?} passes although there is this mistake: {what}"
                );
            }
        }
    }
}

#[test]
fn neighbouring_channels_rotated_with_each_other_show_in_the_goldens() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        for form in FORMS {
            let options = options(form, true);
            let mut graph = Graph::load_changed(&checkpoint, &cases, &options, 1, |model| {
                let nodes = &mut model.graph.as_mut().unwrap().node;
                let attributes = nodes.iter_mut().flat_map(|node| &mut node.attribute);
                let mut changed = 0;
                for attribute in attributes {
                    if attribute.name.ends_with("interleaved") {
                        attribute.i = 1;
                        changed += 1;
                    }
                }
                assert!(changed > 0);
            });
            assert!(
                !all_differences(&mut graph, &cases).is_empty(),
                "{name}, {form:?}"
            );
        }
    }
}

#[test]
fn block_positions_off_by_one_show_in_the_goldens() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        for form in FORMS {
            let mut graph = Graph::load(&checkpoint, &cases, &options(form, true), 1);
            for shift in [-1, 1] {
                let found = all_differences_of(&mut graph, &cases, |slot| {
                    slot.anchor_position += shift;
                });
                assert!(!found.is_empty(), "{name}, {form:?}: {shift}");
            }
        }
    }
}
