//! Running servers for tests: one for each bundle that many tests share, and ones of their own for tests with other settings.

use std::process::ExitStatus;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{anyhow, bail};
use outrider_bundle::manifest::Precision;
use outrider_verify::client::{Client, ClientOptions, Response};
use serde_json::Value;
use xtask::reference::{self, precision_name};
use xtask::server_process::{ServerCommand, ServerProcess};

use crate::fixtures;

/// Most time from start to ready, on a machine that does other work.
const START_DEADLINE: Duration = Duration::from_secs(180);
/// Most time of one request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(180);

/// A server that is ready.
pub struct Server {
    process: ServerProcess,
    client: Client,
    model: String,
}

/// Servers that many tests share, each started when the first test asks for it.
#[derive(Default)]
pub struct Servers {
    fp32: OnceLock<Result<Server, String>>,
    int8: OnceLock<Result<Server, String>>,
    int4: OnceLock<Result<Server, String>>,
}

impl Servers {
    /// The shared server of the reference model in `precision`.
    ///
    /// It checks whole blocks whether they pay or not, so that every test sees drafted tokens.
    pub fn of(&self, precision: Precision) -> anyhow::Result<&Server> {
        let cell = match precision {
            Precision::Fp32 => &self.fp32,
            Precision::Int8 => &self.int8,
            Precision::Int4 => &self.int4,
            Precision::Fp16 | Precision::Bf16 => bail!(
                "the reference model has no {} bundle",
                precision_name(precision)
            ),
        };
        let started = cell.get_or_init(|| {
            command(precision)
                .map(|command| command.set("serving.speculative.adaptive_width", false))
                .and_then(|command| Server::start(&command))
                .map_err(|error| format!("{error:#}"))
        });
        started.as_ref().map_err(|error| {
            anyhow!(
                "the shared {} server did not start: {error}",
                precision_name(precision)
            )
        })
    }

    /// The logs of all servers that were started, for a failed run.
    pub fn logs(&self) -> String {
        let cells = [
            ("fp32", &self.fp32),
            ("int8", &self.int8),
            ("int4", &self.int4),
        ];
        let started = cells
            .iter()
            .filter_map(|(name, cell)| Some((name, cell.get()?.as_ref().ok()?)));
        started
            .map(|(name, server)| {
                format!(
                    "--- log of the shared {name} server ---\n{}\n",
                    server.process.log_tail()
                )
            })
            .collect()
    }
}

/// How to start a server of the reference model in `precision`.
///
/// int8 has the model's own context, as a server without settings has; the others a smaller one, so that the tests run on a machine with 8 GiB.
pub fn command(precision: Precision) -> anyhow::Result<ServerCommand> {
    let workspace = fixtures::workspace()?;
    let bundle = reference::find(&workspace, precision)?;
    let library = fixtures::onnxruntime(&workspace)?;
    let command = ServerCommand::new(fixtures::server_binary()?, &bundle, &library)?
        .set("serving.runtime.kv_cache_ratio", 0.9);
    Ok(match precision {
        Precision::Int8 => command,
        _ => command.set("serving.runtime.context_tokens", 2048),
    })
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub fn start(command: &ServerCommand) -> anyhow::Result<Self> {
        let process = command.start_ready(START_DEADLINE)?;
        let options = ClientOptions {
            timeout: REQUEST_DEADLINE,
            ..ClientOptions::default()
        };
        let client = Client::new(&process.endpoint(), options)?;
        let models = client.get("/v1/models")?.json();
        let model = models
            .as_ref()
            .and_then(|models| models.pointer("/data/0/id"))
            .and_then(Value::as_str);
        let model = model
            .ok_or_else(|| anyhow!("/v1/models lists no model: {models:?}"))?
            .to_owned();
        Ok(Self {
            process,
            client,
            model,
        })
    }

    /// A client of the OpenAI-compatible interface.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// A client of the admin interface.
    pub fn admin(&self) -> anyhow::Result<Client> {
        Ok(Client::new(
            &self.process.admin_endpoint(),
            ClientOptions::default(),
        )?)
    }

    /// `PUT` to the admin interface.
    pub fn put_admin(&self, path: &str, body: &Value) -> anyhow::Result<Response> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_DEADLINE))
            .build()
            .into();
        let mut answer = agent
            .put(format!("{}{path}", self.process.admin_endpoint()))
            .content_type("application/json")
            .send(body.to_string())?;
        Ok(Response {
            status: answer.status().as_u16(),
            retry_after_seconds: None,
            body: answer.body_mut().read_to_vec()?,
        })
    }

    /// The model's name in requests.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Base URL of the OpenAI-compatible interface.
    pub fn endpoint(&self) -> String {
        self.process.endpoint()
    }

    /// Waits for the server to end, at most until `deadline`.
    pub fn wait(mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        self.process.wait(deadline)
    }

    /// Asks the server to stop and waits until it has.
    pub fn stop(self) -> anyhow::Result<()> {
        let log = self.process.log_tail();
        let status = self.process.stop(START_DEADLINE)?;
        if status.success() {
            Ok(())
        } else {
            bail!("the server ended with {status}: {log}")
        }
    }

    /// The process itself.
    pub fn process(&self) -> &ServerProcess {
        &self.process
    }
}
