//! What the ONNX Runtime sides of the operators share: threads, attributes, panics that stay inside, memory that must not overlap.

pub mod attention;

use std::{
    any::Any,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering},
};

use ort::operator::{ComputeContext, KernelContext, ShapeInferenceContext};

use super::{error::OperatorError, pool::Pool};

/// Runs the body of a kernel; a panic becomes an error of the run, because it must not reach the C caller.
pub fn contain_panics(operator: &str, run: impl FnOnce() -> ort::Result<()>) -> ort::Result<()> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(ort::Error::new(format!(
            "{operator} panicked: {}",
            message_of(&*panic)
        )))
    })
}

/// The text of a panic, without zero bytes: `ort` could not pass those on.
fn message_of(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    message
        .unwrap_or_else(|| "no message".to_owned())
        .replace('\0', " ")
}

/// Gives outputs the types of inputs, as pairs of output and input.
pub fn infer_like(context: &mut ShapeInferenceContext, pairs: &[(usize, usize)]) {
    // `ort` panics where ONNX Runtime has no type for an input, and a panic must not reach the C caller.
    let inputs = catch_unwind(AssertUnwindSafe(|| context.inputs())).unwrap_or_default();
    for &(output, input) in pairs {
        if let Some(input) = inputs.get(input) {
            // Fails for outputs the node does not have, which need no shape.
            let _ = context.set_output(output, input);
        }
    }
}

/// The threads of the session that runs the node.
pub struct OrtPool<'a>(pub &'a ComputeContext);

impl Pool for OrtPool<'_> {
    fn for_each(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), OperatorError> {
        let panicked = AtomicBool::new(false);
        let run = |index| {
            // A panic in a thread of ONNX Runtime would end the process.
            if catch_unwind(AssertUnwindSafe(|| task(index))).is_err() {
                panicked.store(true, Ordering::Relaxed);
            }
        };
        self.0
            .par_for(tasks, 0, run)
            .map_err(|error| OperatorError::Pool(error.to_string()))?;
        if panicked.into_inner() {
            return Err(OperatorError::Pool("a task panicked".to_owned()));
        }
        Ok(())
    }
}

/// An output that a kernel writes.
pub struct Written {
    /// Its name.
    pub name: &'static str,
    /// Its addresses.
    pub memory: Range<usize>,
    /// Which input it may be the same memory as.
    pub in_place_of: Option<usize>,
}

/// Refuses outputs that share memory with an input or with each other, other than as allowed; slices of them would alias.
pub fn check_apart(inputs: &[Range<usize>], outputs: &[Written]) -> ort::Result<()> {
    for (index, output) in outputs.iter().enumerate() {
        let overlaps_input = inputs.iter().enumerate().any(|(input, memory)| {
            let in_place = output.in_place_of == Some(input) && *memory == output.memory;
            overlap(memory, &output.memory) && !in_place
        });
        let overlaps_output = outputs[..index]
            .iter()
            .any(|other| overlap(&other.memory, &output.memory));
        if overlaps_input || overlaps_output {
            return Err(ort::Error::new(format!(
                "{} shares memory with another tensor; only a cache and its updated form may be the same memory",
                output.name
            )));
        }
    }
    Ok(())
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// The attributes of a node.
pub struct AttributeReader<'a, 'attr> {
    /// The operator, for messages.
    pub operator: &'static str,
    /// The node.
    pub context: &'a KernelContext<'attr>,
}

impl AttributeReader<'_, '_> {
    fn integer(&self, name: &str) -> ort::Result<Option<i64>> {
        let value = self.context.get::<i64>(name);
        // ONNX Runtime does not tell an absent attribute from one of another type.
        if value.is_none()
            && (self.context.get::<f32>(name).is_some()
                || self.context.get::<String>(name).is_some())
        {
            return Err(ort::Error::new(format!(
                "attribute {name} of {} is not an integer",
                self.operator
            )));
        }
        Ok(value)
    }

    /// An integer that is not negative; without a default it must be there.
    pub fn count(&self, name: &'static str, default: Option<usize>) -> ort::Result<usize> {
        match (self.integer(name)?, default) {
            (Some(value), _) => {
                usize::try_from(value).map_err(|_| invalid(name, value.to_string(), "0 or above"))
            }
            (None, Some(default)) => Ok(default),
            (None, None) => Err(ort::Error::new(format!(
                "attribute {name} of {} is missing",
                self.operator
            ))),
        }
    }

    /// 0 or 1.
    pub fn flag(&self, name: &'static str, default: bool) -> ort::Result<bool> {
        match self.integer(name)? {
            None => Ok(default),
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(value) => Err(invalid(name, value.to_string(), "0 or 1")),
        }
    }

    /// A number.
    pub fn float(&self, name: &str, default: f32) -> ort::Result<f32> {
        let value = self.context.get::<f32>(name);
        if value.is_none()
            && (self.context.get::<i64>(name).is_some()
                || self.context.get::<String>(name).is_some())
        {
            return Err(ort::Error::new(format!(
                "attribute {name} of {} is not a float",
                self.operator
            )));
        }
        Ok(value.unwrap_or(default))
    }
}

fn invalid(name: &'static str, value: String, allowed: &'static str) -> ort::Error {
    ort::Error::wrap(OperatorError::Attribute {
        name,
        value,
        allowed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_of_the_run() {
        let message = |panic: Box<dyn Any + Send>| message_of(&*panic);
        assert_eq!(
            message(catch_unwind(|| panic!("out of {}\0", "range")).unwrap_err()),
            "out of range "
        );
        assert_eq!(
            message(catch_unwind(|| panic!("plain")).unwrap_err()),
            "plain"
        );
        assert_eq!(
            message(catch_unwind(|| std::panic::panic_any(7)).unwrap_err()),
            "no message"
        );
    }
}
