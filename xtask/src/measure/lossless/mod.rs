//! Losslessness, measured: the same requests with drafting off and on, and no bit may differ.
//!
//! Compared are token ids, finish reasons, token counts, log-probabilities and texts, as served.
//! A run in which nothing was drafted proves nothing, so it is invalid, never a pass.

mod bad_drafter;
pub mod cases;
mod compare;
mod covering;
pub mod reference_pair;
mod report;
mod suite;
pub mod tiny_pair;

pub use report::{Difference, HEADING, Report, RunReport, Verdict};
pub use suite::run;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use outrider_bundle::manifest::Precision;

use self::bad_drafter::BadDrafter;
use self::cases::{Drafter, Run, ServerKey};
use self::reference_pair::Extent;
use crate::build;
use crate::checkpoint::Weights;
use crate::output::OutputDir;
use crate::reference;
use crate::server_process::ServerCommand;
use crate::workspace::Workspace;

/// Tokens of one slot: the longest prompt and its answer fit.
pub const CONTEXT_TOKENS: usize = 2048;

/// Arguments of `cargo xtask measure lossless`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which models to run
    #[arg(long, default_value = "all", value_parser = ["all", "reference", "tiny"])]
    pair: String,
    /// Only what a test run has time for: covering arrays, few prompts, short answers
    #[arg(long)]
    quick: bool,
    /// Only the runs of these numeric forms, so that the suite can be taken in parts
    #[arg(long, value_delimiter = ',', value_parser = reference::precision_parser())]
    precision: Vec<Precision>,
    /// Directory for the reports [default: .outrider/lossless]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs the suite.
pub fn measure(workspace: &Workspace, args: Args) -> anyhow::Result<()> {
    let output = OutputDir::make(workspace, args.output.as_ref(), "lossless")?;
    let bundles = tempfile::Builder::new()
        .prefix(".lossless-")
        .tempdir_in(make(workspace.bundles())?)
        .context("cannot make a directory for bundles")?;
    let binary = build::server(workspace, build::Profile::Dev)?;
    let onnxruntime = reference::onnxruntime(workspace)?;
    let mut verdicts = Vec::new();
    let precisions: Vec<&str> = args
        .precision
        .into_iter()
        .map(reference::precision_name)
        .collect();
    let mut suite = |pair: &str, mut runs: Vec<Run>, bundle: BundleOf<'_>| -> anyhow::Result<()> {
        let mut name = vec![pair];
        if !precisions.is_empty() {
            runs.retain(|run| precisions.contains(&run.server.bundle));
            name.extend(&precisions);
        }
        let name = name.join("-");
        eprintln!("{} runs of the {name} pair\n{HEADING}", runs.len());
        let command = |key: &ServerKey| {
            let bundle = bundle(key, bundles.path())?;
            Ok(ServerCommand::new(binary.clone(), &bundle, &onnxruntime)?
                .set("serving.runtime.kv_cache_ratio", 0.9))
        };
        let report = run(runs, command, |run| eprintln!("{run}"))?;
        println!("{report}");
        output.write_json(&format!("{name}.json"), &report)?;
        verdicts.push((name, report.verdict()));
        Ok(())
    };
    if args.pair != "reference" {
        let runs = match args.quick {
            true => tiny_pair::covering_runs(workspace)?,
            false => tiny_pair::every_run(workspace)?,
        };
        suite("tiny", runs, &|key, dir| tiny_bundle(workspace, key, dir))?;
    }
    if args.pair != "tiny" {
        let extent = match args.quick {
            true => Extent::QUICK,
            false => Extent::FULL,
        };
        let runs = reference_pair::runs(extent)?;
        suite("reference", runs, &|key, dir| {
            reference_bundle(workspace, key, dir)
        })?;
    }
    let bad: Vec<String> = verdicts
        .iter()
        .filter(|(_, verdict)| *verdict != Verdict::Pass)
        .map(|(name, verdict)| format!("{name} pair: {verdict}"))
        .collect();
    if bad.is_empty() {
        Ok(())
    } else {
        bail!("{}", bad.join("; "))
    }
}

/// Where the bundle of a server is, made in the directory if need be.
type BundleOf<'a> = &'a dyn Fn(&ServerKey, &Path) -> anyhow::Result<PathBuf>;

fn make(dir: PathBuf) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// The bundle of the tiny pair for a server, made in `dir` when it is not there yet.
pub fn tiny_bundle(workspace: &Workspace, key: &ServerKey, dir: &Path) -> anyhow::Result<PathBuf> {
    let bundle = dir.join(format!("tiny-{}-{}", key.bundle, key.drafter));
    if bundle.is_dir() {
        return Ok(bundle);
    }
    tiny_pair::export(workspace, precision_of(key), key.drafter, &bundle)
}

/// The bundle of the reference pair for a server; with another drafter than the trained one it is made in `dir` when it is not there yet.
pub fn reference_bundle(
    workspace: &Workspace,
    key: &ServerKey,
    dir: &Path,
) -> anyhow::Result<PathBuf> {
    let precision = precision_of(key);
    if key.drafter == Drafter::Trained {
        return reference::ensure(workspace, precision);
    }
    let bundle = dir.join(format!("reference-{}-{}", key.bundle, key.drafter));
    if !bundle.is_dir() {
        let drafter = key.drafter;
        let change = |weights| -> Box<dyn Weights> { Box::new(BadDrafter { weights, drafter }) };
        reference::write(workspace, precision, change, &bundle)?;
    }
    Ok(bundle)
}

fn precision_of(key: &ServerKey) -> Precision {
    reference::PRECISIONS
        .into_iter()
        .find(|&precision| reference::precision_name(precision) == key.bundle)
        .expect("a run names a form of the reference model")
}
