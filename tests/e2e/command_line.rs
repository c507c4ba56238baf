//! The server's command line: `--check-config` and what the exit code says.

use std::fs;
use std::process::{Command, Output};

use outrider_bundle::manifest::Precision;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use xtask::reference;

/// `EX_CONFIG`, as the server documents it, for a configuration that can't be used.
const EXIT_CONFIG: i32 = 64;

pub fn every_fault_of_a_configuration_is_reported_at_once(_: &Servers) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("server.yaml");
    fs::write(
        &file,
        "serving:
  bundle: 7
  listen: somewhere
  no_such_key: 1
  runtime:
    max_concurrency: 0
    prefill_chunk_tokens: many
  logging:
    level: loud
",
    )?;
    let output = check_config(
        Command::new(fixtures::server_binary()?)
            .arg("--config")
            .arg(&file),
    )?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(EXIT_CONFIG), "{text}");
    for path in [
        "serving.bundle",
        "serving.listen",
        "serving.no_such_key",
        "serving.runtime.max_concurrency",
        "serving.runtime.prefill_chunk_tokens",
        "serving.runtime.onnxruntime_library",
        "serving.logging.level",
    ] {
        assert!(text.contains(path), "{path} is not reported: {text}");
    }
    Ok(())
}

pub fn a_right_configuration_is_accepted_without_a_model_being_loaded(
    _: &Servers,
) -> anyhow::Result<()> {
    let workspace = fixtures::workspace()?;
    let bundle = reference::find(&workspace, Precision::Int8)?;
    let output = check_config(
        Command::new(fixtures::server_binary()?)
            .env("OUTRIDER__SERVING__BUNDLE", &bundle)
            .env(
                "OUTRIDER__SERVING__RUNTIME__ONNXRUNTIME_LIBRARY",
                fixtures::onnxruntime(&workspace)?,
            ),
    )?;
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(0), "{text}");
    Ok(())
}

fn check_config(command: &mut Command) -> anyhow::Result<Output> {
    Ok(command.arg("--check-config").output()?)
}
