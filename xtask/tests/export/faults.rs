//! What can't be exported is refused by name, and nothing is left behind.

use std::fs;

use outrider_bundle::manifest::{Attention, Precision};
use outrider_bundle::{Manifest, VerifiedBundle};
use xtask::checkpoint::{Checkpoint, Weights};
use xtask::export::{Options, write_bundle};

use crate::support::*;

/// The weights of a checkpoint with one tensor changed.
struct Changed {
    inner: Box<dyn Weights>,
    name: &'static str,
    change: Change,
}

#[derive(Clone, Copy)]
enum Change {
    Missing,
    Extra,
    Flat,
    Holds(f32),
}

impl Weights for Changed {
    fn names(&self) -> Vec<String> {
        let mut names = self.inner.names();
        match self.change {
            Change::Missing => names.retain(|name| name != self.name),
            Change::Extra => names.push(self.name.to_owned()),
            Change::Flat | Change::Holds(_) => (),
        }
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let shape = self.inner.shape(name);
        match self.change {
            Change::Missing if name == self.name => None,
            Change::Flat if name == self.name => shape.map(|shape| vec![shape.iter().product()]),
            _ => shape,
        }
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let mut values = self.inner.load(name)?;
        if let Change::Holds(value) = self.change
            && name == self.name
        {
            values[3] = value;
        }
        Ok(values)
    }
}

fn changed(name: &'static str, change: Change) -> Checkpoint {
    let mut checkpoint = checkpoint("llama");
    checkpoint.weights = Box::new(Changed {
        inner: checkpoint.weights,
        name,
        change,
    });
    checkpoint
}

fn fp16(taps: &[usize]) -> Options {
    Options {
        precision: Precision::Fp16,
        attention: Attention::Native,
        taps: taps.to_vec(),
    }
}

fn refusal(checkpoint: &Checkpoint, options: &Options) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = write_bundle(checkpoint, options, &dir.path().join("bundle")).unwrap_err();
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?} is left behind");
    format!("{error:#}")
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_tensor() {
    let down = "model.layers.1.mlp.down_proj.weight";
    let refusals: Vec<String> = [
        changed(down, Change::Missing),
        changed(down, Change::Flat),
        changed(down, Change::Holds(f32::NAN)),
        changed(down, Change::Holds(1e6)),
        changed("model.layers.3.mlp.down_proj.weight", Change::Extra),
        changed("model.norm.bias", Change::Extra),
    ]
    .iter()
    .map(|checkpoint| refusal(checkpoint, &fp16(&[])))
    .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn a_configuration_that_no_graph_can_have_is_refused() {
    let with = |change: fn(&mut Checkpoint)| {
        let mut checkpoint = checkpoint("llama");
        change(&mut checkpoint);
        checkpoint
    };
    let mut refusals: Vec<String> = [
        with(|checkpoint| checkpoint.config.kv_heads = 3),
        with(|checkpoint| checkpoint.config.head_dim = 7),
        with(|checkpoint| checkpoint.config.layers = 0),
        with(|checkpoint| checkpoint.config.norm_epsilon = 0.0),
        with(|checkpoint| checkpoint.config.windows = vec![None]),
        with(|checkpoint| checkpoint.config.windows[1] = Some(0)),
        with(|checkpoint| checkpoint.config.tied_embeddings = true),
    ]
    .iter()
    .map(|checkpoint| refusal(checkpoint, &fp16(&[])))
    .collect();
    let checkpoint = checkpoint("llama");
    for taps in [vec![0, 3], vec![1, 0, 1]] {
        refusals.push(refusal(&checkpoint, &fp16(&taps)));
    }
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn a_bundle_is_replaced_and_anything_else_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("deep/bundle");
    let checkpoint = checkpoint("llama");
    write_bundle(&checkpoint, &fp16(&[]), &out).unwrap();
    fs::write(out.join("stray"), "of an earlier format").unwrap();
    let manifest = write_bundle(&checkpoint, &fp16(&[1]), &out).unwrap();
    assert_eq!(manifest.target.taps, [1]);
    let bundle = VerifiedBundle::open(&out).unwrap();
    assert_eq!(bundle.manifest(), &manifest);
    assert!(!out.join("stray").exists());
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1);

    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    write_bundle(&checkpoint, &fp16(&[]), &other).unwrap();
    fs::remove_file(other.join("bundle.json")).unwrap();
    let error = write_bundle(&checkpoint, &fp16(&[]), &other).unwrap_err();
    assert!(error.to_string().contains("neither a bundle nor an empty"));
    assert!(other.join("model.onnx").exists());
    assert!(Manifest::load(&other).is_err());
}
