//! `outrider-server`: reads its configuration, binds its ports, loads the model, serves until it is told to stop.
//!
//! Exit codes: 0 after a stop that was asked for, 64 for a bad configuration or command line, 65 for a bundle or model that cannot be served,
//! 69 for a port, log file or audit log that cannot be had, 70 for a fault of the server itself.

use std::fmt;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use outrider_server::audit::AuditLog;
use outrider_server::config::{self, Config, Sources};
use outrider_server::service::{self, Ending};
use outrider_server::{loader, logging};

/// OpenAI-compatible ONNX Runtime server with block-parallel drafting and unchanged output.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// YAML file with the configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the bundle to serve; sets serving.bundle.
    #[arg(long, value_name = "DIR")]
    bundle: Option<String>,
    /// Address of the OpenAI-compatible interface; sets serving.listen.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Address of /livez, /readyz and /metrics; sets serving.admin_listen.
    #[arg(long, value_name = "ADDRESS")]
    admin_listen: Option<String>,
    /// Sets any configuration key, for example serving.runtime.max_concurrency=4. May be repeated; a later one wins.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_and_value)]
    settings: Vec<(String, String)>,
    /// Print the effective configuration, or every fault in it, and exit.
    #[arg(long)]
    check_config: bool,
    /// Print a configuration file with every key, its meaning and its default, and exit.
    #[arg(long, conflicts_with = "check_config")]
    reference_config: bool,
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .ok_or_else(|| "must be a key, `=` and a value".to_owned())
}

impl Arguments {
    fn sources(self) -> Sources {
        let named = [
            ("serving.bundle", self.bundle),
            ("serving.listen", self.listen),
            ("serving.admin_listen", self.admin_listen),
        ];
        let named = named
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Sources {
            file: self.config,
            // Values that are not text cannot be part of a key this server knows; the rest of the environment is not ours.
            environment: std::env::vars_os()
                .filter_map(|(name, value)| {
                    Some((name.into_string().ok()?, value.into_string().ok()?))
                })
                .collect(),
            flags: self.settings.into_iter().chain(named).collect(),
        }
    }
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
    let check_only = arguments.check_config;
    let config = match Config::load(&arguments.sources()) {
        Ok(config) => config,
        Err(error) => return fail(Failure::Config, error),
    };
    if check_only {
        return print(&config.to_yaml());
    }
    match serve(config) {
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

fn fail(failure: Failure, error: impl fmt::Display) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "outrider-server: {error}");
    failure.into()
}

fn serve(config: Config) -> Result<(), ExitCode> {
    let _log =
        logging::start(&config.logging).map_err(|error| fail(Failure::Unavailable, error))?;
    log_start(&config);
    let audit = config.audit.as_ref().map(AuditLog::open).transpose();
    let audit = audit.map_err(|error| fail(Failure::Unavailable, error))?;
    // Both ports are bound before anything slow begins, so that callers and probes get an answer from the first moment on.
    let listener = bind("serving.listen", config.listen)?;
    let admin_listener = bind("serving.admin_listen", config.admin_listen)?;

    let ending = actix_web::rt::System::new().block_on(service::run(
        config,
        listener,
        admin_listener,
        audit,
        loader::load,
    ));
    match ending {
        Ok(Ending::Stopped) => Ok(()),
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

fn bind(key: &str, address: SocketAddr) -> Result<TcpListener, ExitCode> {
    let listener = TcpListener::bind(address).map_err(|error| {
        fail(
            Failure::Unavailable,
            format_args!("cannot listen on {address} ({key}): {error}"),
        )
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    tracing::info!(key, address = %bound, "listening");
    Ok(listener)
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
