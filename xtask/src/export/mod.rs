//! `cargo xtask export`: turns a checkpoint into a target graph in a bundle, and a draft checkpoint into a draft graph beside it.
//!
//! The target's graph contract is in [`decoder`], the draft's in [`draft`]. Everything here is a pure function of checkpoint and options: the same input gives the same bytes on every
//! machine, with any number of threads.

mod attention;
mod convert;
mod data_file;
mod decoder;
mod draft;
mod exporter;
mod feed_forward;
mod graph;
mod linear;
mod quantised;
mod rope;
mod rotation;
mod tensors;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use outrider_bundle::Manifest;
use outrider_bundle::create::Builder;
use outrider_bundle::manifest::{self, Attention, Precision, TargetFacts, TextFacts, spelling};
use outrider_bundle::onnx::DataType;

use crate::checkpoint::{self, Checkpoint, DraftCheckpoint};
use decoder::Decoder;
pub use draft::{DraftOptions, SharedEnds, check_pair, read_vocabulary, write_draft_graph};
use graph::GraphBuilder;
use tensors::Tensors;
use vocabulary::Ends;

/// Name of the graph file in a bundle.
pub const GRAPH_NAME: &str = "model.onnx";

/// Name of the file with the graph's large constants.
pub const DATA_NAME: &str = "model.onnx.data";

const TOKENIZER_NAME: &str = "tokenizer.json";
const TEMPLATE_NAME: &str = "chat_template.jinja";

/// Arguments of `cargo xtask export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file, or directory with config.json and safetensors files
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Bundle directory to write; a bundle that is there is replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Numeric form of the weights
    #[arg(long, value_parser = spelled::<Precision>(&["fp32", "fp16", "bf16", "int8", "int4"]))]
    precision: Precision,
    /// Attention nodes, and the draft's convolutions and selector: the server's own operators, or standard operators
    #[arg(long, default_value = "native", value_parser = spelled::<Attention>(&["native", "portable"]))]
    attention: Attention,
    /// 0-based layers whose output a draft model reads, separated by commas [default: those of --draft, else none]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    taps: Vec<usize>,
    /// Directory with the config.json and safetensors files of a DFlash or DFlash 2 draft for this model
    #[arg(long, value_name = "DIR")]
    draft: Option<PathBuf>,
    /// Numeric form of the draft's weights [default: that of --precision]
    #[arg(long, requires = "draft", value_parser = spelled::<Precision>(&["fp32", "fp16", "bf16", "int8", "int4"]))]
    draft_precision: Option<Precision>,
    /// JSON list of the token ids that the draft proposes, to spare it the rest of the head [default: all]
    #[arg(long, value_name = "FILE", requires = "draft")]
    draft_vocabulary: Option<PathBuf>,
    /// As --allow-unknown-config, for the config.json of the draft
    #[arg(long, value_name = "KEY", requires = "draft")]
    allow_unknown_draft_config: Vec<String>,
    /// Model name that callers see, instead of the checkpoint's
    #[arg(long)]
    name: Option<String>,
    /// Setting in config.json that is unknown here, but that you know to change nothing in the forward pass; may be repeated
    #[arg(long, value_name = "KEY")]
    allow_unknown_config: Vec<String>,
}

/// Runs the task.
pub fn run(args: Args) -> Result<()> {
    let mut checkpoint = checkpoint::open_allowing(&args.model, &args.allow_unknown_config)?;
    if let Some(name) = args.name {
        checkpoint.name = name;
    }
    let mut options = Options {
        precision: args.precision,
        attention: args.attention,
        taps: args.taps,
    };
    let manifest = match &args.draft {
        None => write_bundle(&checkpoint, &options, &args.out)?,
        Some(directory) => {
            let draft = checkpoint::open_draft(directory, &args.allow_unknown_draft_config)?;
            if options.taps.is_empty() {
                options.taps = draft.config.target_layer_ids.clone();
            }
            let vocabulary = args.draft_vocabulary.as_deref().map(read_vocabulary);
            let draft_options = DraftOptions {
                precision: args.draft_precision.unwrap_or(args.precision),
                form: args.attention,
                vocabulary: vocabulary.transpose()?,
                stages: false,
            };
            write_pair(&checkpoint, &options, &draft, &draft_options, &args.out)?
        }
    };
    let bytes: u64 = manifest.files.values().map(|file| file.size_bytes).sum();
    println!(
        "{}: {}, {} MB, sha256 {}",
        args.out.display(),
        manifest.name,
        bytes / 1_000_000,
        manifest.digest()
    );
    Ok(())
}

/// What kind of graph is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Numeric form of the weights.
    pub precision: Precision,
    /// Form of the attention nodes.
    pub attention: Attention,
    /// 0-based layers whose output the graph gives out, in this order.
    pub taps: Vec<usize>,
}

/// Writes a bundle: it appears under its name when it is complete. A bundle of that name is replaced; any other directory that isn't empty is refused.
pub fn write_bundle(checkpoint: &Checkpoint, options: &Options, out: &Path) -> Result<Manifest> {
    write(checkpoint, options, None, out)
}

/// As [`write_bundle`], with a draft beside the target. The taps must be those that the draft reads.
pub fn write_pair(
    checkpoint: &Checkpoint,
    options: &Options,
    draft: &DraftCheckpoint,
    draft_options: &DraftOptions,
    out: &Path,
) -> Result<Manifest> {
    check_pair(&draft.config, &checkpoint.config)?;
    ensure!(
        options.taps == draft.config.target_layer_ids,
        "the taps are {:?}, the draft reads {:?}",
        options.taps,
        draft.config.target_layer_ids
    );
    write(checkpoint, options, Some((draft, draft_options)), out)
}

fn write(
    checkpoint: &Checkpoint,
    options: &Options,
    draft: Option<(&DraftCheckpoint, &DraftOptions)>,
    out: &Path,
) -> Result<Manifest> {
    let cannot = || format!("cannot write the bundle {}", out.display());
    let out = std::path::absolute(out).with_context(cannot)?;
    let (Some(parent), Some(name)) = (out.parent(), out.file_name()) else {
        bail!("{} is no directory that can be made", out.display());
    };
    fs::create_dir_all(parent).with_context(cannot)?;
    check_replaceable(&out)?;

    let aside = tempfile::Builder::new()
        .prefix(&format!(".{}.partial-", name.to_string_lossy()))
        .tempdir_in(parent)
        .with_context(cannot)?;
    let (target, ends) = write_target_graph(checkpoint, options, aside.path())?;
    let mut sources = checkpoint.sources.clone();
    let draft = match draft {
        None => None,
        Some((draft, draft_options)) => {
            sources.extend(draft.sources.clone());
            let weights = checkpoint.weights.as_ref();
            let ends = SharedEnds::of_target(&checkpoint.config, weights, options.precision, ends);
            Some(write_draft_graph(
                draft,
                &ends,
                draft_options,
                aside.path(),
            )?)
        }
    };
    let text = &checkpoint.text;
    write_synced(&aside.path().join(TOKENIZER_NAME), &text.tokenizer_json).with_context(cannot)?;
    if let Some(template) = &text.chat_template {
        write_synced(&aside.path().join(TEMPLATE_NAME), template).with_context(cannot)?;
    }
    let manifest = Builder {
        name: checkpoint.name.clone(),
        target,
        draft,
        text: TextFacts {
            tokenizer: TOKENIZER_NAME.to_owned(),
            chat_template: text
                .chat_template
                .is_some()
                .then(|| TEMPLATE_NAME.to_owned()),
            bos_token: text.bos_token.clone(),
            eos_token: text.eos_token.clone(),
            add_bos: text.add_bos,
        },
        generation: checkpoint.generation.clone(),
        tools: BTreeMap::from([(
            "outrider-export".to_owned(),
            env!("CARGO_PKG_VERSION").to_owned(),
        )]),
        sources,
    }
    .write(aside.path())
    .map_err(|error| anyhow!("{}", error.lines().join("; ")))
    .with_context(cannot)?;

    replace(aside, &out, parent).with_context(cannot)?;
    Ok(manifest)
}

/// Writes the graph of a checkpoint, [`GRAPH_NAME`] and [`DATA_NAME`], into a directory and returns what is to be known about it.
pub fn write_graph(checkpoint: &Checkpoint, options: &Options, dir: &Path) -> Result<TargetFacts> {
    Ok(write_target_graph(checkpoint, options, dir)?.0)
}

/// As [`write_graph`]; returns where embedding and head are, too.
fn write_target_graph(
    checkpoint: &Checkpoint,
    options: &Options,
    dir: &Path,
) -> Result<(TargetFacts, Ends)> {
    let config = &checkpoint.config;
    decoder::check(config, options)?;
    let graph = GraphBuilder::create(dir, DATA_NAME)
        .with_context(|| format!("cannot write {}", dir.join(DATA_NAME).display()))?;
    let tensors = Tensors::new(checkpoint.weights.as_ref());
    let facts = TargetFacts {
        graph: GRAPH_NAME.to_owned(),
        architecture: config.architecture.clone(),
        precision: options.precision,
        attention: options.attention,
        layers: config.layers,
        hidden_size: config.hidden_size,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocab_size: config.vocab_size,
        context_tokens: config.context_tokens,
        kv_dtype: kv_dtype(options.precision).to_owned(),
        taps: options.taps.clone(),
    };
    let taps: Vec<String> = options.taps.iter().map(usize::to_string).collect();
    let metadata = [
        ("outrider.architecture", config.architecture.clone()),
        ("outrider.attention", spelling(&options.attention)),
        ("outrider.precision", spelling(&options.precision)),
        ("outrider.taps", taps.join(",")),
    ];
    let (graph, ends) = Decoder::new(config, options, graph, tensors).build()?;
    graph
        .finish(&dir.join(GRAPH_NAME), &config.architecture, &metadata)
        .with_context(|| format!("cannot write {}", dir.join(GRAPH_NAME).display()))?;
    Ok((facts, ends))
}

/// Fails if there is something under the name of a new bundle that isn't a bundle or an empty directory.
fn check_replaceable(out: &Path) -> Result<()> {
    if !out.exists() || out.join(manifest::FILE_NAME).is_file() {
        return Ok(());
    }
    let mut entries = fs::read_dir(out)
        .with_context(|| format!("{} is in the way of the bundle", out.display()))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => bail!(
            "{} is neither a bundle nor an empty directory, it is left as it is",
            out.display()
        ),
    }
}

/// Moves a finished directory to its name; what has that name goes away only when the new one is in its place.
fn replace(finished: tempfile::TempDir, out: &Path, parent: &Path) -> io::Result<()> {
    if out.exists() {
        let old = tempfile::Builder::new()
            .prefix(".replaced-")
            .tempdir_in(parent)?;
        let old_name = old.path().join("bundle");
        fs::rename(out, &old_name)?;
        if let Err(error) = fs::rename(finished.path(), out) {
            fs::rename(&old_name, out)?;
            return Err(error);
        }
    } else {
        fs::rename(finished.path(), out)?;
    }
    // Nothing has the temporary name any more.
    let _ = finished.keep();
    File::open(parent)?.sync_all()
}

fn write_synced(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

fn kv_dtype(precision: Precision) -> &'static str {
    match exporter::element(precision) {
        DataType::Float16 => "float16",
        DataType::Bfloat16 => "bfloat16",
        _ => "float32",
    }
}

/// Reads a value as the manifest spells it.
fn spelled<T>(spellings: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: serde::de::DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(spellings).map(|spelling| {
        serde_json::from_value(serde_json::Value::String(spelling))
            .expect("the possible values are those of the manifest")
    })
}
