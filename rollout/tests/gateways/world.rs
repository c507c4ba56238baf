//! Two versions that say who they are, callers with keys, and the processes between them.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use outrider_rollout::gateway::Gateway;

const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const CALLERS: usize = 500;

/// A version: it answers everything with its name, and `/stream` in two parts, the second when it is told to.
pub struct Version {
    pub address: SocketAddr,
    pub go_on: Sender<()>,
}

impl Version {
    pub fn start(name: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (go_on, told) = channel();
        thread::spawn(move || {
            let told = std::sync::Arc::new(std::sync::Mutex::new(told));
            for connection in listener.incoming() {
                let told = std::sync::Arc::clone(&told);
                // A client that went away is nobody's fault.
                thread::spawn(move || answer(connection?, name, &told.lock().unwrap()));
            }
            std::io::Result::Ok(())
        });
        Self { address, go_on }
    }
}

fn answer(mut connection: TcpStream, name: &str, told: &Receiver<()>) -> std::io::Result<()> {
    let mut lines = BufReader::new(connection.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    if !request.contains("/stream") {
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            name.len()
        );
        return connection.write_all(format!("{head}{name}").as_bytes());
    }
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    connection.write_all(format!("{head}6\r\nfirst \r\n").as_bytes())?;
    if told.recv().is_err() {
        return Ok(());
    }
    connection.write_all(b"4\r\nlast\r\n0\r\n\r\n")
}

/// A process with its children, killed when the test ends.
pub struct Process(Child);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let program = command.get_program().to_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = child.stderr(Stdio::null()).process_group(0).spawn();
        Self(child.unwrap_or_else(|error| {
            panic!("{program:?} of the Debian package of that name must be installed: {error}")
        }))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed());
        // It may have ended by itself, which is what the test then fails by.
        let _ = killpg(group, Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// A file of the shipped configurations.
pub fn shipped(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../configs")
        .join(file)
}

/// Callers behind a gateway.
pub struct Callers {
    address: SocketAddr,
    agent: ureq::Agent,
}

impl Callers {
    pub fn of(address: SocketAddr) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(DEADLINE))
            .build();
        Self {
            address,
            agent: config.into(),
        }
    }

    fn key(caller: usize) -> String {
        format!("Bearer sk-{caller:08x}")
    }

    /// Who answers, by its own word and by the gateway's.
    pub fn ask(&self, caller: usize, forced: Option<&str>) -> Option<String> {
        let request = self.agent.get(format!("http://{}/", self.address));
        let mut request = request.header("authorization", Self::key(caller));
        if let Some(version) = forced {
            request = request.header("X-Outrider-Version", version);
        }
        let mut answer = request.call().ok()?;
        if answer.status() != 200 {
            return None;
        }
        let said = answer.headers()["X-Outrider-Version"]
            .to_str()
            .unwrap()
            .to_owned();
        let body = answer.body_mut().read_to_string().unwrap();
        assert_eq!(said, body);
        Some(body)
    }

    /// Waits until both versions can be reached.
    pub fn wait(&self) {
        let began = Instant::now();
        for version in ["stable", "canary"] {
            while self.ask(0, Some(version)).as_deref() != Some(version) {
                assert!(began.elapsed() < DEADLINE, "no way to {version}");
                thread::sleep(POLL);
            }
        }
    }

    fn on_canary(&self) -> BTreeSet<usize> {
        let callers = 0..CALLERS;
        callers
            .filter(|&caller| self.ask(caller, None).expect("an answer") == "canary")
            .collect()
    }

    /// Moves the share from nothing to everything and back, and looks at every caller each time.
    pub fn see_that_nobody_moves_back(&self, gateway: &dyn Gateway) {
        assert_eq!(gateway.percent().unwrap(), Some(0));
        assert_eq!(self.on_canary(), BTreeSet::new());
        let mut before = BTreeSet::new();
        for percent in [1, 5, 25, 50, 100] {
            gateway.set(percent).unwrap();
            assert_eq!(gateway.percent().unwrap(), Some(percent));
            let now = self.on_canary();
            assert!(
                now.is_superset(&before),
                "somebody moved back at {percent} %"
            );
            assert_eq!(self.on_canary(), now, "somebody moved at {percent} %");
            let share = f64::from(percent) / 100.0;
            let expected = share * CALLERS as f64;
            let deviation = (expected * (1.0 - share)).sqrt();
            let measured = now.len() as f64;
            assert!(
                (measured - expected).abs() <= 3.0 * deviation,
                "{measured} of {CALLERS} callers at {percent} %"
            );
            for version in ["stable", "canary"] {
                assert_eq!(self.ask(0, Some(version)).as_deref(), Some(version));
            }
            before = now;
        }
        gateway.set(0).unwrap();
        assert_eq!(self.on_canary(), BTreeSet::new());
    }

    /// A stream of the canary's outlives the change that takes the canary's callers away.
    pub fn see_that_a_stream_outlives_a_rollback(&self, gateway: &dyn Gateway, canary: &Version) {
        gateway.set(100).unwrap();
        let request = self.agent.get(format!("http://{}/stream", self.address));
        let mut answer = request.call().unwrap();
        let mut reader = answer.body_mut().as_reader();
        let mut first = [0; 6];
        reader.read_exact(&mut first).unwrap();
        gateway.set(0).unwrap();
        assert_eq!(self.on_canary(), BTreeSet::new());
        canary.go_on.send(()).unwrap();
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "last");
    }
}
