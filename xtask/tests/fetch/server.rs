//! A web server that misbehaves as it is told.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Request {
    /// Path and query.
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    /// A header by its lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map(|(_, value)| value.as_str())
    }

    /// First byte that is asked for.
    pub fn range_start(&self) -> Option<usize> {
        let range = self.header("range")?;
        Some(
            range
                .strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse()
                .unwrap(),
        )
    }
}

/// What the server answers.
pub struct Answer {
    head: String,
    body: Vec<u8>,
}

impl Answer {
    /// An answer with a body and no `Content-Length`: it ends when the connection does.
    pub fn unsized_body(status: u16, body: &[u8]) -> Self {
        Self {
            head: format!("HTTP/1.1 {status} Status\r\nConnection: close\r\n"),
            body: body.to_vec(),
        }
    }

    /// An honest answer.
    pub fn new(status: u16, body: &[u8]) -> Self {
        Self::unsized_body(status, body).header("Content-Length", &body.len().to_string())
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.head += &format!("{name}: {value}\r\n");
        self
    }

    /// Drops the connection after this many bytes of the body.
    pub fn dropped_after(mut self, bytes: usize) -> Self {
        self.body.truncate(bytes);
        self
    }

    /// The rest of a file from a byte on, as a server that knows ranges sends it.
    pub fn range(file: &[u8], start: usize) -> Self {
        let range = format!("bytes {start}-{}/{}", file.len() - 1, file.len());
        Self::new(206, &file[start..]).header("Content-Range", &range)
    }
}

/// A running server.
pub struct Server {
    /// Its URL, without a slash at the end.
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server. `answer` gets the requests and their number, from 0 on.
    pub fn start(answer: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(request) = read_request(&stream) else {
                    continue;
                };
                let index = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(request.clone());
                    seen.len() - 1
                };
                let Answer { head, body } = answer(&request, index);
                // The client may have hung up, which is its good right.
                let _ = stream
                    .write_all(format!("{head}\r\n").as_bytes())
                    .and_then(|()| stream.write_all(&body));
            }
        });
        Self { url, requests }
    }

    /// What was asked so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let mut headers = Vec::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    Some(Request { path, headers })
}
