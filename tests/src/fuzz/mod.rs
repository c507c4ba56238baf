//! Entry functions for fuzzing: everything that reads bytes from outside, each as a function of one input.
//!
//! `cargo xtask fuzz` feeds them with inputs that libFuzzer makes up; a normal test replays the kept ones in `tests/fuzz-cases`.
//! An entry function returns whether the input was accepted, and panics when something holds that must not: it calls public interfaces only, and
//! states what must be true of their results. It may not keep anything from one input to the next but what [`Target::prepare`] loads.

mod bundle;
mod checkpoint;
mod request;
mod text;

/// One reader of bytes from outside.
#[derive(Debug)]
pub struct Target {
    /// Its name, which is also that of its folder of kept inputs.
    pub name: &'static str,
    /// Feeds it one input.
    pub run: fn(&[u8]) -> bool,
}

/// Every target; `cargo xtask fuzz` knows the same names.
pub const TARGETS: [Target; 11] = [
    Target {
        name: "chat-request",
        run: request::chat,
    },
    Target {
        name: "completion-request",
        run: request::completion,
    },
    Target {
        name: "chat-template",
        run: text::chat_template,
    },
    Target {
        name: "detokenizer",
        run: text::detokenizer,
    },
    Target {
        name: "stop-strings",
        run: text::stop_strings,
    },
    Target {
        name: "gguf",
        run: checkpoint::gguf,
    },
    Target {
        name: "safetensors",
        run: checkpoint::safetensors,
    },
    Target {
        name: "safetensors-index",
        run: checkpoint::safetensors_index,
    },
    Target {
        name: "checkpoint-config",
        run: checkpoint::config,
    },
    Target {
        name: "onnx",
        run: bundle::onnx,
    },
    Target {
        name: "bundle-manifest",
        run: bundle::manifest,
    },
];

impl Target {
    /// The target of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Loads what is used for every input, so that it does not count as the memory of one.
    pub fn prepare(&self) {
        (self.run)(&[]);
    }
}

/// The parts of an input that holds several texts: they are divided by a byte that UTF-8 never has.
fn parts(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    input.split(|&byte| byte == 0xff)
}

/// A part as a text; what is no UTF-8 in it is replaced.
fn text(part: &[u8]) -> String {
    String::from_utf8_lossy(part).into_owned()
}
