//! The services that are named on a command line. Keys come from the environment or a file: arguments can be read by every user of a machine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use outrider_verify::client::{API_KEY_VARIABLE, Client, ClientError, ClientOptions};
use outrider_verify::lossless::Sides;
use outrider_verify::service::Service;
use outrider_verify::soak::MetricsPage;

use super::Failure;

/// Environment variable that holds the key of the reference.
const REFERENCE_API_KEY_VARIABLE: &str = "OUTRIDER_VERIFY_REFERENCE_API_KEY";

/// Environment variable that holds the token for the metrics.
const METRICS_TOKEN_VARIABLE: &str = "OUTRIDER_VERIFY_METRICS_TOKEN";

#[derive(Args)]
pub struct ServiceArguments {
    /// Address of the service, for example http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    pub endpoint: String,
    /// Model to ask; the first one of the service's list when not given
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// File that holds the API key of the service, in place of the environment's OUTRIDER_VERIFY_API_KEY
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// PEM file of the certificate authorities to trust, in place of the system's
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Most seconds for one request
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600), value_name = "SECONDS")]
    pub timeout_s: u64,
}

#[derive(Args)]
pub struct Reference {
    /// Address of a second service to compare with, in place of the first one with drafting switched off
    #[arg(long, value_name = "URL")]
    pub reference: Option<String>,
    /// Model to ask there; the first one of its list when not given
    #[arg(long, value_name = "NAME", requires = "reference")]
    pub reference_model: Option<String>,
    /// File that holds its API key, in place of the environment's OUTRIDER_VERIFY_REFERENCE_API_KEY
    #[arg(long, value_name = "FILE", requires = "reference")]
    pub reference_api_key_file: Option<PathBuf>,
}

#[derive(Args)]
pub struct Metrics {
    /// Address of the service's Prometheus metrics, for example http://127.0.0.1:8081/metrics
    #[arg(long, value_name = "URL")]
    pub metrics: Option<String>,
    /// File that holds the token for the metrics, in place of the environment's OUTRIDER_VERIFY_METRICS_TOKEN
    #[arg(long, value_name = "FILE", requires = "metrics")]
    pub metrics_token_file: Option<PathBuf>,
}

impl ServiceArguments {
    /// A connection to the service.
    pub fn client(&self) -> Result<Client, Failure> {
        self.client_of(
            &self.endpoint,
            API_KEY_VARIABLE,
            self.api_key_file.as_deref(),
        )
    }

    /// The service with its model.
    pub fn service(&self) -> Result<Service, Failure> {
        connect(self.client()?, self.model.as_deref())
    }

    /// The second service, when one is named; time limit and authorities are those of the first.
    pub fn reference(&self, reference: &Reference) -> Result<Option<Service>, Failure> {
        let Some(endpoint) = &reference.reference else {
            return Ok(None);
        };
        let key_file = reference.reference_api_key_file.as_deref();
        let client = self.client_of(endpoint, REFERENCE_API_KEY_VARIABLE, key_file)?;
        connect(client, reference.reference_model.as_deref()).map(Some)
    }

    /// The metrics, when their address is named.
    pub fn metrics(&self, metrics: &Metrics) -> Result<Option<MetricsPage>, Failure> {
        let Some(endpoint) = &metrics.metrics else {
            return Ok(None);
        };
        let file = metrics.metrics_token_file.as_deref();
        let client = self.client_of(endpoint, METRICS_TOKEN_VARIABLE, file)?;
        Ok(Some(MetricsPage { client }))
    }

    fn client_of(
        &self,
        endpoint: &str,
        key_variable: &str,
        key_file: Option<&Path>,
    ) -> Result<Client, Failure> {
        let options = || -> anyhow::Result<ClientOptions> {
            Ok(ClientOptions {
                api_key: api_key(key_variable, key_file)?,
                timeout: Duration::from_secs(self.timeout_s),
                ca_certificates: self.ca_file.as_deref().map(read).transpose()?,
            })
        };
        let options = options().map_err(Failure::Usage)?;
        Client::new(endpoint, options).map_err(|error| {
            let file = match &error {
                ClientError::CaCertificates => self.ca_file.as_deref(),
                _ => None,
            };
            let error = anyhow!(error);
            Failure::Usage(match file {
                Some(file) => error.context(format!("{}", file.display())),
                None => error,
            })
        })
    }
}

/// What is compared: two services, or one with drafting on and off.
pub fn sides<'a>(candidate: &'a Service, reference: Option<&'a Service>) -> Sides<'a> {
    match reference {
        None => Sides::Switch(candidate),
        Some(reference) => Sides::Two {
            reference,
            candidate,
        },
    }
}

fn connect(client: Client, model: Option<&str>) -> Result<Service, Failure> {
    Service::connect(client, model).map_err(|error| Failure::CouldNotRun(error.into()))
}

fn api_key(variable: &str, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    let key = match (file, std::env::var_os(variable)) {
        (Some(file), _) => String::from_utf8(read(file)?)
            .with_context(|| format!("{} is no text", file.display()))?,
        (None, Some(key)) => key
            .into_string()
            .map_err(|_| anyhow!("{variable} is no text"))?,
        (None, None) => return Ok(None),
    };
    let key = key.trim();
    let sendable = !key.is_empty() && key.chars().all(|char| char.is_ascii_graphic());
    if !sendable {
        // The value is a secret, whatever is wrong with it.
        let source = file.map_or_else(|| variable.to_owned(), |file| file.display().to_string());
        return Err(anyhow!(
            "{source} holds no key: it must be one word of visible ASCII characters"
        ));
    }
    Ok(Some(key.to_owned()))
}

fn read(file: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}
