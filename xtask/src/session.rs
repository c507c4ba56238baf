//! A server that is measured: started, asked, switched and scraped.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use outrider_verify::client::{Client, ClientOptions};
use serde_json::{Value, json};

use crate::server_process::{ServerCommand, ServerProcess};

/// Most time from start to ready, on a machine that does other work.
const START_DEADLINE: Duration = Duration::from_secs(300);
/// Most time of one request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(600);

/// A running server with its clients. Dropping it kills the server.
pub struct Session {
    process: ServerProcess,
    client: Client,
    admin: ureq::Agent,
    card: Value,
}

impl Session {
    /// Starts a server and waits until it is ready.
    pub fn start(command: &ServerCommand) -> anyhow::Result<Self> {
        Self::start_as(command, None)
    }

    /// Starts a server whose callers need a key, and waits until it is ready.
    pub fn start_as(command: &ServerCommand, api_key: Option<String>) -> anyhow::Result<Self> {
        let process = command.start_ready(START_DEADLINE)?;
        let options = ClientOptions {
            api_key,
            timeout: REQUEST_DEADLINE,
            ..ClientOptions::default()
        };
        let client = Client::new(&process.endpoint(), options)?;
        let models = client
            .get("/v1/models")?
            .json()
            .context("/v1/models is no JSON")?;
        let card = models
            .pointer("/data/0")
            .context("/v1/models lists no model")?
            .clone();
        ensure!(card["id"].is_string(), "the model has no name: {card}");
        let admin = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_DEADLINE))
            .build()
            .into();
        Ok(Self {
            process,
            client,
            admin,
            card,
        })
    }

    /// A client of the OpenAI-compatible interface.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The model's name in requests.
    pub fn model(&self) -> &str {
        self.fact("id")
    }

    /// A text of the model's card, such as `bundle_digest` or `lossless_class`; empty when the server does not say.
    pub fn fact(&self, name: &str) -> &str {
        self.card[name].as_str().unwrap_or_default()
    }

    /// Why the server can't draft; `None` when it can.
    pub fn unavailable(&self) -> Option<String> {
        let speculation = &self.card["speculation"];
        match speculation["drafting"].as_str() {
            Some("unavailable") => Some(
                speculation["detail"]
                    .as_str()
                    .unwrap_or("the server does not say why")
                    .to_owned(),
            ),
            Some(_) => None,
            None => Some("the server knows of no drafting".to_owned()),
        }
    }

    /// Tokens of the widest draft block, the anchor included.
    pub fn block_size(&self) -> Option<u64> {
        self.card["speculation"]["block_size"].as_u64()
    }

    /// The process itself.
    pub fn process(&self) -> &ServerProcess {
        &self.process
    }

    /// Asks the server to stop and waits until it has.
    pub fn stop(self, deadline: Duration) -> anyhow::Result<()> {
        let status = self.process.stop(deadline)?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    /// Switches drafting on or off for everything that runs.
    pub fn set_speculation(&self, enabled: bool) -> anyhow::Result<()> {
        let url = format!("{}/admin/speculation", self.process.admin_endpoint());
        let mut response = self
            .admin
            .put(&url)
            .content_type("application/json")
            .send(json!({ "enabled": enabled }).to_string())
            .with_context(|| format!("PUT {url}"))?;
        let status = response.status().as_u16();
        let body = response
            .body_mut()
            .read_to_string()
            .with_context(|| format!("PUT {url}"))?;
        ensure!(status == 200, "PUT {url} was answered {status} {body}");
        Ok(())
    }

    /// Reads `/metrics`.
    pub fn scrape(&self) -> anyhow::Result<Scrape> {
        let admin = Client::new(&self.process.admin_endpoint(), ClientOptions::default())?;
        let response = admin.get("/metrics")?;
        if response.status != 200 {
            bail!("/metrics was answered {}", response.status);
        }
        Scrape::parse(&response.text())
    }
}

/// The values of one reading of `/metrics`, summed over labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    /// Reads the text format of Prometheus.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut values = BTreeMap::new();
        for line in text.lines() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parts = line.rsplit_once(' ').and_then(|(series, value)| {
                Some((series.split('{').next()?, value.parse::<f64>().ok()?))
            });
            let (name, value) = parts.with_context(|| format!("no metric: {line:?}"))?;
            *values.entry(name.to_owned()).or_default() += value;
        }
        Ok(Self(values))
    }

    /// The value of a metric; 0 for one that was never recorded.
    pub fn value(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }

    /// How much a counter, or the `_sum` or `_count` of a histogram, grew since `earlier`; 0 for one that was never recorded.
    pub fn growth(&self, earlier: &Self, name: &str) -> f64 {
        self.value(name) - earlier.value(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_one_metric_are_summed_and_unknown_ones_are_zero() {
        let scrape = |first: f64| {
            Scrape::parse(&format!(
                "# HELP a text\n# TYPE a counter\na{{cause=\"x y\"}} {first}\na{{cause=\"z\"}} 2\n\nb_sum 0.25\n"
            ))
            .unwrap()
        };
        let (earlier, later) = (scrape(1.0), scrape(4.5));
        assert_eq!(later.growth(&earlier, "a"), 3.5);
        assert_eq!(later.growth(&earlier, "b_sum"), 0.0);
        assert_eq!(later.growth(&Scrape::default(), "b_sum"), 0.25);
        assert_eq!(later.growth(&earlier, "c"), 0.0);
        assert!(Scrape::parse("a b\n").is_err());
    }
}
