//! What a server needs before it can start: the files that its configuration names, its audit log and its two sockets.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;

use crate::audit::{AuditError, AuditLog};
use crate::auth::KeyFileError;
use crate::config::{Config, Sources};
use crate::http::{Connections, Settings};
use crate::listen::{self, Endpoint, Listener};
use crate::logging::LogControl;
use crate::tls::{Certificate, Identity, TlsError};

/// A server that is ready to start.
pub struct Launch {
    /// The configuration.
    pub config: Config,
    /// Where it came from, so that it can be read again.
    pub sources: Sources,
    /// The log of this process, when it has one.
    pub log: Option<LogControl>,
    /// The audit log, when there is one.
    pub audit: Option<AuditLog>,
    /// What handlers need.
    pub settings: Settings,
    /// What connections are held to.
    pub connections: Connections,
    /// The socket of the OpenAI-compatible interface.
    pub listener: TcpListener,
    /// The socket of the admin interface.
    pub admin_listener: Listener,
}

/// Why a server can't be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A file that the configuration names can't be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The audit log can't be had.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// A socket can't be had.
    #[error("cannot listen on {endpoint} ({key}): {source}")]
    Bind {
        /// The key that names it.
        key: &'static str,
        /// Where it was to listen.
        endpoint: Endpoint,
        /// Why.
        source: io::Error,
    },
}

/// Why a file that the configuration names can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file of keys.
    #[error("{key}: {source}")]
    Keys {
        /// The key that names it.
        key: &'static str,
        /// Why.
        source: KeyFileError,
    },
    /// The certificate or its key.
    #[error("serving.tls: {0}")]
    Tls(#[from] TlsError),
}

/// What is read from the files that a configuration names.
pub struct Files {
    /// What handlers need, keys included.
    pub settings: Settings,
    /// Certificate and key.
    pub identity: Option<Identity>,
}

impl Files {
    /// Reads all of them.
    ///
    /// # Errors
    ///
    /// One of them can't be used.
    pub fn read(config: &Config) -> Result<Self, FileError> {
        Ok(Self {
            settings: Settings::of(config)?,
            identity: config.tls.as_ref().map(Identity::read).transpose()?,
        })
    }
}

/// Every fault of the files that a configuration names, where [`Files::read`] ends at the first.
pub fn file_faults(config: &Config) -> Vec<FileError> {
    let keys = Settings::of(config).err();
    let identity = config.tls.as_ref().map(Identity::read);
    keys.into_iter()
        .chain(identity.and_then(Result::err).map(FileError::from))
        .collect()
}

impl Launch {
    /// Reads the files, opens the audit log and binds the sockets.
    ///
    /// # Errors
    ///
    /// A file can't be used, or the audit log or a socket can't be had.
    pub fn new(
        config: Config,
        sources: Sources,
        log: Option<LogControl>,
    ) -> Result<Self, LaunchError> {
        let Files { settings, identity } = Files::read(&config)?;
        let audit = config.audit.as_ref().map(AuditLog::open).transpose()?;
        let certificate = identity.map(Certificate::new).map(Arc::new);
        let connections = Connections::of(&config, certificate);
        if let Err(error) = listen::prepare_for_connections(connections.max) {
            tracing::warn!(%error, "the limit of open files cannot be raised");
        }
        let failed = |key, endpoint: Endpoint| {
            move |source| LaunchError::Bind {
                key,
                endpoint,
                source,
            }
        };
        let listener = listen::bind_tcp(config.listen)
            .map_err(failed("serving.listen", Endpoint::Tcp(config.listen)))?;
        let admin_listener = listen::bind(&config.admin_listen)
            .map_err(failed("serving.admin_listen", config.admin_listen.clone()))?;
        for (key, endpoint) in [
            ("serving.listen", listener.local_addr().map(Endpoint::Tcp)),
            ("serving.admin_listen", admin_listener.endpoint()),
        ] {
            if let Ok(endpoint) = endpoint {
                tracing::info!(key, address = %endpoint, "listening");
            }
        }
        Ok(Self {
            config,
            sources,
            log,
            audit,
            settings,
            connections,
            listener,
            admin_listener,
        })
    }
}
