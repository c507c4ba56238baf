//! The certificate that the OpenAI-compatible interface proves itself with, which can be renewed while the server runs.
//!
//! TLS 1.2 and 1.3, without client certificates. Whether a certificate has expired is for clients to judge; that chain and key are readable and
//! belong together is checked here.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::{config, small_file};

/// Why certificate and key can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not PEM, or holds something else.
    #[error("{} must hold {expected} as PEM: {reason}", path.display())]
    NotPem {
        /// The file.
        path: PathBuf,
        /// What it is for.
        expected: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The key is of another certificate, or of a kind that is not supported.
    #[error("the private key in {} does not go with the certificate in {}: {reason}", key.display(), certificate.display())]
    Mismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Everyone on this machine could replace the key.
    #[error("the private key in {} can be changed by every user of this machine: its mode is {mode:03o}, which must not let others write", path.display())]
    Writable {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The library can't be set up.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] rustls::Error),
}

/// A chain and its key, checked.
#[derive(Clone, Debug)]
pub struct Identity(Arc<CertifiedKey>);

impl Identity {
    /// Reads the files that the configuration names.
    ///
    /// # Errors
    ///
    /// A file can't be read, is not PEM, or the two don't belong together.
    pub fn read(files: &config::Tls) -> Result<Self, TlsError> {
        let (certificate, key) = (&files.certificate_path, &files.private_key_path);
        let not_pem = |path: &Path, expected, reason: String| TlsError::NotPem {
            path: path.to_owned(),
            expected,
            reason,
        };
        let chain_expected = "a certificate chain";
        let chain = CertificateDer::pem_slice_iter(&read(certificate)?)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| not_pem(certificate, chain_expected, error.to_string()))?;
        if chain.is_empty() {
            let reason = "there is none in it".to_owned();
            return Err(not_pem(certificate, chain_expected, reason));
        }
        check_mode(key)?;
        let private = PrivateKeyDer::from_pem_slice(&read(key)?)
            .map_err(|error| not_pem(key, "a private key", error.to_string()))?;
        CertifiedKey::from_der(chain, private, &ring::default_provider())
            .map(|pair| Self(Arc::new(pair)))
            .map_err(|error| TlsError::Mismatch {
                certificate: certificate.clone(),
                key: key.clone(),
                reason: error.to_string(),
            })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    small_file::read(path).map_err(unreadable(path))
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> TlsError {
    move |source| TlsError::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Refuses a private key that every user of the machine can change, and warns of one that every user can read.
fn check_mode(path: &Path) -> Result<(), TlsError> {
    let mode = small_file::mode(path).map_err(unreadable(path))?;
    if mode & small_file::OTHERS_WRITE != 0 {
        return Err(TlsError::Writable {
            path: path.to_owned(),
            mode,
        });
    }
    if mode & small_file::OTHERS_READ != 0 {
        tracing::warn!(
            path = %path.display(),
            mode = format_args!("{mode:03o}"),
            "every user of this machine can read the private key"
        );
    }
    Ok(())
}

/// What new connections are shown; it can be replaced at any time.
#[derive(Debug)]
pub struct Certificate(ArcSwap<CertifiedKey>);

impl Certificate {
    /// Shows `identity` until it is replaced.
    pub fn new(identity: Identity) -> Self {
        Self(ArcSwap::new(identity.0))
    }

    /// Shows `identity` from the next handshake on; open connections stay.
    pub fn replace(&self, identity: Identity) {
        self.0.store(identity.0);
    }

    /// The settings of a server that shows this certificate.
    ///
    /// # Errors
    ///
    /// The library can't be set up.
    pub fn server_config(self: Arc<Self>) -> Result<rustls::ServerConfig, TlsError> {
        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        Ok(rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn self_signed() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn files_that_are_no_certificate_and_its_key_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = self_signed();
        let (_, other_key) = self_signed();
        let truncated = &certificate[..certificate.len() / 2];
        let cases = [
            (None, Some(key.as_str())),
            (Some(certificate.as_str()), None),
            (Some("not PEM"), Some(&key)),
            (Some(truncated), Some(&key)),
            (Some(&key), Some(&key)),
            (Some(&certificate), Some("not PEM")),
            (Some(&certificate), Some(&certificate)),
            (Some(&certificate), Some(&other_key)),
        ];
        let files = config::Tls {
            certificate_path: dir.path().join("certificate.pem"),
            private_key_path: dir.path().join("key.pem"),
        };
        let mut table = String::new();
        for (certificate, key) in cases {
            for (path, text) in [
                (&files.certificate_path, certificate),
                (&files.private_key_path, key),
            ] {
                match text {
                    Some(text) => std::fs::write(path, text).unwrap(),
                    // It is not there before the first case.
                    None => drop(std::fs::remove_file(path)),
                }
            }
            let error = Identity::read(&files).unwrap_err().to_string();
            assert!(!error.contains("PRIVATE"), "{error}");
            let directory = format!("{}/", dir.path().display());
            table.push_str(&format!("{}\n", error.replace(&directory, "")));
        }
        insta::assert_snapshot!(table);
        std::fs::write(&files.private_key_path, key).unwrap();
        assert!(Identity::read(&files).is_ok());
        let mode = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&files.private_key_path, mode(0o602)).unwrap();
        let error = Identity::read(&files).unwrap_err().to_string();
        assert!(error.contains("its mode is 602"), "{error}");
        std::fs::set_permissions(&files.private_key_path, mode(0o604)).unwrap();
        assert!(Identity::read(&files).is_ok());
    }
}
