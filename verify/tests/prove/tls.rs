//! A service behind TLS is reached where its authority is trusted, and nowhere else; a key goes out from its file and nowhere else.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::verify;

/// A service that has one model and answers everything else in the same way, which no check takes for an answer.
fn serve(requests: Arc<Mutex<Vec<String>>>) -> (SocketAddr, String) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let tls = ServerConnection::new(config.clone()).unwrap();
            let mut stream = StreamOwned::new(tls, connection.unwrap());
            // A client that does not trust the certificate hangs up.
            let Ok(head) = read_request(&mut stream) else {
                continue;
            };
            requests.lock().unwrap().push(head);
            let body = "{\"data\": [{\"id\": \"sea-words\"}]}";
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }
    });
    (address, made.cert.pem())
}

/// The head of one request, read together with its body: a connection that is closed with bytes unread is reset, and the client may lose the answer.
fn read_request(stream: &mut impl Read) -> io::Result<String> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    let mut body_bytes = 0;
    loop {
        let start = head.len();
        if reader.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = head[start..].trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(length) = line.strip_prefix("content-length:") {
            body_bytes = length.trim().parse().expect("a number of bytes");
        }
    }
    io::copy(&mut reader.take(body_bytes), &mut io::sink())?;
    Ok(head)
}

#[test]
fn tls_is_believed_where_its_authority_is_trusted_and_keys_come_from_files() {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (address, pem) = serve(requests.clone());
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (ca, key) = (write("ca.pem", &pem), write("key", "sesame\n"));
    let endpoint = format!("https://localhost:{}", address.port());
    let run = |more: &[&str]| {
        let mut arguments = vec!["smoke", "--endpoint", &endpoint];
        arguments.extend(more);
        let output = verify(&arguments);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code(), text)
    };
    let (code, text) = run(&[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(requests.lock().unwrap().is_empty(), "{text}");
    let (code, text) = run(&["--ca-file", &ca, "--api-key-file", &key]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("pass  models-list"), "{text}");
    let requests = requests.lock().unwrap();
    let sent = |head: &String| {
        head.to_ascii_lowercase()
            .contains("authorization: bearer sesame")
    };
    assert!(requests.iter().all(sent), "{requests:?}");
}
