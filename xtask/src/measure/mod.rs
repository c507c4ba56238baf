//! `cargo xtask measure`: figures that the documentation quotes, each measured on a real server.

pub mod lossless;
mod memory;
mod perplexity;

pub use memory::{
    MEMORY_RATIO_LIMIT, Memory, Prompts, measure_memory, settings as memory_settings,
};
pub use perplexity::{Perplexity, measure_perplexity};

use std::path::PathBuf;

use outrider_bundle::manifest::Precision;

use crate::build;
use crate::reference;
use crate::server_process::ServerCommand;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask measure`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Perplexity of a model on a text, measured through the server
    Perplexity {
        /// Bundle directory; the reference model in int8 when not given
        #[arg(long, value_name = "DIR")]
        bundle: Option<PathBuf>,
        /// Text file; the one in tests/data when not given
        #[arg(long, value_name = "FILE")]
        text: Option<PathBuf>,
    },
    /// Resident memory of the server after 50 requests, against weights and KV slab
    Memory {
        /// Bundle directory; the reference model in fp32 when not given
        #[arg(long, value_name = "DIR")]
        bundle: Option<PathBuf>,
        /// Fill every slot, so that what preflight predicts can be compared
        #[arg(long)]
        full: bool,
    },
    /// Answers with drafting off and on, compared bit for bit
    Lossless(lossless::Args),
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    match args.command {
        Command::Perplexity { bundle, text } => {
            let command = server(&workspace, bundle, Precision::Int8)?;
            let text = text.unwrap_or_else(|| workspace.root().join(perplexity::DEFAULT_TEXT));
            println!("{}", measure_perplexity(&command, &text)?);
        }
        Command::Memory { bundle, full } => {
            let command = server(&workspace, bundle, Precision::Fp32)?;
            let prompts = if full { Prompts::Full } else { Prompts::Mixed };
            println!("{}", measure_memory(&command, prompts)?);
        }
        Command::Lossless(args) => lossless::measure(&workspace, args)?,
    }
    Ok(())
}

fn server(
    workspace: &Workspace,
    bundle: Option<PathBuf>,
    precision: Precision,
) -> anyhow::Result<ServerCommand> {
    let onnxruntime = reference::onnxruntime(workspace)?;
    let bundle = match bundle {
        Some(bundle) => bundle,
        None => reference::ensure(workspace, precision)?,
    };
    ServerCommand::new(
        build::server(workspace, build::Profile::Dev)?,
        &bundle,
        &onnxruntime,
    )
}
