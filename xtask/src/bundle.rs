//! `cargo xtask bundle`: makes, checks and shows bundle directories.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use indicatif::HumanBytes;
use outrider_bundle::create::Builder;
use outrider_bundle::facts::GraphFacts;
use outrider_bundle::manifest::{FILE_NAME, GenerationDefaults, Manifest, TargetFacts};
use outrider_bundle::verify::{BundleError, Fault};
use outrider_bundle::{VerifiedBundle, digest};
use serde_json::{Value, json};

/// Arguments of `cargo xtask bundle`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a bundle of a directory of graphs and tokenizer files
    ///
    /// Every file of the directory becomes part of the bundle. The facts are checked against the graphs, and the bundle appears under its name only
    /// when they hold.
    Create {
        /// Directory with the graph, its external data, the tokenizer and the chat template
        #[arg(long, value_name = "DIR")]
        graph_dir: PathBuf,
        /// Bundle directory to make; must not exist, or be the graph directory itself
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// JSON file with the fields of a manifest but `schema_version` and `files`, or the bundle.json of another bundle
        #[arg(long, value_name = "FILE")]
        facts: PathBuf,
        /// Model name, instead of the one in the facts
        #[arg(long)]
        name: Option<String>,
    },
    /// Hash every file of a bundle and compare with its manifest; exit status 1 when it differs
    Verify {
        /// Bundle directory
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what a bundle says it is, without hashing its files
    Show {
        /// Bundle directory
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Create {
            graph_dir,
            out,
            facts,
            name,
        } => {
            let mut builder = read_facts(&facts)?;
            builder.name = name.unwrap_or(builder.name);
            let manifest = create(&graph_dir, &out, &facts, builder)?;
            println!("{}  {}", manifest.digest(), out.display());
            Ok(())
        }
        Command::Verify { dir, json } => verify(&dir, json),
        Command::Show { dir, json } => show(&dir, json),
    }
}

/// Reads what a manifest says beside the files.
fn read_facts(path: &Path) -> anyhow::Result<Builder> {
    let parse = || -> anyhow::Result<Builder> {
        let text = fs::read(path)?;
        let value: Value = serde_json::from_slice(&text)?;
        if value.get("files").is_none() {
            return Ok(serde_json::from_slice(&text)?);
        }
        Ok(Manifest::parse(&text)
            .map_err(|error| anyhow::anyhow!(error.lines().join("; ")))?
            .into())
    };
    parse().with_context(|| format!("facts {} are unusable", path.display()))
}

/// Copies the files and makes the copy a bundle, which gets its name when it is one.
fn create(
    graph_dir: &Path,
    out: &Path,
    facts: &Path,
    builder: Builder,
) -> anyhow::Result<Manifest> {
    let is_in_place = out.exists() && same_place(graph_dir, out);
    ensure!(
        is_in_place || !out.exists(),
        "--out {} exists already",
        out.display()
    );
    let unusable =
        |error: BundleError| anyhow::anyhow!("no bundle was made:\n{}", error.lines().join("\n"));
    if is_in_place {
        return builder.write(out).map_err(unusable);
    }
    let name = out
        .file_name()
        .with_context(|| format!("--out {} has no name", out.display()))?;
    let parent = out
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let aside = tempfile::Builder::new()
        .prefix(&format!(".{}.partial-", name.to_string_lossy()))
        .tempdir_in(parent)
        .with_context(|| format!("cannot write to {}", parent.display()))?;
    copy_dir(graph_dir, aside.path(), facts)?;
    let manifest = builder.write(aside.path()).map_err(unusable)?;
    fs::rename(aside.path(), out).with_context(|| format!("cannot write {}", out.display()))?;
    // The directory has moved away under its new name.
    let _ = aside.keep();
    digest::sync_parent(out).with_context(|| format!("cannot write {}", out.display()))?;
    Ok(manifest)
}

fn same_place(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Copies the files of a directory but its manifest and the facts. Anything that is neither file nor directory is an error.
fn copy_dir(from: &Path, to: &Path, facts: &Path) -> anyhow::Result<()> {
    let entries = fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", from.display()))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_name() == FILE_NAME || same_place(&source, facts) {
            continue;
        }
        let kind = entry
            .file_type()
            .with_context(|| format!("cannot read {}", source.display()))?;
        if kind.is_dir() {
            fs::create_dir(&target)
                .with_context(|| format!("cannot create {}", target.display()))?;
            copy_dir(&source, &target, facts)?;
            continue;
        }
        ensure!(
            kind.is_file(),
            "{} is no plain file, a bundle holds plain files only",
            source.display()
        );
        let copy = || -> io::Result<()> {
            fs::copy(&source, &target)?;
            File::open(&target)?.sync_all()
        };
        copy().with_context(|| format!("cannot copy {}", source.display()))?;
    }
    Ok(())
}

fn verify(dir: &Path, json: bool) -> anyhow::Result<()> {
    let opened = VerifiedBundle::open(dir);
    if json {
        let report = match &opened {
            Ok(bundle) => json!({ "ok": true, "digest": bundle.digest(), "faults": [] }),
            Err(error) => json!({ "ok": false, "digest": null, "faults": faults_json(error) }),
        };
        println!("{report:#}");
    } else {
        match &opened {
            Ok(bundle) => {
                let files = &bundle.manifest().files;
                let size_bytes: u64 = files.values().map(|file| file.size_bytes).sum();
                println!(
                    "{}  ok, {} files, {size_bytes} bytes",
                    bundle.digest(),
                    files.len()
                );
            }
            Err(error) => error.lines().iter().for_each(|line| println!("{line}")),
        }
    }
    ensure!(opened.is_ok(), "{} is not intact", dir.display());
    Ok(())
}

/// Every fault with its kind and, where it is about a file, its path; `message` is the line that people see.
fn faults_json(error: &BundleError) -> Vec<Value> {
    let with_message = |fault: &Fault| {
        let mut value = json!(fault);
        value["message"] = fault.to_string().into();
        value
    };
    let kind = match error {
        BundleError::Files { faults, .. } => return faults.iter().map(with_message).collect(),
        BundleError::Manifest { .. } => "manifest",
        BundleError::Graph { .. } | BundleError::Facts { .. } => "graph",
    };
    error
        .lines()
        .into_iter()
        .map(|line| json!({ "fault": kind, "message": line }))
        .collect()
}

/// A bundle in JSON. Written as it is and not by way of a [`Value`], which would turn a 32-bit 0.6 into 0.6000000238418579.
#[derive(serde::Serialize)]
struct Shown<'a> {
    digest: String,
    manifest: &'a Manifest,
    graph: &'a GraphFacts,
}

fn show(dir: &Path, json: bool) -> anyhow::Result<()> {
    let manifest = match Manifest::load(dir) {
        Ok(manifest) => manifest,
        Err(error) => bail!(
            "{} is no bundle: {}",
            dir.display(),
            error.lines().join("; ")
        ),
    };
    let graph = GraphFacts::read(&dir.join(&manifest.target.graph));
    if json {
        let graph = graph.with_context(|| format!("cannot show {}", dir.display()))?;
        let shown = Shown {
            digest: manifest.digest(),
            manifest: &manifest,
            graph: &graph,
        };
        println!("{}", serde_json::to_string_pretty(&shown)?);
        return Ok(());
    }
    let graph = graph.map_err(|error| format!("{:#}", anyhow::Error::new(error)));
    print!(
        "{}",
        describe(&manifest, graph.as_ref().map_err(String::as_str))
    );
    Ok(())
}

/// A bundle in words, a fact per line.
fn describe(manifest: &Manifest, graph: Result<&GraphFacts, &str>) -> String {
    let mut text = String::new();
    let mut row = |label: &str, value: String| {
        text += format!("{label:<12}{value}").trim_end();
        text.push('\n');
    };
    row("bundle", manifest.name.clone());
    row("sha256", manifest.digest());
    describe_target(&manifest.target, &mut row);
    match graph {
        Ok(graph) => describe_graph(graph, &mut row),
        Err(error) => row("graph", error.to_owned()),
    }
    if let Some(draft) = &manifest.draft {
        row(
            "draft",
            format!(
                "{}, {} weights, {} operators",
                draft.architecture,
                word(&draft.precision),
                word(&draft.form)
            ),
        );
        row(
            "",
            format!(
                "{} layers, {} key/value heads of {}, KV cache in {}",
                draft.layers, draft.kv_heads, draft.head_dim, draft.kv_dtype
            ),
        );
        row(
            "",
            format!(
                "blocks of {}, {} candidates per slot out of {} tokens",
                draft.block_size, draft.top_k, draft.vocabulary_columns
            ),
        );
        row(
            "",
            format!(
                "reads layers {}, {} tokens of context",
                numbers(&draft.target_layer_ids),
                draft.context_tokens
            ),
        );
    }
    row("text", manifest.text.tokenizer.clone());
    row(
        "",
        manifest
            .text
            .chat_template
            .clone()
            .unwrap_or_else(|| "no chat template".to_owned()),
    );
    row("generation", describe_generation(&manifest.generation));
    for (index, (path, file)) in manifest.files.iter().enumerate() {
        let label = if index == 0 { "files" } else { "" };
        row(
            label,
            format!("{}  {:>14}  {path}", file.sha256, file.size_bytes),
        );
    }
    for (index, source) in manifest.sources.iter().enumerate() {
        let label = if index == 0 { "made from" } else { "" };
        let licence = source.licence.as_deref().unwrap_or("licence unknown");
        row(
            label,
            format!("{}  {}, {licence}", source.sha256, source.name),
        );
    }
    for (index, (tool, version)) in manifest.tools.iter().enumerate() {
        row(
            if index == 0 { "made with" } else { "" },
            format!("{tool} {version}"),
        );
    }
    text
}

fn describe_target(target: &TargetFacts, row: &mut impl FnMut(&str, String)) {
    let TargetFacts {
        architecture,
        layers,
        hidden_size,
        kv_heads,
        head_dim,
        vocab_size,
        context_tokens,
        kv_dtype,
        ..
    } = target;
    row(
        "target",
        format!(
            "{architecture}, {} weights, {} attention",
            word(&target.precision),
            word(&target.attention)
        ),
    );
    row(
        "",
        format!("{layers} layers of {hidden_size}, {kv_heads} key/value heads of {head_dim}"),
    );
    row(
        "",
        format!("{vocab_size} tokens in the vocabulary, {context_tokens} tokens of context"),
    );
    let width_bytes: u64 = if kv_dtype == "float32" { 4 } else { 2 };
    let kv_bytes = [*layers, 2, *kv_heads, *head_dim]
        .iter()
        .map(|&size| size as u64)
        .product::<u64>()
        * width_bytes;
    row(
        "",
        format!("KV cache in {kv_dtype}, {} per token", HumanBytes(kv_bytes)),
    );
    let taps = if target.taps.is_empty() {
        "no taps".to_owned()
    } else {
        format!("taps after layers {}", numbers(&target.taps))
    };
    row("", taps);
}

fn describe_graph(graph: &GraphFacts, row: &mut impl FnMut(&str, String)) {
    let opsets: Vec<_> = graph
        .opsets
        .iter()
        .map(|(domain, version)| format!("{domain} {version}"))
        .collect();
    row(
        "graph",
        format!("by {}, operator sets {}", graph.producer, opsets.join(", ")),
    );
    row(
        "",
        format!("{} of weights", HumanBytes(graph.initializer_bytes)),
    );
    let mut ops: Vec<_> = graph.ops.iter().collect();
    ops.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let ops: Vec<_> = ops
        .into_iter()
        .map(|(op, count)| format!("{count} {}", op.trim_start_matches("ai.onnx.")))
        .collect();
    for line in ops.chunks(6) {
        row("", line.join(", "));
    }
}

fn describe_generation(generation: &GenerationDefaults) -> String {
    let mut parts = vec![format!(
        "ends at tokens {}",
        numbers(&generation.eos_token_ids)
    )];
    if let Some(temperature) = generation.temperature {
        parts.push(format!("temperature {temperature}"));
    }
    if let Some(top_p) = generation.top_p {
        parts.push(format!("top_p {top_p}"));
    }
    if let Some(top_k) = generation.top_k {
        parts.push(format!("top_k {top_k}"));
    }
    if let Some(min_p) = generation.min_p {
        parts.push(format!("min_p {min_p}"));
    }
    if let Some(penalty) = generation.repetition_penalty {
        parts.push(format!("repetition_penalty {penalty}"));
    }
    parts.join(", ")
}

fn numbers<T: ToString>(values: &[T]) -> String {
    values
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// A value as the manifest spells it.
fn word(value: &impl serde::Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}
