//! `cargo xtask bench`: how fast the server is, measured side by side in one run.

mod chart;
pub mod decode;
pub mod load;

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Generation with drafting off and on, interleaved
    Decode(decode::Args),
    /// Many clients at once, with drafting off and on
    Load(load::Args),
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Decode(args) => decode::run(args),
        Command::Load(args) => load::run(args),
    }
}
