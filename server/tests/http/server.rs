//! A server on real sockets, on ports of its own, and the client that talks to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::{rt, web};
use outrider_server::audit::AuditLog;
use outrider_server::http::{self, Connections, Settings, State, admin, backend::Backend};
use outrider_server::lifecycle::{Drain, Latch, Startup};
use outrider_server::listen::{self, Endpoint, Listener};
use serde_json::Value;

use crate::fake::FakeBackend;

pub const BODY_LIMIT_BYTES: usize = 96 << 10;

/// Longest wait for what a connection has or takes, far above what it needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to either listener.
pub trait Connection: Read + Write {}

impl<T: Read + Write> Connection for T {}

pub struct TestServer {
    pub state: web::Data<State>,
    pub backend: Arc<FakeBackend>,
    pub startup: Arc<Startup>,
    pub drain: Arc<Drain>,
    address: SocketAddr,
    admin: Endpoint,
    handles: Vec<ServerHandle>,
}

impl TestServer {
    /// A server with this model, ready.
    pub fn start(backend: FakeBackend) -> Self {
        Self::with(backend, Self::settings())
    }

    /// A server with this model and these settings, ready.
    pub fn with(backend: FakeBackend, settings: Settings) -> Self {
        Self::connected(backend, settings, Connections::default())
    }

    /// A server with this model that holds its connections to this, ready.
    pub fn connected(backend: FakeBackend, settings: Settings, connections: Connections) -> Self {
        Self::starting_with(backend, settings, connections, None, local()).ready()
    }

    /// A server with this model that holds its connections to this and has its admin interface on this listener, ready.
    pub fn administered(settings: Settings, connections: Connections, admin: Listener) -> Self {
        Self::starting_with(FakeBackend::new(), settings, connections, None, admin).ready()
    }

    /// A server with this model and an audit log, ready.
    pub fn audited(backend: FakeBackend, audit: AuditLog) -> Self {
        let connections = Connections::default();
        let settings = Self::settings();
        Self::starting_with(backend, settings, connections, Some(audit), local()).ready()
    }

    fn ready(self) -> Self {
        for latch in Latch::ALL {
            self.startup.pass(latch);
        }
        self
    }

    /// A server whose model is in place but whose latches are open.
    pub fn starting(backend: FakeBackend) -> Self {
        let connections = Connections::default();
        Self::starting_with(backend, Self::settings(), connections, None, local())
    }

    /// The settings of servers that are started without.
    pub fn settings() -> Settings {
        Settings {
            body_limit_bytes: BODY_LIMIT_BYTES,
            max_completions_per_request: 4,
            heartbeat_limit: Duration::from_secs(1),
            ..Settings::default()
        }
    }

    fn starting_with(
        backend: FakeBackend,
        settings: Settings,
        connections: Connections,
        audit: Option<AuditLog>,
        admin_listener: Listener,
    ) -> Self {
        let backend = Arc::new(backend);
        let startup = Arc::new(Startup::default());
        let drain = Arc::new(Drain::default());
        let state = State::new(settings, startup.clone(), drain.clone()).with_audit(audit);
        let state = web::Data::new(state);
        state.provide(backend.clone() as Arc<dyn Backend>);
        let listener = listen::bind_tcp(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let admin = admin_listener.endpoint().unwrap();
        let (sender, handles) = std::sync::mpsc::channel();
        let served = state.clone();
        std::thread::spawn(move || {
            rt::System::new().block_on(async move {
                let server = http::serve(served.clone(), listener, &connections).unwrap();
                let (admin, _socket_file) =
                    admin::serve(served, admin_listener, connections.header_timeout).unwrap();
                sender.send(vec![server.handle(), admin.handle()]).unwrap();
                rt::spawn(admin);
                server.await.unwrap();
            });
        });
        Self {
            state,
            backend,
            startup,
            drain,
            address,
            admin,
            handles: handles.recv().unwrap(),
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn admin_address(&self) -> SocketAddr {
        match &self.admin {
            Endpoint::Tcp(address) => *address,
            Endpoint::Unix(path) => panic!("no address: {}", path.display()),
        }
    }

    /// A connection to the OpenAI-compatible interface.
    pub fn connect(&self) -> Box<dyn Connection> {
        connect(&Endpoint::Tcp(self.address))
    }

    /// A connection to the admin interface.
    pub fn connect_admin(&self) -> Box<dyn Connection> {
        connect(&self.admin)
    }

    /// Sends a request with these headers to either listener.
    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        let is_admin = !path.starts_with("/v1");
        let address = if is_admin {
            self.admin_address()
        } else {
            self.address
        };
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("http://{address}{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Reply::of(agent().run(request.body(body.to_owned()).unwrap()))
    }

    pub fn get(&self, path: &str) -> Reply {
        Reply::of(agent().get(format!("http://{}{path}", self.address)).call())
    }

    /// Sends a body to the admin listener.
    pub fn put_admin(&self, path: &str, content_type: &str, body: &str) -> Reply {
        Reply::of(
            agent()
                .put(format!("http://{}{path}", self.admin_address()))
                .header("content-type", content_type)
                .send(body),
        )
    }

    /// Asks either listener for the head of an answer.
    pub fn head(&self, path: &str) -> Reply {
        let is_admin = !path.starts_with("/v1");
        let address = if is_admin {
            self.admin_address()
        } else {
            self.address
        };
        Reply::of(agent().head(format!("http://{address}{path}")).call())
    }

    pub fn admin(&self, path: &str) -> Reply {
        Reply::of(
            agent()
                .get(format!("http://{}{path}", self.admin_address()))
                .call(),
        )
    }

    /// Sends a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(path, &[], body.to_string().as_bytes())
    }

    /// Sends a body that need not be JSON.
    pub fn send(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut request = agent()
            .post(format!("http://{}{path}", self.address))
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Reply::of(request.send(body))
    }

    /// Sends a JSON body and leaves the answer unread.
    pub fn open(&self, path: &str, body: &Value) -> Lines {
        let response = agent()
            .post(format!("http://{}{path}", self.address))
            .header("content-type", "application/json")
            .send(body.to_string())
            .unwrap();
        assert_eq!(response.status(), 200);
        Lines(BufReader::new(Box::new(response.into_body().into_reader())))
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        for handle in &self.handles {
            // Sends the request to stop; the server's own thread carries it out.
            drop(handle.stop(false));
        }
    }
}

fn local() -> Listener {
    listen::bind(&Endpoint::Tcp(([127, 0, 0, 1], 0).into())).unwrap()
}

fn connect(endpoint: &Endpoint) -> Box<dyn Connection> {
    match endpoint {
        Endpoint::Tcp(address) => {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        Endpoint::Unix(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into()
}

/// A stream that is read line by line; dropping it closes the connection.
pub struct Lines(BufReader<Box<dyn Read + Send>>);

impl Lines {
    /// The next line that is not empty, without its end.
    pub fn next(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the stream ended");
            if !line.trim().is_empty() {
                return line.trim_end().to_owned();
            }
        }
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    fn of(result: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Self {
        let mut response = result.unwrap();
        Self {
            status: response.status().as_u16(),
            headers: response
                .headers()
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
                .collect(),
            body: response.body_mut().read_to_string().unwrap(),
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The JSON body after a check of the status, without what differs from run to run.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        stable(self.json())
    }

    /// The events of a stream as text, without what differs from run to run.
    pub fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{}", self.body);
        let events = self
            .body
            .strip_suffix("\n\n")
            .expect("the last event ends with an empty line");
        events
            .split("\n\n")
            .map(|event| {
                let data = event
                    .strip_prefix("data: ")
                    .expect("every event is one data line");
                assert!(!data.contains('\n'));
                match serde_json::from_str::<Value>(data) {
                    Ok(json) => stable(json).to_string(),
                    Err(_) => data.to_owned(),
                }
            })
            .collect()
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

fn stable(mut json: Value) -> Value {
    if let Some(id) = json
        .get_mut("id")
        .filter(|id| id.as_str().is_some_and(|id| id.contains("cmpl-")))
    {
        let prefix = id.as_str().unwrap().split('-').next().unwrap().to_owned();
        *id = format!("{prefix}-[id]").into();
    }
    if let Some(created) = json
        .get_mut("created")
        .filter(|created| created.as_u64() != Some(0))
    {
        assert!(
            created
                .as_u64()
                .is_some_and(|created| created > 1_700_000_000)
        );
        *created = "[time]".into();
    }
    json
}
