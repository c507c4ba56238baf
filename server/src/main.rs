//! `outrider-server`: reads its configuration, binds its ports, loads the model, serves until it is told to stop.
//!
//! Exit codes: 0 after a stop that was asked for, 64 for a bad configuration or command line, 65 for a bundle or model that cannot be served,
//! 69 for a port, log file or audit log that cannot be had, 70 for a fault of the server itself.

use std::fmt;
use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;
use outrider_bundle::manifest::Manifest;
use outrider_server::config::{self, Config, ConfigArguments, Sources};
use outrider_server::launch::{self, Launch, LaunchError};
use outrider_server::model::runtime;
use outrider_server::service::{self, Ending};
use outrider_server::telemetry::Telemetry;
use outrider_server::{auth, loader, logging};

/// OpenAI-compatible ONNX Runtime server with block-parallel drafting and unchanged output.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Print the effective configuration, or every fault in it, and exit.
    #[arg(long)]
    check_config: bool,
    /// Print a configuration file with every key, its meaning and its default, and exit.
    #[arg(long, conflicts_with = "check_config")]
    reference_config: bool,
    /// Make a key for NAME: print the line for a file of keys to standard output and the secret, this once, to standard error, and exit.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["check_config", "reference_config"])]
    new_key: Option<String>,
    /// Read a secret from standard input, print the line that lists it under NAME in a file of keys, and exit.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["check_config", "reference_config", "new_key"])]
    hash_key: Option<String>,
}

/// What ends the process other than a stop that was asked for.
#[derive(Clone, Copy)]
enum Failure {
    Config = 64,
    Model = 65,
    Unavailable = 69,
    Internal = 70,
}

impl From<Failure> for ExitCode {
    fn from(failure: Failure) -> Self {
        Self::from(failure as u8)
    }
}

fn main() -> ExitCode {
    if let Err(error) = runtime::disable_telemetry() {
        return fail(Failure::Internal, error);
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let code = if error.use_stderr() {
                Failure::Config.into()
            } else {
                ExitCode::SUCCESS
            };
            let _ = error.print();
            return code;
        }
    };
    if arguments.reference_config {
        return print(&config::reference());
    }
    if let Some(name) = &arguments.new_key {
        return new_key(name);
    }
    if let Some(name) = &arguments.hash_key {
        return hash_key(name);
    }
    let check_only = arguments.check_config;
    let sources = arguments.config.sources();
    let config = match Config::load(&sources) {
        Ok(config) => config,
        Err(error) => return fail(Failure::Config, error),
    };
    if check_only {
        return check_files(&config).unwrap_or_else(|| print(&config.to_yaml()));
    }
    match serve(config, sources) {
        Ok(()) => ExitCode::SUCCESS,
        Err(code) => code,
    }
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => Failure::Internal.into(),
    }
}

/// Looks at the files that a configuration names; the exit code when one can't be used.
fn check_files(config: &Config) -> Option<ExitCode> {
    let files = launch::file_faults(config);
    let files = files.iter().map(ToString::to_string);
    let library = runtime::locate(&config.runtime.onnxruntime_library).err();
    let library = library.map(|error| format!("serving.runtime.onnxruntime_library: {error}"));
    let bundle = Manifest::load(&config.bundle).err();
    let mut code = None;
    for fault in files.chain(library) {
        code = Some(fail(Failure::Config, fault));
    }
    if let Some(error) = bundle {
        let failed = fail(Failure::Model, format_args!("serving.bundle: {error}"));
        code = code.or(Some(failed));
    }
    code
}

fn new_key(name: &str) -> ExitCode {
    let made = auth::generate().and_then(|secret| Ok((auth::line_of(name, &secret)?, secret)));
    match made {
        Ok((line, secret)) => {
            let _ = writeln!(std::io::stderr(), "{secret}");
            print(&format!("{line}\n"))
        }
        Err(error) => fail(Failure::Config, error),
    }
}

fn hash_key(name: &str) -> ExitCode {
    let mut secret = String::new();
    if let Err(error) = std::io::stdin().read_line(&mut secret) {
        return fail(
            Failure::Config,
            format_args!("cannot read the secret from standard input: {error}"),
        );
    }
    match auth::line_of(name, secret.trim_end_matches(['\r', '\n'])) {
        Ok(line) => print(&format!("{line}\n")),
        Err(error) => fail(Failure::Config, error),
    }
}

fn fail(failure: Failure, error: impl fmt::Display) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "outrider-server: {error}");
    failure.into()
}

fn serve(config: Config, sources: Sources) -> Result<(), ExitCode> {
    let telemetry = config.otlp_endpoint.as_deref().map(Telemetry::start);
    let telemetry = telemetry
        .transpose()
        .map_err(|error| fail(Failure::Config, error))?;
    let log = logging::start(&config.logging, telemetry.as_ref())
        .map_err(|error| fail(Failure::Unavailable, error))?;
    log_start(&config);
    // Both sockets are bound before anything slow begins, so that callers and probes get an answer from the first moment on.
    let launch = Launch::new(config, sources, Some(log)).map_err(|error| {
        let failure = match error {
            LaunchError::File(_) => Failure::Config,
            LaunchError::Bind { .. } | LaunchError::Audit(_) => Failure::Unavailable,
        };
        fail(failure, error)
    })?;

    let ending = actix_web::rt::System::new().block_on(service::run(launch, loader::load));
    if let Some(telemetry) = telemetry {
        telemetry.end();
    }
    match ending {
        Ok(Ending::Stopped) => Ok(()),
        Ok(Ending::Abandoned) => signal_hook::low_level::exit(0),
        Ok(Ending::CannotServe(reason)) => {
            tracing::error!(reason, "the model cannot be served");
            Err(Failure::Model.into())
        }
        Ok(Ending::EngineFailed(reason)) => {
            tracing::error!(reason, "the engine ended");
            Err(Failure::Internal.into())
        }
        Err(error) => {
            tracing::error!(%error, "the server failed");
            Err(Failure::Internal.into())
        }
    }
}

fn log_start(config: &Config) {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        configuration = config.to_json(),
        "starting"
    );
    for (key, value, origin) in config.overrides() {
        tracing::info!(key, value, %origin, "configured");
    }
}
