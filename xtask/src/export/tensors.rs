//! The weights of a checkpoint on their way into a graph: every one is used, and none twice.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};

use super::convert::check_finite;
use crate::checkpoint::Weights;

/// Hands out the weights of a checkpoint and remembers which were taken.
pub struct Tensors<'a> {
    weights: &'a dyn Weights,
    taken: BTreeSet<String>,
}

impl<'a> Tensors<'a> {
    /// Starts with nothing taken.
    pub fn new(weights: &'a dyn Weights) -> Self {
        Self {
            weights,
            taken: BTreeSet::new(),
        }
    }

    /// Loads a tensor that must have this shape and hold finite numbers.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(found) = self.weights.shape(name) else {
            bail!("the checkpoint has no tensor {name}");
        };
        ensure!(
            found == shape,
            "tensor {name} has shape {found:?}, the configuration asks for {shape:?}"
        );
        ensure!(
            self.taken.insert(name.to_owned()),
            "tensor {name} is asked for twice"
        );
        let values = self
            .weights
            .load(name)
            .with_context(|| format!("cannot load tensor {name}"))?;
        ensure!(
            values.len() == shape.iter().product::<usize>(),
            "tensor {name} of shape {shape:?} holds {} values",
            values.len()
        );
        check_finite(&values).with_context(|| format!("tensor {name} is damaged"))?;
        Ok(values)
    }

    /// Loads several matrices `[rows, columns]` below each other. Each part is a name and its number of rows.
    pub fn take_stacked(&mut self, parts: &[(String, usize)], columns: usize) -> Result<Vec<f32>> {
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let mut stacked = Vec::new();
        for (name, part_rows) in parts {
            let part = self.take(name, &[*part_rows, columns])?;
            if stacked.is_empty() {
                stacked = part;
                stacked.reserve_exact(rows * columns - stacked.len());
            } else {
                stacked.extend_from_slice(&part);
            }
        }
        Ok(stacked)
    }

    /// Loads several vectors one behind the other. Each part is a name and its length.
    pub fn take_joined(&mut self, parts: &[(String, usize)]) -> Result<Vec<f32>> {
        let mut joined = Vec::new();
        for (name, length) in parts {
            joined.extend(self.take(name, &[*length])?);
        }
        Ok(joined)
    }

    /// Fails if a tensor of the checkpoint was never taken: the graph would lack a part of the model.
    pub fn finish(self) -> Result<()> {
        let left: Vec<String> = self
            .weights
            .names()
            .into_iter()
            .filter(|name| !self.taken.contains(name))
            .collect();
        ensure!(
            left.is_empty(),
            "the decoder has no place for {} of the checkpoint's tensors: {}",
            left.len(),
            left.join(", ")
        );
        Ok(())
    }
}
