//! The server as its supervisor sees it: what systemd is told, what a reload does, how the process ends when its engine has stalled.
//!
//! A process that ends itself can't be watched from within, so each test runs this program once more, as a server with a fake model that takes
//! orders on its standard input.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_server::auth;
use outrider_server::config::{Config, Sources};
use outrider_server::http::backend::Backend;
use outrider_server::launch::Launch;
use outrider_server::lifecycle::Latch;
use outrider_server::listen::Listener;
use outrider_server::service::LoadContext;
use outrider_server::{logging, service};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

#[path = "http/fake.rs"]
#[expect(
    dead_code,
    reason = "the fake model has more to offer than these tests need"
)]
mod fake;

use fake::{held, token};

/// The variable that makes a run of this program a server; it holds the path of the configuration.
const CONFIGURATION: &str = "OUTRIDER_TEST_SERVER";

/// Longest wait for a word of the server, far above what it needs.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    if let Some(path) = std::env::var_os(CONFIGURATION) {
        serve(path.into());
        return ExitCode::SUCCESS;
    }
    macro_rules! trials {
        ($($name:ident),+ $(,)?) => {
            vec![$(Trial::test(stringify!($name), || {
                $name();
                Ok(())
            })),+]
        };
    }
    let trials = trials![
        systemd_is_told_of_every_state,
        the_watchdog_is_answered_only_while_the_heartbeat_is_fresh,
        a_stalled_engine_ends_the_process_and_its_streams_are_told,
        a_log_that_hangs_does_not_keep_a_stalled_process_alive,
        a_reload_renews_keys_and_says_so,
        a_reload_with_a_fault_or_a_fixed_key_changes_nothing,
        a_reload_that_would_let_everyone_in_is_refused,
        a_reload_that_finds_a_pipe_is_refused,
        a_reload_that_hangs_is_told_and_keeps_nobody_from_stopping_the_server,
        requests_without_a_key_are_told_in_bulk,
        a_reload_reaches_the_engine,
        a_reload_shows_a_renewed_certificate_and_keeps_the_old_one_when_it_is_damaged,
        a_reload_moves_the_switch_of_drafting_only_when_its_value_changed,
        who_switches_drafting_is_in_the_log,
        a_reload_during_the_start_waits_for_the_model,
        ten_thousand_idle_connections_hold_up_nobody,
        the_admin_socket_serves_and_goes_with_the_server,
        the_unit_file_is_one_that_systemd_takes,
        the_watchdog_of_the_unit_file_leaves_a_stall_to_the_server,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The server: prints its addresses, then answers each order with a line, `done` where there is nothing to tell.
fn serve(path: PathBuf) {
    let sources = Sources {
        file: Some(path),
        ..Sources::default()
    };
    let config = Config::load(&sources).unwrap();
    let log = logging::start(&config.logging, None).unwrap();
    let launch = Launch::new(config, sources, Some(log)).unwrap();
    let admin = match &launch.admin_listener {
        Listener::Tcp(listener) => listener.local_addr().unwrap().to_string(),
        Listener::Unix(..) => "socket".to_owned(),
    };
    let mut stdout = std::io::stdout();
    let address = launch.listener.local_addr().unwrap();
    writeln!(stdout, "{address} {admin}").unwrap();

    let (backend, senders) = held();
    let mut backend = backend.with_draft();
    backend.set_status(|status| status.heartbeat_age = Duration::ZERO);
    let (end, ended) = mpsc::channel();
    backend.on_stop = Box::new(move || end.send(()).unwrap());
    let backend = Arc::new(backend);
    let (go, may_go) = mpsc::channel();
    let load = {
        let backend = backend.clone();
        move |context: LoadContext| {
            may_go.recv().unwrap();
            (context.provide)(backend as Arc<dyn Backend>);
            for latch in Latch::ALL {
                context.startup.pass(latch);
            }
            ended.recv().unwrap();
            Ok(())
        }
    };
    std::thread::spawn(move || {
        // Each answer has one token and never ends by itself.
        let mut running = Vec::new();
        for events in senders {
            events.send(token("first")).unwrap();
            running.push(events);
        }
    });
    std::thread::spawn(move || {
        let age = |age| backend.set_status(|status| status.heartbeat_age = age);
        for order in std::io::stdin().lines() {
            match order.unwrap().as_str() {
                "ready" => go.send(()).unwrap(),
                "fresh" => age(Duration::ZERO),
                "stale" => age(Duration::from_secs(60)),
                "stall" => age(Duration::from_secs(3600)),
                "limits" => {
                    let limits = backend.engine_limits.lock().unwrap().take();
                    let told = limits.map_or("none".to_owned(), |limits| {
                        format!(
                            "{} {} {} {}",
                            limits.queue_capacity,
                            limits.queue_timeout.as_millis(),
                            limits.request_deadline.as_millis(),
                            limits.prefill_chunk_tokens
                        )
                    });
                    writeln!(stdout, "{told}").unwrap();
                    continue;
                }
                "hang" => {
                    let (locked, is_locked) = mpsc::channel();
                    std::thread::spawn(move || {
                        let _lock = std::io::stderr().lock();
                        locked.send(()).unwrap();
                        loop {
                            std::thread::park();
                        }
                    });
                    is_locked.recv().unwrap();
                }
                other => unreachable!("the order {other}"),
            }
            writeln!(stdout, "done").unwrap();
        }
    });
    actix_web::rt::System::new()
        .block_on(service::run(launch, load))
        .unwrap();
}

/// A server that runs as a process of its own.
struct Served {
    process: std::process::Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    address: SocketAddr,
    admin: String,
    notices: UnixDatagram,
    dir: tempfile::TempDir,
}

impl Served {
    /// A server with these keys beside the least that is needed.
    fn start(keys: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let notices = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        notices.set_read_timeout(Some(PATIENCE)).unwrap();
        write_config(dir.path(), keys);
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env(CONFIGURATION, dir.path().join("server.yaml"))
            .env("NOTIFY_SOCKET", dir.path().join("notify"))
            .env("WATCHDOG_USEC", "20000")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        let (address, admin) = line.trim().split_once(' ').unwrap();
        Self {
            address: address.parse().unwrap(),
            admin: admin.to_owned(),
            process,
            orders,
            answers,
            notices,
            dir,
        }
    }

    /// The same, once it is ready.
    fn ready(keys: &str) -> Self {
        let mut served = Self::start(keys);
        served.order("ready");
        served.await_notice("READY=1");
        served
    }

    /// Carries out an order; what it answers.
    fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal).unwrap();
    }

    fn notice(&self) -> std::io::Result<String> {
        let mut buffer = [0; 4096];
        let length = self.notices.recv(&mut buffer)?;
        Ok(String::from_utf8(buffer[..length].to_vec()).unwrap())
    }

    /// Everything that systemd is told up to a message with this line.
    fn await_notice(&self, line: &str) -> String {
        let mut told = String::new();
        loop {
            let notice = self.notice().unwrap_or_else(|error| {
                panic!("{line} was not told ({error}), but this was: {told}")
            });
            told.push_str(&notice);
            if notice.lines().any(|told| told == line) {
                return told;
            }
        }
    }

    /// Reads the configuration again, with these keys.
    fn reload(&self, keys: &str) {
        write_config(self.dir.path(), keys);
        self.signal(Signal::SIGHUP);
        self.await_notice("READY=1");
    }

    /// Ends the server; its exit code and its log.
    fn stop(self) -> (Option<i32>, String) {
        self.signal(Signal::SIGTERM);
        // Who tells waits for room, which nobody has made since the last message was awaited.
        self.await_notice("STOPPING=1");
        self.end()
    }

    /// Waits for its end; its exit code and its log.
    fn end(mut self) -> (Option<i32>, String) {
        let mut log = String::new();
        let mut stderr = self.process.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        (self.process.wait().unwrap().code(), log)
    }

    fn get(&self, path: &str, headers: &str) -> String {
        let address = if path.starts_with("/v1") {
            self.address.to_string()
        } else {
            self.admin.clone()
        };
        ask(TcpStream::connect(address).unwrap(), path, headers)
    }

    /// Switches drafting by the admin interface; what is answered.
    fn switch(&self, enabled: bool, headers: &str) -> String {
        let body = format!("{{\"enabled\": {enabled}}}");
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        write!(
            stream,
            "PUT /admin/speculation HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{headers}\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn last_reload(&self) -> String {
        let body = self.get("/readyz", "");
        let body: serde_json::Value =
            serde_json::from_str(body.split_once("\r\n\r\n").unwrap().1).unwrap();
        body["last_reload"].as_str().unwrap_or("none").to_owned()
    }
}

fn write_config(dir: &Path, keys: &str) {
    let text = format!(
        "serving:\n  bundle: model\n  listen: 127.0.0.1:0\n  runtime: {{onnxruntime_library: ort.so}}\n{}",
        keys.replace("$DIR", &dir.display().to_string())
    );
    let has_admin = keys.contains("admin_listen");
    let admin = "  admin_listen: 127.0.0.1:0\n";
    let text = if has_admin { text } else { text + admin };
    // `runtime` may be among the keys too; a key twice would be a fault.
    let text = if keys.contains("  runtime:") {
        text.replace("  runtime: {onnxruntime_library: ort.so}\n", "")
    } else {
        text
    };
    std::fs::write(dir.join("server.yaml"), text).unwrap();
}

fn ask(mut stream: impl Read + Write, path: &str, headers: &str) -> String {
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn open_stream(address: SocketAddr) -> BufReader<TcpStream> {
    let body = r#"{"model": "fake", "prompt": "hi", "stream": true}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.contains("first") {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the stream ended");
    }
    reader
}

fn systemd_is_told_of_every_state() {
    let mut served = Served::start("");
    served.await_notice("STATUS=loading the model");
    served.order("ready");
    let told = served.await_notice("READY=1");
    assert!(told.contains("STATUS=serving fake"), "{told}");
    served.await_notice("WATCHDOG=1");
    served.signal(Signal::SIGHUP);
    let told = served.await_notice("READY=1");
    let reloading = told.find("RELOADING=1\nMONOTONIC_USEC=").unwrap();
    assert!(reloading < told.find("READY=1").unwrap(), "{told}");
    served.signal(Signal::SIGTERM);
    served.await_notice("STOPPING=1");
    assert_eq!(served.end().0, Some(0));
}

fn the_watchdog_is_answered_only_while_the_heartbeat_is_fresh() {
    let mut served = Served::ready("");
    served.await_notice("WATCHDOG=1");
    served.order("stale");
    served.notices.set_nonblocking(true).unwrap();
    while served.notice().is_ok() {}
    served.notices.set_nonblocking(false).unwrap();
    served
        .notices
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    // One may have been on its way; without the rule there would be a handful.
    let answers = std::iter::from_fn(|| served.notice().ok()).take(3).count();
    assert!(answers <= 1, "{answers}");
    served.notices.set_read_timeout(Some(PATIENCE)).unwrap();
    served.order("fresh");
    served.await_notice("WATCHDOG=1");
    assert_eq!(served.stop().0, Some(0));
}

fn a_stalled_engine_ends_the_process_and_its_streams_are_told() {
    let mut served = Served::ready("");
    let mut stream = open_stream(served.address);
    served.order("stall");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"code\":\"engine_stopped\""), "{rest}");
    let (code, log) = served.end();
    assert_eq!(code, Some(70), "{log}");
    assert!(log.contains("the engine has stalled"), "{log}");
}

fn a_log_that_hangs_does_not_keep_a_stalled_process_alive() {
    let mut served = Served::ready("");
    served.order("hang");
    // Its answer is not waited for: the process may be gone before it is written.
    writeln!(served.orders, "stall").unwrap();
    assert_eq!(served.end().0, Some(70));
}

fn a_reload_renews_keys_and_says_so() {
    let keys = "  auth: {api_keys_path: $DIR/keys}\n  logging: {level: warn}\n";
    let (old, new) = (auth::generate().unwrap(), auth::generate().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let keys = keys.replace("$DIR", &dir.path().display().to_string());
    let list = |secrets: &[&str]| {
        let lines: Vec<String> = secrets
            .iter()
            .map(|secret| auth::line_of("alice", secret).unwrap())
            .collect();
        std::fs::write(dir.path().join("keys"), lines.join("\n")).unwrap();
    };
    list(&[&old]);
    let served = Served::ready(&keys);
    let status = |secret: &str| {
        let answer = served.get("/v1/models", &format!("authorization: Bearer {secret}\r\n"));
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(
        (status(&old).as_str(), status(&new).as_str()),
        ("200", "401")
    );
    assert_eq!(served.last_reload(), "none");
    list(&[&old, &new]);
    served.reload(&keys);
    assert_eq!(
        (status(&old).as_str(), status(&new).as_str()),
        ("200", "200")
    );
    list(&[&new]);
    served.reload(&keys.replace("warn", "trace"));
    assert_eq!(
        (status(&old).as_str(), status(&new).as_str()),
        ("401", "200")
    );
    assert_eq!(served.last_reload(), "applied");
    let metrics = served.get("/metrics", "");
    assert!(
        metrics.contains("outrider_config_reloads_total{result=\"applied\"} 2"),
        "{metrics}"
    );
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    // The level went up with the second reload, so that this is in the log, and no secret is even now.
    assert!(log.contains("configuration read again"), "{log}");
    assert!(log.contains("api_keys=1"), "{log}");
    assert!(log.contains("TRACE"), "{log}");
    assert!(!log.contains(&old) && !log.contains(&new), "{log}");
}

fn a_reload_with_a_fault_or_a_fixed_key_changes_nothing() {
    let served = Served::ready("");
    served.reload(
        "  runtime: {onnxruntime_library: ort.so, max_concurrency: 3}\n  logging: {level: error}\n",
    );
    assert_eq!(served.last_reload(), "refused");
    served.reload(
        "  logging: {level: loud}\n  runtime: {onnxruntime_library: ort.so, max_concurrency: 0}\n",
    );
    served.reload("  auth: {api_keys_path: /nowhere/keys}\n");
    assert_eq!(served.last_reload(), "refused");
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 200 "));
    let metrics = served.get("/metrics", "");
    assert!(
        metrics.contains("outrider_config_reloads_total{result=\"refused\"} 3"),
        "{metrics}"
    );
    let (_, log) = served.stop();
    for part in [
        "serving.runtime.max_concurrency cannot change while the server runs",
        "2 faults in the configuration: serving.runtime.max_concurrency: is 0",
        "; serving.logging.level: is \"loud\"",
        "/nowhere/keys",
        // Had the level of a refused reload been taken, this would not be there.
        "stopped",
    ] {
        assert!(log.contains(part), "{part} is missing in {log}");
    }
}

fn a_reload_that_would_let_everyone_in_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    let line = auth::line_of("alice", &auth::generate().unwrap()).unwrap();
    std::fs::write(&file, line).unwrap();
    let served = Served::ready(&format!("  auth: {{api_keys_path: {}}}\n", file.display()));
    served.reload("");
    assert_eq!(served.last_reload(), "refused");
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 401 "));
    served.reload("  auth: {allow_unauthenticated: true}\n");
    assert_eq!(served.last_reload(), "applied");
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 200 "));
    let (_, log) = served.stop();
    let part = "serving.auth.api_keys_path is no longer set";
    assert!(log.contains(part), "{part} is missing in {log}");
}

fn a_reload_that_finds_a_pipe_is_refused() {
    let served = Served::ready("");
    let pipe = served.dir.path().join("keys");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    served.reload("  auth: {api_keys_path: $DIR/keys}\n");
    assert_eq!(served.last_reload(), "refused");
    let (code, log) = served.stop();
    assert_eq!(code, Some(0));
    for part in [
        "serving.auth.api_keys_path",
        "is a pipe, but must be a regular file",
    ] {
        assert!(log.contains(part), "{part} is missing in {log}");
    }
}

fn a_reload_that_hangs_is_told_and_keeps_nobody_from_stopping_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let [log, moved] = ["log", "log.1"].map(|name| dir.path().join(name));
    let served = Served::ready(&format!("  logging: {{path: {}}}\n", log.display()));
    std::fs::rename(&log, &moved).unwrap();
    let made = Command::new("mkfifo").arg(&log).status().unwrap();
    assert!(made.success());
    // To open a pipe waits for a reader, and there is none.
    served.signal(Signal::SIGHUP);
    let logged = || std::fs::read_to_string(&moved).unwrap();
    while !logged().contains("the configuration is still being read again") {
        std::thread::yield_now();
    }
    // It has the server wait for its end.
    let stream = open_stream(served.address);
    served.signal(Signal::SIGTERM);
    served.await_notice("STOPPING=1");
    let reader = std::fs::File::open(&log).unwrap();
    while served.last_reload() == "none" {
        std::thread::yield_now();
    }
    served.signal(Signal::SIGTERM);
    let Served {
        mut process,
        notices,
        ..
    } = served;
    assert_eq!(process.wait().unwrap().code(), Some(0));
    notices.set_nonblocking(true).unwrap();
    let mut late = [0; 4096];
    while let Ok(length) = notices.recv(&mut late) {
        let late = String::from_utf8_lossy(&late[..length]);
        assert!(!late.contains("READY=1"), "{late}");
    }
    drop((stream, reader));
}

fn requests_without_a_key_are_told_in_bulk() {
    let dir = tempfile::tempdir().unwrap();
    let [keys, audit] = ["keys", "audit.jsonl"].map(|name| dir.path().join(name));
    let secret = auth::generate().unwrap();
    let line = auth::line_of("alice", &secret).unwrap();
    std::fs::write(&keys, line).unwrap();
    let served = Served::ready(&format!(
        "  auth: {{api_keys_path: {keys}, admin_tokens_path: {keys}}}\n  audit: {{path: {audit}}}\n",
        keys = keys.display(),
        audit = audit.display()
    ));
    const REFUSED: u64 = 50;
    let post = |authorization: &str| {
        let mut stream = TcpStream::connect(served.address).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 2\r\n{authorization}\r\n{{}}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for _ in 0..REFUSED {
        assert!(post("").starts_with("HTTP/1.1 401 "));
        assert!(served.get("/metrics", "").starts_with("HTTP/1.1 401 "));
    }
    let known = post(&format!("authorization: Bearer {secret}\r\n"));
    assert!(known.starts_with("HTTP/1.1 400 "), "{known}");
    let (code, log) = served.stop();
    assert_eq!(code, Some(0));
    let lines: Vec<serde_json::Value> = std::fs::read_to_string(audit)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |status: u64| lines.iter().filter(move |line| line["status"] == status);
    assert_eq!(of(400).count(), 1);
    // Few enough that a slow machine may take several intervals for them.
    assert!(of(401).count() < REFUSED as usize / 2, "{lines:?}");
    let told: u64 = of(401)
        .map(|line| line["refused_requests"].as_u64().unwrap())
        .sum();
    assert_eq!(told, REFUSED);
    for route in ["/v1/completions", "/metrics"] {
        let records = log
            .lines()
            .filter(|line| line.contains("401") || line.contains("without a valid key"))
            .filter(|line| line.contains(route))
            .count();
        assert!((1..REFUSED as usize / 2).contains(&records), "{log}");
    }
}

fn a_reload_reaches_the_engine() {
    let mut served = Served::ready("");
    assert_eq!(served.order("limits"), "none");
    served.reload("  runtime: {onnxruntime_library: ort.so, queue_capacity: 9, queue_timeout_ms: 8, request_deadline_ms: 7, prefill_chunk_tokens: 6}\n");
    assert_eq!(served.order("limits"), "9 8 7 6");
    assert_eq!(served.stop().0, Some(0));
}

fn a_reload_shows_a_renewed_certificate_and_keeps_the_old_one_when_it_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let renew = || {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(dir.path().join("certificate.pem"), made.cert.pem()).unwrap();
        std::fs::write(dir.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    };
    let keys = "  tls: {certificate_path: $TLS/certificate.pem, private_key_path: $TLS/key.pem}\n"
        .replace("$TLS", &dir.path().display().to_string());
    let first = renew();
    let served = Served::ready(&keys);
    let is_shown = |trusted: &CertificateDer<'static>| {
        let mut roots = RootCertStore::empty();
        roots.add(trusted.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut stream = TcpStream::connect(served.address).unwrap();
        while connection.is_handshaking() {
            if connection.complete_io(&mut stream).is_err() {
                return false;
            }
        }
        true
    };
    assert!(is_shown(&first));
    let second = renew();
    assert!(is_shown(&first), "nothing has asked for a reload yet");
    served.reload(&keys);
    assert!(is_shown(&second) && !is_shown(&first));
    std::fs::write(dir.path().join("key.pem"), "damaged").unwrap();
    served.reload(&keys);
    assert_eq!(served.last_reload(), "refused");
    assert!(is_shown(&second));
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("key.pem"), "{log}");
}

fn a_reload_moves_the_switch_of_drafting_only_when_its_value_changed() {
    let served = Served::ready("");
    let is_enabled = || {
        let answer = served.get("/admin/speculation", "");
        answer.contains("\"enabled\":true")
    };
    assert!(is_enabled());
    let answer = served.switch(false, "");
    assert!(!is_enabled(), "{answer}");
    // What an operator did holds until the configuration says something else than before.
    served.reload("  speculative: {enabled: true}\n");
    assert!(!is_enabled());
    served.reload("  speculative: {enabled: false}\n");
    served.reload("  speculative: {enabled: true}\n");
    assert!(is_enabled());
    assert_eq!(served.stop().0, Some(0));
}

fn who_switches_drafting_is_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    let operators = ["anna", "ben"].map(|name| (name, auth::generate().unwrap()));
    let lines = operators
        .each_ref()
        .map(|(name, secret)| auth::line_of(name, secret).unwrap());
    std::fs::write(&path, lines.join("\n")).unwrap();
    let served = Served::ready(&format!(
        "  auth: {{admin_tokens_path: {}}}\n",
        path.display()
    ));
    for ((_, secret), enabled) in operators.iter().zip([false, true]) {
        let answer = served.switch(enabled, &format!("authorization: Bearer {secret}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let refused = served.switch(false, "authorization: Bearer anna\r\n");
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    let (code, log) = served.stop();
    assert_eq!(code, Some(0));
    let told: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("drafting switched"))
        .collect();
    assert_eq!(told.len(), 2, "{log}");
    for (line, ((name, _), enabled)) in told.iter().zip(operators.iter().zip([false, true])) {
        assert!(line.contains(&format!("operator=\"{name}\"")), "{line}");
        assert!(line.contains(&format!("enabled={enabled}")), "{line}");
    }
}

fn a_reload_during_the_start_waits_for_the_model() {
    let mut served = Served::start("");
    served.await_notice("STATUS=loading the model");
    served.signal(Signal::SIGHUP);
    served.order("ready");
    served.await_notice("READY=1");
    served.await_notice("READY=1");
    assert_eq!(served.last_reload(), "applied");
    assert_eq!(served.stop().0, Some(0));
}

fn ten_thousand_idle_connections_hold_up_nobody() {
    let served = Served::ready("  http: {header_timeout_ms: 3600000}\n");
    let (_, limit) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit).unwrap();
    // As many as this process may have, where that is less; the server is a process of its own.
    let count = usize::try_from(limit - 500).unwrap().min(10_000);
    let idle: Vec<TcpStream> = (0..count)
        .map(|_| TcpStream::connect(served.address).unwrap())
        .collect();
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 200 "));
    let stream = open_stream(served.address);
    assert!(served.get("/readyz", "").starts_with("HTTP/1.1 200 "));
    drop(stream);
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("ERROR"), "{log}");
    drop(idle);
}

fn the_admin_socket_serves_and_goes_with_the_server() {
    let served = Served::ready("  admin_listen: unix:$DIR/admin.sock\n");
    let path = served.dir.path().join("admin.sock");
    let answer = ask(
        std::os::unix::net::UnixStream::connect(&path).unwrap(),
        "/readyz",
        "",
    );
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    served.signal(Signal::SIGTERM);
    served.await_notice("STOPPING=1");
    let Served {
        mut process, dir, ..
    } = served;
    assert_eq!(process.wait().unwrap().code(), Some(0));
    assert!(!path.exists());
    drop(dir);
}

fn the_watchdog_of_the_unit_file_leaves_a_stall_to_the_server() {
    let unit = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../configs/systemd/outrider-server.service"
    );
    let unit = std::fs::read_to_string(unit).unwrap();
    let seconds: u64 = unit
        .lines()
        .find_map(|line| line.strip_prefix("WatchdogSec=")?.strip_suffix('s'))
        .unwrap()
        .parse()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "");
    let sources = Sources {
        file: Some(dir.path().join("server.yaml")),
        ..Sources::default()
    };
    let runtime = Config::load(&sources).unwrap().runtime;
    // The last answer may be half of the time older than the end of a fresh heartbeat.
    let killed_after = runtime.heartbeat_limit + Duration::from_secs(seconds) / 2;
    assert!(killed_after > runtime.stall_limit, "{killed_after:?}");
    // Its failure would hide the exit codes that forbid a restart.
    assert!(!unit.lines().any(|line| line.starts_with("ExecStartPre")));
}

fn the_unit_file_is_one_that_systemd_takes() {
    let unit = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../configs/systemd/outrider-server.service"
    );
    let text = std::fs::read_to_string(unit).unwrap();
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .unwrap_or_else(|| panic!("{key} is not set"))
    };
    assert_eq!(value("Type"), "notify");
    assert_eq!(value("Restart"), "on-failure");
    // As `Failure` in the server's main file has them.
    assert_eq!(value("RestartPreventExitStatus"), "64 65");
    assert_eq!(value("ExecReload"), "/bin/kill -HUP $MAINPID");

    // Where systemd is, it judges for itself; the path of the program is the one thing that need not be true here.
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("outrider-server.service");
    std::fs::write(&copy, text.replace("/usr/bin/outrider-server", "/bin/true")).unwrap();
    match Command::new("systemd-analyze")
        .arg("verify")
        .arg(&copy)
        .output()
    {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.success() && !said.contains("outrider"),
                "{said}"
            );
        }
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
    }
}
