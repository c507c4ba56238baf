//! What the commands of a page find when they begin: addresses, files, a server; and what is left when they have ended.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, io};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use outrider_bundle::manifest::Precision;
use outrider_tests::fixtures;
use tempfile::TempDir;
use xtask::reference;
use xtask::server_process::{ServerCommand, ServerProcess, Terminal, free_addresses};

/// Most time of a server to get ready and of a page to end, on a machine that does other work.
const DEADLINE: Duration = Duration::from_secs(300);
/// Between two looks whether a page has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The caller whose key the server of [`Scene::with_a_server`] knows.
const CALLER: &str = "search";
/// Programs that pages run, with the packages that have them.
const PROGRAMS: [(&str, &str); 4] = [
    ("curl", "curl"),
    ("haproxy", "haproxy"),
    ("prometheus", "prometheus"),
    ("socat", "socat"),
];

/// A folder and variables for a page, and a server where the page is for one that runs.
pub struct Scene {
    folder: TempDir,
    variables: BTreeMap<&'static str, String>,
    addresses: Vec<SocketAddr>,
    server: Option<ServerProcess>,
}

impl Scene {
    /// Free addresses, and nothing that listens there.
    pub fn empty() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut variables = BTreeMap::new();
        let mut addresses = Vec::new();
        for [first, second] in [
            ["ENDPOINT", "ADMIN"],
            ["CANARY", "CANARY_ADMIN"],
            ["GATEWAY", "GATEWAY_METRICS"],
            ["PROMETHEUS", "UNUSED"],
        ] {
            let (one, other) = free_addresses()?;
            for (name, address) in [(first, one), (second, other)] {
                variables.insert(name, format!("http://{address}"));
                addresses.push(address);
            }
        }
        for (name, file) in [
            ("DIRECTORY", ""),
            ("CONFIG", "server.yaml"),
            ("CANARY_CONFIG", "canary.yaml"),
            ("GATEWAY_SOCKET", "gateway.sock"),
            ("SPLIT_MAP", "split.map"),
            ("KEYS", "api-keys"),
        ] {
            let path = folder.path().join(file);
            let path = path.to_str().context("a path that is not UTF-8")?;
            variables.insert(name, path.trim_end_matches('/').to_owned());
        }
        Ok(Self {
            folder,
            variables,
            addresses,
            server: None,
        })
    }

    /// One server that asks callers for a key.
    pub fn with_a_server() -> anyhow::Result<Self> {
        let mut scene = Self::empty()?;
        let binary = fixtures::server_binary()?;
        let made = Command::new(&binary).args(["--new-key", CALLER]).output()?;
        ensure!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
        let path = |name: &str| Path::new(&scene.variables[name]);
        fs::write(path("KEYS"), made.stdout)?;
        let config = path("CONFIG").to_owned();
        fs::write(&config, configuration(path("KEYS"))?)?;
        let command = ServerCommand {
            binary,
            settings: Vec::new(),
            config: Some(config),
            arguments: Vec::new(),
            terminal: Terminal::Caller,
        };
        let server = command.start_ready(DEADLINE)?;
        let secret = String::from_utf8(made.stderr)?.trim().to_owned();
        scene.variables.extend([
            ("ENDPOINT", server.endpoint()),
            ("ADMIN", server.admin_endpoint()),
            ("SERVER_PID", server.id().to_string()),
            ("CALLER", CALLER.to_owned()),
            ("OUTRIDER_VERIFY_API_KEY", secret),
        ]);
        scene.server = Some(server);
        scene.ask_once()?;
        Ok(scene)
    }

    /// One request with drafted tokens: pages are for servers that had some.
    fn ask_once(&self) -> anyhow::Result<()> {
        let key = &self.variables["OUTRIDER_VERIFY_API_KEY"];
        let body =
            r#"{"model": "SmolLM2-135M-Instruct", "prompt": "One, two, three,", "max_tokens": 16}"#;
        ureq::post(format!("{}/v1/completions", self.variables["ENDPOINT"]))
            .header("authorization", format!("Bearer {key}"))
            .header("content-type", "application/json")
            .send(body)?;
        Ok(())
    }

    /// Runs `script` at the root of the repository; the server must end well after it.
    pub fn run(&mut self, script: &str) -> anyhow::Result<()> {
        let output = self.folder.path().join("output");
        let log = File::create(&output)?;
        let shown = || -> io::Result<String> {
            Ok(String::from_utf8_lossy(&fs::read(&output)?).into_owned())
        };
        let mut command = Command::new("bash");
        command
            .args(["-euxo", "pipefail", "-c", script])
            .current_dir(fixtures::data(".."))
            .env("PATH", self.path()?)
            .envs(&self.variables)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // What the script leaves running ends with it.
            .process_group(0);
        xtask::build::forget_package(&mut command);
        let mut group = Group(command.spawn().context("cannot run bash")?);
        let began = Instant::now();
        let status = loop {
            if let Some(status) = group.0.try_wait()? {
                break status;
            }
            if began.elapsed() > DEADLINE {
                bail!("no end after {} s\n{}", DEADLINE.as_secs(), shown()?);
            }
            thread::sleep(POLL_INTERVAL);
        };
        ensure!(status.success(), "{status}\n{}", shown()?);
        if let Some(server) = self.server.take() {
            let log = server.log_tail();
            let status = server.stop(DEADLINE)?;
            ensure!(status.success(), "the server ended with {status}{log}");
        }
        Ok(())
    }

    /// Nothing listens at any of the addresses.
    pub fn ensure_nothing_is_left(&self) -> anyhow::Result<()> {
        for address in &self.addresses {
            ensure!(
                TcpStream::connect(address).is_err(),
                "something still listens on {address}"
            );
        }
        Ok(())
    }

    /// The folders of the programs that pages run.
    fn path(&self) -> anyhow::Result<std::ffi::OsString> {
        let server = fixtures::server_binary()?;
        let mut folders = vec![
            server
                .parent()
                .context("a program in no folder")?
                .to_owned(),
        ];
        folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        for (name, package) in PROGRAMS {
            let program = fixtures::program(name, package)?;
            folders.push(
                program
                    .parent()
                    .context("a program in no folder")?
                    .to_owned(),
            );
        }
        Ok(env::join_paths(folders)?)
    }
}

/// A small server that asks for keys, and checks whole blocks whether they pay or not, so that every page sees drafted tokens.
fn configuration(keys: &Path) -> anyhow::Result<String> {
    let workspace = fixtures::workspace()?;
    let bundle = reference::find(&workspace, Precision::Int8)?;
    let library = fixtures::onnxruntime(&workspace)?;
    Ok(format!(
        "serving:\n  bundle: {}\n  auth:\n    api_keys_path: {}\n  speculative:\n    adaptive_width: false\n  \
         runtime:\n    onnxruntime_library: {}\n    context_tokens: 512\n    queue_capacity: 64\n",
        bundle.display(),
        keys.display(),
        library.display()
    ))
}

/// A shell and all that it started, which end when this is dropped.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        // Nothing may be left of it; then there is nothing to do.
        let _ = killpg(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}
