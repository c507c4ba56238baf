//! `cargo xtask bundle`: looks at and checks bundle directories.

use std::path::PathBuf;

use anyhow::bail;
use outrider_bundle::VerifiedBundle;

/// Arguments of `cargo xtask bundle`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Hash every file of a bundle and compare with its manifest
    Verify {
        /// Bundle directory
        dir: PathBuf,
    },
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Verify { dir } => match VerifiedBundle::open(&dir) {
            Ok(bundle) => println!("{}: ok, sha256 {}", dir.display(), bundle.digest()),
            Err(error) => {
                error.lines().iter().for_each(|line| println!("{line}"));
                bail!("{} is not intact", dir.display());
            }
        },
    }
    Ok(())
}
