//! Registries: pushing a layout and pulling it back, by the OCI distribution specification 1.1.
//!
//! What a registry has isn't sent again, a transfer that breaks goes on where it stopped, the manifest comes last, and everything is read back or held to its
//! digest.
//! Plain HTTP is spoken with a registry on loopback and with one that the caller says so of, never because HTTPS failed.

mod client;
mod credentials;
mod pull;
mod push;
mod reference;
mod referrers;

pub use client::Client;
pub use credentials::{Credentials, DockerConfig};
pub use outrider_bundle::retry::Retry;
pub use pull::pull;
pub use push::{Outcome, PushOptions, Pushed, push};
pub use reference::Reference;
pub use referrers::{pull_referrers, push_referrers};

/// Why something can't be pushed or pulled.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The name of an image isn't one.
    #[error("{text:?} {problem}, expected host[:port]/repository[:tag][@sha256:…]")]
    Reference {
        /// The text.
        text: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// The registry can't be reached, or the connection broke.
    #[error("{what}: no answer from {url}")]
    Connection {
        /// What was asked for.
        what: String,
        /// The address.
        url: String,
        /// What the HTTP client said.
        source: Box<ureq::Error>,
    },
    /// The registry refused.
    #[error("{what}: {url} answers {status}: {body}")]
    Status {
        /// What was asked for.
        what: String,
        /// The address.
        url: String,
        /// HTTP status.
        status: u16,
        /// The beginning of the answer.
        body: String,
    },
    /// The registry answered something that makes no sense.
    #[error("{what}: the registry {problem}")]
    Answer {
        /// What was asked for.
        what: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// Credentials can't be read.
    #[error("credentials for {registry}: {problem}")]
    Credentials {
        /// The registry.
        registry: String,
        /// What is wrong.
        problem: String,
    },
}

impl RegistryError {
    /// Whether another attempt may go better.
    fn is_passing(&self) -> bool {
        match self {
            Self::Connection { .. } => true,
            Self::Status { status, .. } => matches!(status, 404 | 408 | 416 | 429 | 500..=599),
            _ => false,
        }
    }
}
