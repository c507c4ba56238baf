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

/// The middle value, or the mean of the two in the middle; 0 of nothing.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
