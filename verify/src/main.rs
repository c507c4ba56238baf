//! `outrider-verify`: checks a live OpenAI-compatible service and says yes or no.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
