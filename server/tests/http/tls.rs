//! TLS, with certificates made for the test.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use outrider_server::config::Tls;
use outrider_server::http::Connections;
use outrider_server::tls::{Certificate, Identity};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::fake::FakeBackend;
use crate::server::TestServer;

/// A certificate for `localhost` and what a server shows it with.
fn certificate() -> (CertificateDer<'static>, Identity) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let files = Tls {
        certificate_path: dir.path().join("certificate.pem"),
        private_key_path: dir.path().join("key.pem"),
    };
    std::fs::write(&files.certificate_path, made.cert.pem()).unwrap();
    std::fs::write(&files.private_key_path, made.signing_key.serialize_pem()).unwrap();
    (made.cert.der().clone(), Identity::read(&files).unwrap())
}

fn server(identity: Identity, header_timeout: Duration) -> (TestServer, Arc<Certificate>) {
    let certificate = Arc::new(Certificate::new(identity));
    let connections = Connections {
        header_timeout,
        certificate: Some(certificate.clone()),
        ..Connections::default()
    };
    let server = TestServer::connected(FakeBackend::new(), TestServer::settings(), connections);
    (server, certificate)
}

/// What a client that trusts this one certificate gets.
fn get(server: &TestServer, trusted: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(server.address())?);
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn answers_come_over_tls_and_a_renewed_certificate_is_shown_at_once() {
    let (first, first_identity) = certificate();
    let (second, second_identity) = certificate();
    let (server, shown) = server(first_identity, Duration::from_secs(60));
    assert!(get(&server, &first).unwrap().starts_with("HTTP/1.1 200 "));
    assert!(get(&server, &second).is_err(), "it is not shown yet");
    shown.replace(second_identity);
    assert!(get(&server, &second).unwrap().starts_with("HTTP/1.1 200 "));
    assert!(get(&server, &first).is_err());
}

#[test]
fn a_handshake_that_does_not_come_to_an_end_is_given_up() {
    let (_, identity) = certificate();
    let (server, _) = server(identity, Duration::from_millis(1));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let mut rest = Vec::new();
    // It is closed, in whichever way.
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

#[test]
fn plain_http_gets_no_answer_where_tls_is_spoken() {
    let (_, identity) = certificate();
    let (server, _) = server(identity, Duration::from_secs(60));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"));
}
