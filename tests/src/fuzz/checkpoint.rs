//! The readers of checkpoints, each through a file, as the exporter meets it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use tempfile::TempDir;
use xtask::checkpoint;

/// A checkpoint directory that reads well, in memory where the system has a file system there. Inputs take the place of one file.
struct Directory(TempDir);

impl Directory {
    /// The files of a folder of seeds, with other files beside or in place of them.
    fn new(others: &[(&str, &[u8])]) -> Self {
        let memory = PathBuf::from("/dev/shm");
        let directory = if memory.is_dir() {
            tempfile::tempdir_in(memory)
        } else {
            tempfile::tempdir()
        };
        let directory = Self(directory.expect("a directory can be made"));
        for (name, content) in others {
            directory.write(name, content);
        }
        directory
    }

    fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).expect("a file can be written");
        path
    }
}

/// A kept input.
fn seed(path: &str) -> Vec<u8> {
    let path = crate::fixtures::data(&format!("fuzz-cases/{path}"));
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

static GGUF: LazyLock<Directory> = LazyLock::new(|| Directory::new(&[]));

/// A directory with everything but the weights.
fn without_weights() -> Directory {
    Directory::new(&[
        ("config.json", &seed("checkpoint-config/tiny.json")),
        (
            "tokenizer.json",
            &fs::read(crate::fixtures::data(
                "goldens/hugging_face/llama/tokenizer.json",
            ))
            .expect("the golden is there"),
        ),
    ])
}

static SINGLE: LazyLock<Directory> = LazyLock::new(without_weights);

static SHARDED: LazyLock<Directory> = LazyLock::new(|| {
    let directory = without_weights();
    for part in ["one", "two"] {
        let name = format!("{part}.safetensors");
        directory.write(&name, &seed(&format!("safetensors/{name}")));
    }
    directory
});

static CONFIG: LazyLock<Directory> = LazyLock::new(|| {
    let directory = without_weights();
    directory.write("model.safetensors", &seed("safetensors/whole.safetensors"));
    directory
});

/// A GGUF file.
pub fn gguf(input: &[u8]) -> bool {
    opens(&GGUF.write("model.gguf", input))
}

/// `model.safetensors` of a directory that is fine otherwise.
pub fn safetensors(input: &[u8]) -> bool {
    opens_with(&SINGLE, "model.safetensors", input)
}

/// `model.safetensors.index.json` over two files of weights.
pub fn safetensors_index(input: &[u8]) -> bool {
    opens_with(&SHARDED, "model.safetensors.index.json", input)
}

/// `config.json` of a directory that is fine otherwise.
pub fn config(input: &[u8]) -> bool {
    opens_with(&CONFIG, "config.json", input)
}

fn opens_with(directory: &Directory, name: &str, input: &[u8]) -> bool {
    directory.write(name, input);
    opens(directory.0.path())
}

/// Whether a checkpoint can be opened; if so, every tensor must have as many values as its shape says.
fn opens(path: &Path) -> bool {
    let Ok(checkpoint) = checkpoint::open(path) else {
        return false;
    };
    let names = checkpoint.weights.names();
    let shapes: BTreeMap<&String, Vec<usize>> = names
        .iter()
        .map(|name| {
            let shape = checkpoint.weights.shape(name);
            (name, shape.expect("a listed tensor has a shape"))
        })
        .collect();
    for (name, shape) in shapes {
        let values = checkpoint
            .weights
            .load(name)
            .expect("a listed tensor can be read");
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
    }
    true
}
