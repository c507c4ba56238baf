//! The configuration: defaults, then a YAML file, then the environment, then flags; each layer overrides the one before.
//!
//! Nothing is ignored: an unknown key is a fault, and every fault is found before the first one is reported.
//! No key holds a secret; the value of an unknown key is not repeated in its fault, because it might be one.

mod arguments;
mod fault;
mod keys;
mod layers;
mod reference;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use actix_web::http::Uri;
use figment::Figment;
use figment::value::{Dict, Num, Value};

pub use arguments::ConfigArguments;
pub(crate) use fault::suggestion;
pub use fault::{ConfigError, Fault, Problem};
pub use keys::{KEYS, Key, Kind};
pub use layers::{ENVIRONMENT_PREFIX, LayerError, Origin};
pub use reference::reference;

use crate::listen::Endpoint;
use layers::Layer;

/// Where the layers of a configuration are.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// A YAML file.
    pub file: Option<PathBuf>,
    /// Environment variables; those without [`ENVIRONMENT_PREFIX`] are skipped.
    pub environment: Vec<(String, String)>,
    /// Values from the command line, by dotted path.
    pub flags: Vec<(String, String)>,
}

/// A complete, checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the bundle.
    pub bundle: PathBuf,
    /// Name for callers, when it is not the bundle's.
    pub model_name: Option<String>,
    /// Address of the OpenAI-compatible interface.
    pub listen: SocketAddr,
    /// Address of the admin listener.
    pub admin_listen: Endpoint,
    /// How long running requests may go on after a stop was asked for.
    pub shutdown_grace: Duration,
    /// Who may call.
    pub auth: Auth,
    /// Certificate and key, when the OpenAI-compatible interface speaks TLS.
    pub tls: Option<Tls>,
    /// Limits of connections.
    pub http: Http,
    /// Drafting.
    pub speculative: Speculative,
    /// Execution and limits.
    pub runtime: Runtime,
    /// Logging.
    pub logging: Logging,
    /// The audit log, when there is one.
    pub audit: Option<Audit>,
    /// Where spans are sent, when they are: the URL of an OTLP collector over HTTP.
    pub otlp_endpoint: Option<String>,
    settings: Vec<Setting>,
}

/// Who may call.
#[derive(Clone, Debug)]
pub struct Auth {
    /// File of the API keys; without one callers need none.
    pub api_keys_path: Option<PathBuf>,
    /// File of the tokens of the admin interface; without one it asks for none.
    pub admin_tokens_path: Option<PathBuf>,
    /// Whether a listener beyond loopback may do without.
    pub allow_unauthenticated: bool,
}

/// What the OpenAI-compatible interface proves itself with.
#[derive(Clone, Debug)]
pub struct Tls {
    /// PEM file of the certificate chain.
    pub certificate_path: PathBuf,
    /// PEM file of the private key.
    pub private_key_path: PathBuf,
}

/// Limits of connections.
#[derive(Clone, Debug)]
pub struct Http {
    /// Origins whose pages may call.
    pub cors_allowed_origins: Vec<String>,
    /// Connections that are open at the same time.
    pub max_connections: usize,
    /// Time for the head of a request.
    pub header_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Longest time in which a client takes none of its answer.
    pub write_timeout: Duration,
}

/// The audit log.
#[derive(Clone, Debug)]
pub struct Audit {
    /// File to append to.
    pub path: PathBuf,
    /// Whether it holds prompts and completions as text.
    pub prompt_text: bool,
    /// Size at which it is rotated.
    pub max_file_bytes: u64,
    /// Files that are kept, the present one included.
    pub max_files: usize,
}

/// Drafting.
#[derive(Clone, Debug)]
pub struct Speculative {
    /// Whether to draft, until it is switched while the server runs.
    pub enabled: bool,
    /// Whether to refuse to start when the draft can't be used.
    pub required: bool,
    /// Tokens of one draft block, when it is not the draft's own.
    pub draft_block_size: Option<usize>,
    /// Whether measured costs choose how much of a block is checked.
    pub adaptive_width: bool,
    /// Candidates per position, when it is not the draft's own.
    pub candidate_topk: Option<usize>,
    /// How drafted tokens are accepted.
    pub acceptance_strategy: AcceptanceStrategy,
}

/// How drafted tokens are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptanceStrategy {
    /// Only when the token is the target's own choice.
    Strict,
}

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionProvider {
    /// The CPU provider of ONNX Runtime.
    Cpu,
    /// The CUDA provider of ONNX Runtime.
    Cuda,
}

/// Execution and limits.
#[derive(Clone, Debug)]
pub struct Runtime {
    /// Where the model runs.
    pub execution_provider: ExecutionProvider,
    /// The ONNX Runtime shared library.
    pub onnxruntime_library: PathBuf,
    /// Completions that run at the same time.
    pub max_concurrency: usize,
    /// Tokens of one slot, when it is not the model's own context.
    pub context_tokens: Option<usize>,
    /// Share of free memory the KV memory may take.
    pub kv_cache_ratio: f64,
    /// Prompt tokens one step takes from one sequence.
    pub prefill_chunk_tokens: usize,
    /// Threads one step computes with; `None` is one for each core.
    pub intra_op_threads: Option<NonZeroUsize>,
    /// Completions that may wait for a slot.
    pub queue_capacity: usize,
    /// Longest wait for a slot.
    pub queue_timeout: Duration,
    /// Longest time from the arrival of a request to the end of its answer.
    pub request_deadline: Duration,
    /// Whether a completion starts from what is still in the KV memory of its prompt.
    pub prefix_cache: bool,
    /// Slots beside those that run in which beginnings of prompts are kept.
    pub prefix_cache_slots: usize,
    /// Most completions of one request.
    pub max_completions_per_request: usize,
    /// Longest request body.
    pub request_body_limit_bytes: usize,
    /// Oldest heartbeat of an engine that counts as alive.
    pub heartbeat_limit: Duration,
    /// Oldest heartbeat of an engine that the process goes on with.
    pub stall_limit: Duration,
}

/// Logging.
#[derive(Clone, Debug)]
pub struct Logging {
    /// Least severe level that is logged.
    pub level: tracing::Level,
    /// Shape of a record.
    pub format: LogFormat,
    /// File to append to; `None` is standard error.
    pub path: Option<PathBuf>,
}

/// Shape of a log record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One line of text.
    Text,
    /// One JSON object.
    Json,
}

/// The value one key ended up with.
#[derive(Clone, Debug)]
struct Setting {
    key: &'static Key,
    value: Option<Scalar>,
    origin: Origin,
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
enum Scalar {
    Flag(bool),
    Text(String),
    Integer(u64),
    Share(f64),
}

impl Config {
    /// Merges the layers and checks every key; reports every fault it finds.
    pub fn load(sources: &Sources) -> Result<Self, ConfigError> {
        let mut layers = Vec::new();
        if let Some(path) = &sources.file {
            layers.push(Layer::file(path)?);
        }
        layers.push(Layer::environment(sources.environment.iter().cloned()));
        layers.push(Layer::flags(sources.flags.iter().cloned()));

        let mut faults = misspelt_variables(&sources.environment);
        for layer in &layers {
            // Each layer by itself: a later one must not hide what is wrong with the shape of an earlier one.
            find_strangers(layer, "", layer.values(), &mut faults);
        }
        let figment = layers.into_iter().fold(Figment::new(), Figment::merge);
        let settings = read_settings(&figment, &mut faults);
        faults.extend(conflicts(&settings));
        if faults.is_empty() {
            Ok(Self::of(settings))
        } else {
            Err(ConfigError::Faults(faults))
        }
    }

    fn of(settings: Vec<Setting>) -> Self {
        let values = Values(&settings);
        let count = |path| usize::try_from(values.integer(path)).unwrap_or(usize::MAX);
        let optional_count = |path| {
            values
                .optional_integer(path)
                .and_then(|value| usize::try_from(value).ok())
        };
        let path = |path| values.text(path).map(PathBuf::from);
        let time = |path| Duration::from_millis(values.integer(path));
        Self {
            bundle: values
                .text("serving.bundle")
                .or_else(|| values.text("serving.target_model_path"))
                .map(PathBuf::from)
                .unwrap_or_default(),
            model_name: values.text("serving.model_name").map(str::to_owned),
            listen: values.address("serving.listen"),
            admin_listen: values.endpoint("serving.admin_listen"),
            shutdown_grace: time("serving.shutdown_grace_ms"),
            auth: Auth {
                api_keys_path: path("serving.auth.api_keys_path"),
                admin_tokens_path: path("serving.auth.admin_tokens_path"),
                allow_unauthenticated: values.flag("serving.auth.allow_unauthenticated"),
            },
            tls: path("serving.tls.certificate_path")
                .zip(path("serving.tls.private_key_path"))
                .map(|(certificate_path, private_key_path)| Tls {
                    certificate_path,
                    private_key_path,
                }),
            http: Http {
                cors_allowed_origins: values.origins().map(str::to_owned).collect(),
                max_connections: count("serving.http.max_connections"),
                header_timeout: time("serving.http.header_timeout_ms"),
                body_timeout: time("serving.http.body_timeout_ms"),
                write_timeout: time("serving.http.write_timeout_ms"),
            },
            speculative: Speculative {
                enabled: values.flag("serving.speculative.enabled"),
                required: values.flag("serving.speculative.required"),
                draft_block_size: optional_count("serving.speculative.draft_block_size"),
                adaptive_width: values.flag("serving.speculative.adaptive_width"),
                candidate_topk: optional_count("serving.speculative.candidate_topk"),
                acceptance_strategy: AcceptanceStrategy::Strict,
            },
            runtime: Runtime {
                execution_provider: match values.text("serving.runtime.execution_provider") {
                    Some("cuda") => ExecutionProvider::Cuda,
                    _ => ExecutionProvider::Cpu,
                },
                onnxruntime_library: values
                    .text("serving.runtime.onnxruntime_library")
                    .map(PathBuf::from)
                    .unwrap_or_default(),
                max_concurrency: count("serving.runtime.max_concurrency"),
                context_tokens: optional_count("serving.runtime.context_tokens"),
                kv_cache_ratio: values.share("serving.runtime.kv_cache_ratio"),
                prefill_chunk_tokens: count("serving.runtime.prefill_chunk_tokens"),
                intra_op_threads: optional_count("serving.runtime.intra_op_threads")
                    .and_then(NonZeroUsize::new),
                queue_capacity: count("serving.runtime.queue_capacity"),
                queue_timeout: time("serving.runtime.queue_timeout_ms"),
                request_deadline: time("serving.runtime.request_deadline_ms"),
                prefix_cache: values.flag("serving.runtime.prefix_cache"),
                prefix_cache_slots: count("serving.runtime.prefix_cache_slots"),
                max_completions_per_request: count("serving.runtime.max_completions_per_request"),
                request_body_limit_bytes: count("serving.runtime.request_body_limit_bytes"),
                heartbeat_limit: time("serving.runtime.heartbeat_limit_ms"),
                stall_limit: time("serving.runtime.stall_limit_ms"),
            },
            logging: Logging {
                level: values
                    .text("serving.logging.level")
                    .and_then(|level| level.parse().ok())
                    .unwrap_or(tracing::Level::INFO),
                format: match values.text("serving.logging.format") {
                    Some("json") => LogFormat::Json,
                    _ => LogFormat::Text,
                },
                path: path("serving.logging.path"),
            },
            audit: path("serving.audit.path").map(|path| Audit {
                path,
                prompt_text: values.flag("serving.audit.prompt_text"),
                max_file_bytes: values.integer("serving.audit.max_file_bytes"),
                max_files: count("serving.audit.max_files"),
            }),
            otlp_endpoint: values
                .text("serving.telemetry.otlp_endpoint")
                .map(str::to_owned),
            settings,
        }
    }

    /// The effective configuration as YAML, every key in the order of [`KEYS`], `null` where nothing is set.
    pub fn to_yaml(&self) -> String {
        reference::effective(&self.settings)
    }

    /// The effective configuration as one line of JSON, for the log: without what is secret in a URL.
    pub fn to_json(&self) -> String {
        reference::effective_json(&self.settings)
    }

    /// The keys whose values differ in `other`, in the order of [`KEYS`].
    pub fn changes_to(&self, other: &Self) -> Vec<&'static Key> {
        self.settings
            .iter()
            .zip(&other.settings)
            .filter(|(here, there)| here.value != there.value)
            .map(|(here, _)| here.key)
            .collect()
    }

    /// Every key that is not at its default, with its value and where it came from, for the log: without what is secret in a URL.
    pub fn overrides(&self) -> impl Iterator<Item = (&'static str, String, &Origin)> {
        self.settings
            .iter()
            .filter(|setting| setting.origin != Origin::Default)
            .map(|setting| {
                let value = match &setting.value {
                    Some(Scalar::Text(text)) => fault::without_credentials(text).into_owned(),
                    Some(other) => other.to_string(),
                    None => "null".to_owned(),
                };
                (setting.key.path, value, &setting.origin)
            })
    }
}

/// Reads typed values out of settings that were checked against [`KEYS`].
struct Values<'a>(&'a [Setting]);

impl<'a> Values<'a> {
    fn scalar(&self, path: &str) -> Option<&'a Scalar> {
        let setting = self.0.iter().find(|setting| setting.key.path == path);
        debug_assert!(setting.is_some(), "{path} is not a key");
        setting.and_then(|setting| setting.value.as_ref())
    }

    fn text(&self, path: &str) -> Option<&'a str> {
        match self.scalar(path) {
            Some(Scalar::Text(text)) => Some(text),
            _ => None,
        }
    }

    fn flag(&self, path: &str) -> bool {
        matches!(self.scalar(path), Some(Scalar::Flag(true)))
    }

    fn optional_integer(&self, path: &str) -> Option<u64> {
        match self.scalar(path) {
            Some(Scalar::Integer(value)) => Some(*value),
            _ => None,
        }
    }

    fn integer(&self, path: &str) -> u64 {
        self.optional_integer(path).unwrap_or_default()
    }

    fn share(&self, path: &str) -> f64 {
        match self.scalar(path) {
            Some(Scalar::Share(value)) => *value,
            _ => 0.0,
        }
    }

    /// The origins of `serving.http.cors_allowed_origins`.
    fn origins(&self) -> impl Iterator<Item = &'a str> {
        self.text("serving.http.cors_allowed_origins")
            .into_iter()
            .flat_map(|text| text.split(','))
            .map(str::trim)
    }

    fn endpoint(&self, path: &str) -> Endpoint {
        self.text(path)
            .and_then(|text| text.parse().ok())
            .unwrap_or(Endpoint::Tcp(SocketAddr::from(([127, 0, 0, 1], 0))))
    }

    fn address(&self, path: &str) -> SocketAddr {
        self.text(path)
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)))
    }
}

/// Whether a text is an origin as browsers send it: a scheme, a host in lower case and possibly a port, and nothing behind.
fn is_origin(text: &str) -> bool {
    let Some((scheme, authority)) = text.split_once("://") else {
        return false;
    };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_word = |text: &str, others: &[u8]| {
        !text.is_empty()
            && text.bytes().all(|byte| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || others.contains(&byte)
            })
    };
    is_word(scheme, b"+-.")
        && is_word(host, b"-.[]:")
        && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

/// Faults for variables that look like values of keys and are none.
fn misspelt_variables(environment: &[(String, String)]) -> Vec<Fault> {
    let plain = |name: &str| name.replace("__", "_");
    let fault = |name: &str| {
        let meant = KEYS
            .iter()
            .map(|key| layers::variable_of(key.path))
            .find(|variable| plain(variable) == plain(name));
        Fault {
            path: name.to_owned(),
            value: None,
            origin: Origin::Default,
            problem: Problem::MisspeltVariable { suggestion: meant },
        }
    };
    Layer::misspelt(environment).map(fault).collect()
}

/// Finds keys that are not known, and values where a group of keys belongs.
fn find_strangers(layer: &Layer, prefix: &str, values: &Dict, faults: &mut Vec<Fault>) {
    for (name, value) in values {
        let name = if name.contains('.') {
            format!("\"{name}\"")
        } else {
            name.clone()
        };
        let path = if prefix.is_empty() {
            name
        } else {
            format!("{prefix}.{name}")
        };
        if KEYS.iter().any(|key| key.path == path) {
            continue;
        }
        let is_group = KEYS.iter().any(|key| is_below(key.path, &path));
        let problem = match value {
            Value::Dict(_, inner) if is_group => {
                find_strangers(layer, &path, inner, faults);
                continue;
            }
            Value::Empty(..) if is_group => continue,
            _ if is_group => Problem::NotAGroup,
            _ => Problem::UnknownKey {
                suggestion: suggestion(&path, known_paths()),
            },
        };
        faults.push(Fault {
            value: is_group.then(|| show(value)),
            origin: layer.origin(&path),
            path,
            problem,
        });
    }
}

/// The value of every key, from the last layer that sets it.
fn read_settings(figment: &Figment, faults: &mut Vec<Fault>) -> Vec<Setting> {
    let read_key = |key: &'static Key| {
        let given = figment
            .find_value(key.path)
            .ok()
            .filter(|value| !matches!(value, Value::Empty(..)));
        let Some(given) = given else {
            return Setting {
                key,
                value: default_of(key),
                origin: Origin::Default,
            };
        };
        let origin = Origin::of(figment.get_metadata(given.tag()), key.path);
        let value = read(key.kind, &given, origin.carries_text());
        if value.is_none() {
            faults.push(Fault {
                path: key.path.to_owned(),
                value: Some(show(&given)),
                origin: origin.clone(),
                problem: Problem::NotAllowed { allowed: key.kind },
            });
        }
        Setting { key, value, origin }
    };
    KEYS.iter().map(read_key).collect()
}

/// Paths of all keys and of the groups they are in.
fn known_paths() -> impl Iterator<Item = &'static str> {
    KEYS.iter().flat_map(|key| {
        let groups = key.path.match_indices('.').map(|(end, _)| &key.path[..end]);
        groups.chain([key.path])
    })
}

fn is_below(path: &str, group: &str) -> bool {
    path.strip_prefix(group)
        .is_some_and(|rest| rest.starts_with('.'))
}

fn default_of(key: &Key) -> Option<Scalar> {
    match key.default {
        keys::Default::Value(text) => read_text(key.kind, text),
        keys::Default::Unset(_) => None,
    }
}

fn read(kind: Kind, value: &Value, carries_text: bool) -> Option<Scalar> {
    match value {
        Value::String(_, text) if carries_text => read_text(kind, text),
        Value::String(_, text) => match kind {
            Kind::Text
            | Kind::Path
            | Kind::Address
            | Kind::Endpoint
            | Kind::Url
            | Kind::OneOf(_) => read_text(kind, text),
            Kind::Flag | Kind::Integer { .. } | Kind::Share => None,
        },
        Value::Bool(_, flag) if kind == Kind::Flag => Some(Scalar::Flag(*flag)),
        Value::Num(_, number) => match kind {
            Kind::Integer { min, max } => {
                let value = whole(number)?;
                (min..=max)
                    .contains(&value)
                    .then_some(Scalar::Integer(value))
            }
            Kind::Share => {
                let value = number
                    .to_f64()
                    .or_else(|| whole(number).map(|value| value as f64))?;
                is_share(value).then_some(Scalar::Share(value))
            }
            _ => None,
        },
        _ => None,
    }
}

fn whole(number: &Num) -> Option<u64> {
    let value = number.to_u128().or_else(|| {
        number
            .to_i128()
            .and_then(|value| u128::try_from(value).ok())
    })?;
    u64::try_from(value).ok()
}

fn is_share(value: f64) -> bool {
    value > 0.0 && value <= 1.0
}

fn read_text(kind: Kind, text: &str) -> Option<Scalar> {
    match kind {
        Kind::Flag => text.parse().ok().map(Scalar::Flag),
        Kind::Text | Kind::Path => (!text.trim().is_empty()).then(|| Scalar::Text(text.to_owned())),
        Kind::Address => text
            .parse::<SocketAddr>()
            .ok()
            .map(|_| Scalar::Text(text.to_owned())),
        Kind::Endpoint => text
            .parse::<Endpoint>()
            .is_ok()
            .then(|| Scalar::Text(text.to_owned())),
        Kind::Url => is_http_url(text).then(|| Scalar::Text(text.to_owned())),
        Kind::OneOf(names) => names.contains(&text).then(|| Scalar::Text(text.to_owned())),
        Kind::Integer { min, max } => text
            .parse()
            .ok()
            .filter(|value| (min..=max).contains(value))
            .map(Scalar::Integer),
        Kind::Share => text
            .parse()
            .ok()
            .filter(|value| is_share(*value))
            .map(Scalar::Share),
    }
}

fn is_http_url(text: &str) -> bool {
    text.parse::<Uri>()
        .is_ok_and(|url| matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some())
}

fn show(value: &Value) -> String {
    match value {
        Value::String(_, text) => format!("\"{text}\""),
        Value::Char(_, character) => format!("\"{character}\""),
        Value::Bool(_, flag) => flag.to_string(),
        Value::Num(_, number) => number
            .to_u128()
            .map(|value| value.to_string())
            .or_else(|| number.to_i128().map(|value| value.to_string()))
            .or_else(|| number.to_f64().map(|value| value.to_string()))
            .unwrap_or_else(|| "a number".to_owned()),
        Value::Empty(..) => "null".to_owned(),
        Value::Dict(..) => "a group of keys".to_owned(),
        Value::Array(..) => "a list".to_owned(),
    }
}

/// Keys that name files which the server reads.
const FILES_THAT_ARE_READ: [&str; 5] = [
    "serving.auth.api_keys_path",
    "serving.auth.admin_tokens_path",
    "serving.tls.certificate_path",
    "serving.tls.private_key_path",
    "serving.runtime.onnxruntime_library",
];

/// What a path leads to, as far as links can be followed.
fn place(path: &Path) -> PathBuf {
    path.canonicalize()
        .or_else(|_| std::path::absolute(path))
        .unwrap_or_else(|_| path.to_owned())
}

/// Whether a file is, or would be, inside a directory.
fn is_inside(file: &Path, dir: &Path) -> bool {
    // A file that is not there yet has no links to follow; its directory may.
    let file = match (file.parent(), file.file_name()) {
        (Some(parent), Some(name)) => place(&Path::new(".").join(parent)).join(name),
        _ => place(file),
    };
    file.starts_with(place(dir))
}

/// Rules that more than one key has a part in.
fn conflicts(settings: &[Setting]) -> Vec<Fault> {
    let values = Values(settings);
    let mut faults = Vec::new();
    let mut fault = |path: &str, problem: Problem| {
        let setting = settings.iter().find(|setting| setting.key.path == path);
        faults.push(Fault {
            path: path.to_owned(),
            value: setting
                .and_then(|setting| setting.value.as_ref())
                .map(Scalar::to_string),
            origin: setting.map_or(Origin::Default, |setting| setting.origin.clone()),
            problem,
        });
    };
    // A key whose own value is at fault is set, though it has no value here.
    let is_set = |path: &str| {
        settings
            .iter()
            .any(|setting| setting.key.path == path && setting.origin != Origin::Default)
    };

    match (
        is_set("serving.bundle"),
        is_set("serving.target_model_path"),
    ) {
        (false, false) => fault("serving.bundle", Problem::Required),
        (true, true) => fault(
            "serving.target_model_path",
            Problem::Conflict("serving.bundle is set too, and only one of them may be"),
        ),
        _ => {}
    }
    if !is_set("serving.runtime.onnxruntime_library") {
        fault("serving.runtime.onnxruntime_library", Problem::Required);
    }
    let bundle = values
        .text("serving.bundle")
        .or_else(|| values.text("serving.target_model_path"));
    if let (Some(draft), Some(bundle)) = (values.text("serving.draft_model_path"), bundle)
        && place(Path::new(draft)) != place(Path::new(bundle))
    {
        fault(
            "serving.draft_model_path",
            Problem::Conflict(
                "a draft is served from the bundle of its target: give the same directory as there, or leave the key out",
            ),
        );
    }
    for key in ["serving.logging.path", "serving.audit.path"] {
        if let (Some(file), Some(bundle)) = (values.text(key), bundle)
            && is_inside(Path::new(file), Path::new(bundle))
        {
            fault(
                key,
                Problem::Conflict(
                    "it is inside the bundle, which may hold only the files that its manifest names: give a file elsewhere",
                ),
            );
        }
    }
    let listen = values.address("serving.listen");
    if listen.port() != 0 && Endpoint::Tcp(listen) == values.endpoint("serving.admin_listen") {
        fault(
            "serving.admin_listen",
            Problem::Conflict(
                "serving.listen is the same address; the two listeners need their own",
            ),
        );
    }
    for (listener, file, reason) in [
        (
            "serving.listen",
            "serving.auth.api_keys_path",
            "a listener beyond loopback needs serving.auth.api_keys_path; serving.auth.allow_unauthenticated: true lets everyone who reaches it call",
        ),
        (
            "serving.admin_listen",
            "serving.auth.admin_tokens_path",
            "a listener beyond loopback needs serving.auth.admin_tokens_path; serving.auth.allow_unauthenticated: true lets everyone who reaches it operate",
        ),
    ] {
        // A socket in the file system is guarded by its permissions.
        let is_local = match values.endpoint(listener) {
            Endpoint::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Endpoint::Unix(_) => true,
        };
        if !is_local && !is_set(file) && !values.flag("serving.auth.allow_unauthenticated") {
            fault(listener, Problem::Conflict(reason));
        }
    }
    for (given, missing) in [
        (
            "serving.tls.certificate_path",
            "serving.tls.private_key_path",
        ),
        (
            "serving.tls.private_key_path",
            "serving.tls.certificate_path",
        ),
    ] {
        if is_set(given) && !is_set(missing) {
            fault(missing, Problem::RequiredWith(given));
        }
    }
    if !values.origins().all(is_origin) {
        fault(
            "serving.http.cors_allowed_origins",
            Problem::Conflict(
                "each origin must be a scheme, `://`, a host in lower case and possibly a port, as browsers send it, such as https://chat.example.com; `*` is not taken",
            ),
        );
    }
    if let Endpoint::Unix(path) = values.endpoint("serving.admin_listen")
        && std::os::unix::net::SocketAddr::from_pathname(&path).is_err()
    {
        fault(
            "serving.admin_listen",
            Problem::Conflict("its path is longer than the system allows for a socket"),
        );
    }
    let audit = values.text("serving.audit.path").map(Path::new);
    if audit.is_some() && audit == values.text("serving.logging.path").map(Path::new) {
        fault(
            "serving.audit.path",
            Problem::Conflict("serving.logging.path is the same file; the two logs need their own"),
        );
    }
    let leads_to = |key: &str| values.text(key).map(|path| place(Path::new(path)));
    for log in ["serving.logging.path", "serving.audit.path"] {
        let path = leads_to(log);
        let is_read = |key: &&str| leads_to(key) == path;
        if path.is_some() && FILES_THAT_ARE_READ.iter().any(is_read) {
            fault(
                log,
                Problem::Conflict(
                    "it is a file that the server reads, as another key says; lines appended to it would spoil it",
                ),
            );
        }
    }
    if values.integer("serving.runtime.stall_limit_ms")
        <= values.integer("serving.runtime.heartbeat_limit_ms")
    {
        fault(
            "serving.runtime.stall_limit_ms",
            Problem::Conflict(
                "it must be above serving.runtime.heartbeat_limit_ms, so that /livez tells before the process ends",
            ),
        );
    }
    let queue_capacity = values.optional_integer("serving.runtime.queue_capacity");
    if queue_capacity.is_some_and(|capacity| {
        values.integer("serving.runtime.max_completions_per_request") > capacity
    }) {
        fault(
            "serving.runtime.max_completions_per_request",
            Problem::Conflict(
                "it is above serving.runtime.queue_capacity, so such a request could not be queued",
            ),
        );
    }
    faults
}

impl std::fmt::Display for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Text(text) => write!(f, "\"{text}\""),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Share(value) => write!(f, "{value}"),
        }
    }
}
