//! Every configuration key: its path, what values it takes, its default and what it means.
//!
//! This table is the only list of keys. Reading, fault messages, the printed effective configuration and the reference file
//! `configs/server.yaml` all come from it.

use std::fmt;

/// One configuration key.
#[derive(Debug)]
pub struct Key {
    /// Dotted path from the root of the file.
    pub path: &'static str,
    /// Values it takes.
    pub kind: Kind,
    /// What holds when no layer sets it.
    pub default: Default,
    /// What it does, in whole sentences, one per line.
    pub help: &'static str,
}

/// Keys whose change a reload applies while the server runs. What stands in the files that keys name is read again as well.
pub(super) const CHANGE_WHILE_RUNNING: &[&str] = &[
    "serving.shutdown_grace_ms",
    "serving.auth.api_keys_path",
    "serving.auth.admin_tokens_path",
    "serving.auth.allow_unauthenticated",
    "serving.http.body_timeout_ms",
    "serving.http.write_timeout_ms",
    "serving.speculative.enabled",
    "serving.runtime.prefill_chunk_tokens",
    "serving.runtime.queue_capacity",
    "serving.runtime.queue_timeout_ms",
    "serving.runtime.request_deadline_ms",
    "serving.runtime.max_completions_per_request",
    "serving.runtime.request_body_limit_bytes",
    "serving.runtime.heartbeat_limit_ms",
    "serving.runtime.stall_limit_ms",
    "serving.logging.level",
];

impl Key {
    /// Whether a reload applies a change of this key; a change of any other refuses the whole reload.
    pub fn changes_while_running(&self) -> bool {
        CHANGE_WHILE_RUNNING.contains(&self.path)
    }
}

/// What holds when no layer sets a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Default {
    /// This text, read like the value of an environment variable.
    Value(&'static str),
    /// Nothing; the text says what follows from that.
    Unset(&'static str),
}

/// The values a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// Any text that is not empty.
    Text,
    /// A path, relative to the working directory unless it is absolute.
    Path,
    /// An IP address and a port.
    Address,
    /// An IP address and a port, or a socket in the file system.
    Endpoint,
    /// The URL of an HTTP service.
    Url,
    /// One of these names.
    OneOf(&'static [&'static str]),
    /// A whole number within these bounds.
    Integer {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// A number above 0 and at most 1.
    Share,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("true or false"),
            Self::Text => f.write_str("text that is not empty"),
            Self::Path => f.write_str("a path"),
            Self::Address => {
                f.write_str("an IP address and a port, such as 127.0.0.1:8080 or [::1]:8080")
            }
            Self::Endpoint => f.write_str(
                "an IP address and a port, or unix: and the absolute path of a socket, such as unix:/run/outrider/admin.sock",
            ),
            Self::Url => f.write_str("a URL that begins with http:// or https://"),
            Self::OneOf([name]) => f.write_str(name),
            Self::OneOf(names) => {
                f.write_str("one of ")?;
                for (position, name) in names.iter().enumerate() {
                    if position > 0 {
                        f.write_str(", ")?;
                    }
                    f.write_str(name)?;
                }
                Ok(())
            }
            Self::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            Self::Share => f.write_str("a number above 0 and at most 1"),
        }
    }
}

const MAX_TOKENS: u64 = 1 << 24;

/// Every key, grouped as the reference file prints them.
pub const KEYS: &[Key] = &[
    Key {
        path: "serving.bundle",
        kind: Kind::Path,
        default: Default::Unset("this or target_model_path is required"),
        help: "Directory of the bundle to serve.",
    },
    Key {
        path: "serving.target_model_path",
        kind: Kind::Path,
        default: Default::Unset("see bundle"),
        help: "Another name for bundle: the directory of the bundle that holds the target.",
    },
    Key {
        path: "serving.draft_model_path",
        kind: Kind::Path,
        default: Default::Unset("see bundle"),
        help: "Directory of the bundle that holds the draft. A bundle holds target and draft together, so this is the same directory, and may as well be left out.",
    },
    Key {
        path: "serving.model_name",
        kind: Kind::Text,
        default: Default::Unset("the name in the bundle"),
        help: "Name that callers use for the model.",
    },
    Key {
        path: "serving.listen",
        kind: Kind::Address,
        default: Default::Value("127.0.0.1:8080"),
        help: "Address of the OpenAI-compatible interface. Beyond loopback it needs auth.api_keys_path, or auth.allow_unauthenticated.",
    },
    Key {
        path: "serving.admin_listen",
        kind: Kind::Endpoint,
        default: Default::Value("127.0.0.1:8081"),
        help: "Address of /livez, /readyz, /metrics and /admin/speculation. Beyond loopback it needs auth.admin_tokens_path, or auth.allow_unauthenticated. A socket is for the owner and the group of the process.",
    },
    Key {
        path: "serving.shutdown_grace_ms",
        kind: Kind::Integer {
            min: 0,
            max: 3_600_000,
        },
        default: Default::Value("30000"),
        help: "How long running requests may go on after SIGTERM or SIGINT.",
    },
    Key {
        path: "serving.auth.api_keys_path",
        kind: Kind::Path,
        default: Default::Unset("callers need no key"),
        help: "File of the API keys that callers may use: a name and the SHA-256 of the secret in each line. outrider-server --new-key NAME makes one. SIGHUP reads the file again.",
    },
    Key {
        path: "serving.auth.admin_tokens_path",
        kind: Kind::Path,
        default: Default::Unset("the admin interface asks for no token"),
        help: "File of the tokens for the admin interface, in the same form. SIGHUP reads it again. /livez and /readyz never ask for one.",
    },
    Key {
        path: "serving.auth.allow_unauthenticated",
        kind: Kind::Flag,
        default: Default::Value("false"),
        help: "Let everyone who reaches a listener use it, where no file of keys or tokens is set: beyond loopback, and on loopback by any host name.",
    },
    Key {
        path: "serving.tls.certificate_path",
        kind: Kind::Path,
        default: Default::Unset("plain HTTP"),
        help: "PEM file of the certificate chain of the OpenAI-compatible interface, the server's own certificate first. SIGHUP reads it again.",
    },
    Key {
        path: "serving.tls.private_key_path",
        kind: Kind::Path,
        default: Default::Unset("plain HTTP"),
        help: "PEM file of the certificate's private key. SIGHUP reads it again.",
    },
    Key {
        path: "serving.http.cors_allowed_origins",
        kind: Kind::Text,
        default: Default::Unset("none, no browser page may call the server"),
        help: "Origins whose pages may call the OpenAI-compatible interface, separated by commas, such as https://chat.example.com,http://localhost:3000.",
    },
    Key {
        path: "serving.http.max_connections",
        kind: Kind::Integer {
            min: 1,
            max: 1000000,
        },
        default: Default::Value("16384"),
        help: "Connections that are open at the same time; more wait in the system's queue.",
    },
    Key {
        path: "serving.http.header_timeout_ms",
        kind: Kind::Integer {
            min: 1,
            max: 3600000,
        },
        default: Default::Value("10000"),
        help: "Time in which the head of a request must have arrived, from its first byte on or, for the first of a connection, from the beginning; and in which a TLS handshake must be done.",
    },
    Key {
        path: "serving.http.body_timeout_ms",
        kind: Kind::Integer {
            min: 1,
            max: 3600000,
        },
        default: Default::Value("30000"),
        help: "Time in which the body of a request must have arrived.",
    },
    Key {
        path: "serving.http.write_timeout_ms",
        kind: Kind::Integer {
            min: 1,
            max: 3600000,
        },
        default: Default::Value("30000"),
        help: "A client that takes none of its answer for this long is cut off, and over TCP one that takes so little that its receive window stays closed.",
    },
    Key {
        path: "serving.speculative.enabled",
        kind: Kind::Flag,
        default: Default::Value("true"),
        help: "Draft several tokens ahead when the bundle has a draft. The output is the same either way. PUT /admin/speculation switches it while the server runs.",
    },
    Key {
        path: "serving.speculative.required",
        kind: Kind::Flag,
        default: Default::Value("false"),
        help: "Refuse to start when the draft can't be used, instead of serving without it and saying so in /readyz.",
    },
    Key {
        path: "serving.speculative.draft_block_size",
        kind: Kind::Integer { min: 2, max: 64 },
        default: Default::Unset("the draft's own"),
        help: "Tokens of one draft block, the anchor included. At most the draft's own.",
    },
    Key {
        path: "serving.speculative.adaptive_width",
        kind: Kind::Flag,
        default: Default::Value("true"),
        help: "Choose from measured costs and recent acceptance how much of a block is checked, down to none of it where drafting does not pay; false always checks whole blocks. The output is the same either way.",
    },
    Key {
        path: "serving.speculative.candidate_topk",
        kind: Kind::Integer { min: 1, max: 64 },
        default: Default::Unset("the draft's own"),
        help: "Candidates per position of a draft block. At most the draft's own.",
    },
    Key {
        path: "serving.speculative.acceptance_strategy",
        kind: Kind::OneOf(&["strict"]),
        default: Default::Value("strict"),
        help: "Rule for drafted tokens: strict accepts a token only when it is the target's own choice, and drafts only on machines where that choice is the same bits with and without a draft.",
    },
    Key {
        path: "serving.runtime.execution_provider",
        kind: Kind::OneOf(&["cpu", "cuda"]),
        default: Default::Value("cpu"),
        help: "Where the model runs. There is no fallback from one to the other.",
    },
    Key {
        path: "serving.runtime.onnxruntime_library",
        kind: Kind::Path,
        default: Default::Unset("required"),
        help: "The ONNX Runtime shared library.",
    },
    Key {
        path: "serving.runtime.max_concurrency",
        kind: Kind::Integer { min: 1, max: 1024 },
        default: Default::Value("8"),
        help: "Completions that run at the same time; each holds one slot of KV memory.",
    },
    Key {
        path: "serving.runtime.context_tokens",
        kind: Kind::Integer {
            min: 2,
            max: MAX_TOKENS,
        },
        default: Default::Unset("the model's own"),
        help: "Longest prompt and completion of one slot, together. Lower it to save KV memory.",
    },
    Key {
        path: "serving.runtime.kv_cache_ratio",
        kind: Kind::Share,
        default: Default::Value("0.5"),
        help: "Share of the memory free at start that the KV memory of target and draft may take. More than that is a start-up error.",
    },
    Key {
        path: "serving.runtime.prefill_chunk_tokens",
        kind: Kind::Integer {
            min: 2,
            max: 65_536,
        },
        default: Default::Value("64"),
        help: "Prompt tokens that one step feeds. Prompts take turns, and smaller steps keep other streams smoother.",
    },
    Key {
        path: "serving.runtime.intra_op_threads",
        kind: Kind::Integer { min: 1, max: 1024 },
        default: Default::Unset("one for each core"),
        help: "Threads one step computes with.",
    },
    Key {
        path: "serving.runtime.queue_capacity",
        kind: Kind::Integer {
            min: 1,
            max: 1_000_000,
        },
        default: Default::Value("64"),
        help: "Completions that may wait for a slot; one more is answered 429, or takes the place of the newest completion of the caller who holds most places, if it would hold no more than that one. As many bodies above 64 KiB may wait to be tokenised, by the same rule.",
    },
    Key {
        path: "serving.runtime.queue_timeout_ms",
        kind: Kind::Integer {
            min: 1,
            max: 86400000,
        },
        default: Default::Value("60000"),
        help: "Longest wait for a slot, and before it to be tokenised; a completion that still waits then is answered 503.",
    },
    Key {
        path: "serving.runtime.request_deadline_ms",
        kind: Kind::Integer {
            min: 1,
            max: 86400000,
        },
        default: Default::Value("600000"),
        help: "Longest time from the arrival of a request to the end of its answer, which is then ended with an error.",
    },
    Key {
        path: "serving.runtime.prefix_cache",
        kind: Kind::Flag,
        default: Default::Value("true"),
        help: "Start a completion from the longest beginning of its prompt that is still in the KV memory of target and draft. The output is the same either way. Beginnings that another caller sent count in whole blocks of 64 tokens. Used only where the lossless class is exact.",
    },
    Key {
        path: "serving.runtime.prefix_cache_slots",
        kind: Kind::Integer { min: 0, max: 1024 },
        default: Default::Value("2"),
        help: "Slots of KV memory, beside those that run, in which beginnings of prompts are kept. Slots that no completion runs in keep them as well.",
    },
    Key {
        path: "serving.runtime.max_completions_per_request",
        kind: Kind::Integer { min: 1, max: 1024 },
        default: Default::Value("8"),
        help: "Most completions of one request: prompts times n. At most queue_capacity.",
    },
    Key {
        path: "serving.runtime.request_body_limit_bytes",
        kind: Kind::Integer {
            min: 1024,
            max: 1 << 30,
        },
        default: Default::Value("4194304"),
        help: "Longest request body; a longer one is answered 413.",
    },
    Key {
        path: "serving.runtime.heartbeat_limit_ms",
        kind: Kind::Integer {
            min: 100,
            max: 3_600_000,
        },
        default: Default::Value("30000"),
        help: "/livez turns 503 when the engine has not come round its loop for this long. Keep it above the longest step.",
    },
    Key {
        path: "serving.runtime.stall_limit_ms",
        kind: Kind::Integer {
            min: 100,
            max: 86400000,
        },
        default: Default::Value("120000"),
        help: "The process exits with code 70 when the engine has not come round its loop for this long, so that a supervisor starts it again. Above heartbeat_limit_ms.",
    },
    Key {
        path: "serving.logging.level",
        kind: Kind::OneOf(&["error", "warn", "info", "debug", "trace"]),
        default: Default::Value("info"),
        help: "Least severe level that is logged.",
    },
    Key {
        path: "serving.logging.format",
        kind: Kind::OneOf(&["text", "json"]),
        default: Default::Value("text"),
        help: "One line of text or one JSON object per record.",
    },
    Key {
        path: "serving.logging.path",
        kind: Kind::Path,
        default: Default::Unset("standard error"),
        help: "File that log records are appended to.",
    },
    Key {
        path: "serving.audit.path",
        kind: Kind::Path,
        default: Default::Unset("no audit log"),
        help: "File that one JSON line for each request is appended to. SIGHUP opens it again.",
    },
    Key {
        path: "serving.audit.prompt_text",
        kind: Kind::Flag,
        default: Default::Value("false"),
        help: "Write prompts and completions into the audit log as text.",
    },
    Key {
        path: "serving.audit.max_file_bytes",
        kind: Kind::Integer {
            min: 65536,
            max: 1099511627776,
        },
        default: Default::Value("104857600"),
        help: "The audit log is rotated before it grows beyond this.",
    },
    Key {
        path: "serving.audit.max_files",
        kind: Kind::Integer { min: 1, max: 1000 },
        default: Default::Value("10"),
        help: "Files of the audit log that are kept, the present one included.",
    },
    Key {
        path: "serving.telemetry.otlp_endpoint",
        kind: Kind::Url,
        default: Default::Unset("nothing is exported"),
        help: "URL of an OpenTelemetry collector that spans are sent to, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.",
    },
];
