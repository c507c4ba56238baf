//! `cargo xtask serve`: from a clean clone to a model that answers, in one command.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use outrider_bundle::Manifest;
use outrider_bundle::manifest::Precision;
use outrider_verify::client::{Client, ClientOptions};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::build::{self, Profile};
use crate::reference;
use crate::server_process::{ServerCommand, ServerProcess, Terminal};
use crate::workspace::Workspace;

const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
const DEFAULT_ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);

/// A large model on a slow disk takes minutes to hash and load.
const START_DEADLINE: Duration = Duration::from_secs(3600);

/// Arguments of `cargo xtask serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address of the OpenAI-compatible interface [default: that of --config, else 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Address of /livez, /readyz and /metrics [default: that of --config, else 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<SocketAddr>,
    /// Bundle directory of an own model; the reference model when not given
    #[arg(long, value_name = "DIR", conflicts_with = "precision")]
    bundle: Option<PathBuf>,
    /// Numeric form of the reference model's weights
    #[arg(long, default_value = "int8", value_parser = reference::precision_parser())]
    precision: Precision,
    /// Configuration file of the server; this command sets the bundle and the ONNX Runtime library
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Build the server as it is shipped, without debug assertions
    #[arg(long)]
    release: bool,
    /// Further arguments of the server
    #[arg(last = true, value_name = "SERVER ARGS")]
    arguments: Vec<OsString>,
}

/// Runs the server until it ends; its exit code is this command's.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    // Before anything slow, as far as the addresses are known by now.
    let of_config = args.config.is_some();
    let listen = args.listen.or((!of_config).then_some(DEFAULT_LISTEN));
    let admin_listen = args
        .admin_listen
        .or((!of_config).then_some(DEFAULT_ADMIN_LISTEN));
    check_free(listen, "--listen")?;
    check_free(admin_listen, "--admin-listen")?;

    let workspace = Workspace::find()?;
    let onnxruntime = reference::onnxruntime(&workspace)?;
    let bundle = match args.bundle {
        Some(bundle) => bundle,
        None => reference::ensure(&workspace, args.precision)?,
    };
    let manifest =
        Manifest::load(&bundle).map_err(|error| anyhow::anyhow!("{}", error.lines().join("; ")))?;
    let profile = if args.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let mut command =
        ServerCommand::new(build::server(&workspace, profile)?, &bundle, &onnxruntime)?;
    command.config = args.config;
    command.arguments = args.arguments;
    command.terminal = Terminal::Server;
    for (key, address) in [
        ("serving.listen", listen),
        ("serving.admin_listen", admin_listen),
    ] {
        if let Some(address) = address {
            command = command.set(key, address);
        }
    }
    if let Some(code) = preflight(&build::preflight(&workspace, profile)?, &command)? {
        return Ok(code);
    }
    let config = match effective_config(&command)? {
        Ok(config) => config,
        // The server has named every fault itself.
        Err(status) => return Ok(exit_code(status)),
    };
    let listen = address_in(&config, "listen")?;
    let admin_listen = address_in(&config, "admin_listen")?;
    check_free(Some(listen), "--listen")?;
    check_free(Some(admin_listen), "--admin-listen")?;

    // Caught from here on, so that no signal falls between the start of the server and its forwarding.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let mut server = command.start(listen, admin_listen)?;
    let forwarder = server.signaller();
    thread::spawn(move || {
        for signal in signals.forever() {
            // A closed terminal ends the server as a stop does. A server that has just ended needs no signal.
            let signal = if signal == SIGINT {
                Signal::SIGINT
            } else {
                Signal::SIGTERM
            };
            let _ = forwarder.send(signal);
        }
    });

    if let Err(error) = server.wait_ready(START_DEADLINE) {
        return match server.try_wait()? {
            // The server has said why itself.
            Some(status) => Ok(exit_code(status)),
            None => Err(error),
        };
    }
    print_welcome(&server, &manifest, began.elapsed())?;
    Ok(exit_code(server.wait_forever()?))
}

fn check_free(address: Option<SocketAddr>, flag: &str) -> anyhow::Result<()> {
    let Some(address) = address else {
        return Ok(());
    };
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) => {
            bail!("cannot listen on {address}: {error}; choose another address with {flag}")
        }
    }
}

/// Runs the checks of `outrider-preflight` that take no time, with what the server will be started with; the exit code when it will not run.
fn preflight(program: &Path, server: &ServerCommand) -> anyhow::Result<Option<ExitCode>> {
    let server = server.command();
    let settings = server
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    let output = Command::new(program)
        .args(server.get_args())
        .envs(settings)
        .arg("--quick")
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let report = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        // What it found is told at length by `cargo xtask preflight`; here it is only in the way of the server's own log.
        let summary = report.lines().last().unwrap_or_default();
        eprintln!("preflight: {summary}");
        return Ok(None);
    }
    eprint!("{report}");
    Ok(Some(exit_code(output.status)))
}

/// The configuration as the server reads it, or how it refused it.
fn effective_config(
    command: &ServerCommand,
) -> anyhow::Result<Result<serde_yaml::Value, ExitStatus>> {
    let output = command
        .command()
        .arg("--check-config")
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", command.binary.display()))?;
    if !output.status.success() {
        return Ok(Err(output.status));
    }
    let config = serde_yaml::from_slice(&output.stdout)
        .context("the server's effective configuration is no YAML")?;
    Ok(Ok(config))
}

fn address_in(config: &serde_yaml::Value, key: &str) -> anyhow::Result<SocketAddr> {
    let address = config
        .get("serving")
        .and_then(|serving| serving.get(key)?.as_str());
    let address = address
        .with_context(|| format!("the server's effective configuration has no serving.{key}"))?;
    address
        .parse()
        .with_context(|| format!("serving.{key} is {address}"))
}

fn print_welcome(
    server: &ServerProcess,
    manifest: &Manifest,
    elapsed: Duration,
) -> anyhow::Result<()> {
    let endpoint = server.endpoint();
    let models = Client::new(&endpoint, ClientOptions::default())?.get("/v1/models")?;
    let models = models.json().context("/v1/models is no JSON")?;
    let card = models
        .pointer("/data/0")
        .context("/v1/models lists no model")?;
    let fact = |name: &str| card.get(name).and_then(Value::as_str).unwrap_or("unknown");
    let request = json!({
        "model": fact("id"),
        "messages": [{ "role": "user", "content": "Why is the sea salty?" }],
        "max_tokens": 60,
    });
    println!(
        "
{model} is ready after {seconds:.1} s
  bundle          sha256 {digest}
  weights         {precision}, {context_tokens} tokens of context
  lossless class  {class}
  drafting        {drafting}
  health          {admin}/readyz, {admin}/livez, {admin}/metrics

Ask it something:

  curl {endpoint}/v1/chat/completions -H 'content-type: application/json' -d '{request}'

Ctrl-C stops it.
",
        model = fact("id"),
        seconds = elapsed.as_secs_f64(),
        digest = manifest.digest(),
        precision = reference::precision_name(manifest.target.precision),
        context_tokens = manifest.target.context_tokens,
        class = fact("lossless_class"),
        drafting = drafting(&card["speculation"]),
        admin = server.admin_endpoint(),
    );
    Ok(())
}

/// What the server says of drafting, in one line.
fn drafting(speculation: &Value) -> String {
    let state = speculation["drafting"].as_str().unwrap_or("unknown");
    let block = speculation["block_size"]
        .as_u64()
        .map(|tokens| format!("blocks of {tokens} tokens"));
    let detail = speculation["detail"].as_str().map(str::to_owned);
    [Some(state.to_owned()), block, detail]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

/// The server's exit code; 128 and the signal's number when a signal ended it, as shells count.
fn exit_code(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(
        code.and_then(|code| u8::try_from(code).ok())
            .unwrap_or(u8::MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_welcome_says_whether_the_server_drafts_and_why_not() {
        for (speculation, expected) in [
            (
                json!({ "drafting": "on", "detail": null, "block_size": 16 }),
                "on, blocks of 16 tokens",
            ),
            (
                json!({ "drafting": "unavailable", "detail": "the bundle has no draft", "block_size": null }),
                "unavailable, the bundle has no draft",
            ),
            (Value::Null, "unknown"),
        ] {
            assert_eq!(drafting(&speculation), expected);
        }
    }
}
