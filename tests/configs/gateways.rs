//! The gateways of `configs/`: what HAProxy decides by itself in front of two servers that say which one answered, and what each gateway's own check refuses.
//!
//! How they carry a rollout is seen where their drivers are.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use outrider_tests::fixtures::program;

use crate::repository;

/// Most time for a gateway to do what it was told, on a machine that does other work.
const DEADLINE: Duration = Duration::from_secs(60);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const CALLERS: usize = 300;

pub fn haproxy_splits_by_caller_and_takes_a_canary_that_is_not_ready_out() -> anyhow::Result<()> {
    let (stable, canary) = (Backend::start("stable")?, Backend::start("canary")?);
    let scratch = tempfile::tempdir()?;
    let map = scratch.path().join("split.map");
    fs::copy(repository("configs/haproxy/split.map"), &map)?;
    let socket = scratch.path().join("haproxy.sock");
    let (gateway, metrics) = xtask::server_process::free_addresses()?;
    let child = Command::new(program("haproxy", "haproxy")?)
        .args(["-db", "-f"])
        .arg(repository("configs/haproxy/outrider.cfg"))
        .env("OUTRIDER_GATEWAY", gateway.to_string())
        .env("OUTRIDER_GATEWAY_METRICS", metrics.to_string())
        .env("OUTRIDER_GATEWAY_SOCKET", &socket)
        .env("OUTRIDER_SPLIT_MAP", &map)
        .env("OUTRIDER_STABLE", stable.address.to_string())
        .env(
            "OUTRIDER_STABLE_ADMIN_PORT",
            stable.address.port().to_string(),
        )
        .env("OUTRIDER_CANARY", canary.address.to_string())
        .env(
            "OUTRIDER_CANARY_ADMIN_PORT",
            canary.address.port().to_string(),
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let _gateway = Gateway(child);
    let agent = ureq::Agent::new_with_defaults();
    wait_until("the gateway answers", || {
        Ok(ask(&agent, gateway, &[]).is_ok())
    })?;
    let set_percent = |percent: usize| -> anyhow::Result<()> {
        let mut stream = UnixStream::connect(&socket)?;
        writeln!(stream, "set map {} canary {percent}", map.display())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.trim().is_empty(), "{answer}");
        Ok(())
    };

    let mut before = BTreeSet::new();
    for percent in [0, 1, 5, 25, 50, 100] {
        set_percent(percent)?;
        let served = served_by_canary(&agent, gateway)?;
        ensure!(
            within_sampling_error(served.len(), percent),
            "{} of {CALLERS} at {percent} %",
            served.len()
        );
        ensure!(
            served.is_superset(&before),
            "callers moved back to stable at {percent} %"
        );
        ensure!(
            served == served_by_canary(&agent, gateway)?,
            "callers move without a change at {percent} %"
        );
        before = served;
    }
    set_percent(50)?;
    let road = ask(&agent, gateway, &[])?;
    for _ in 0..10 {
        ensure!(
            ask(&agent, gateway, &[])? == road,
            "a caller without a key moves"
        );
    }

    set_percent(0)?;
    ensure!(ask(&agent, gateway, &[("X-Outrider-Version", "canary")])? == "canary");
    set_percent(100)?;
    ensure!(ask(&agent, gateway, &[("X-Outrider-Version", "stable")])? == "stable");

    canary.ready.store(false, Ordering::SeqCst);
    wait_until("a canary that is not ready is out", || {
        Ok(ask(&agent, gateway, &[])? == "stable")
    })?;
    ensure!(
        ask(&agent, gateway, &[("X-Outrider-Version", "canary")]).is_err(),
        "the forced road leads to another version than the one asked for"
    );
    let page: String = ureq::get(format!("http://{metrics}/metrics"))
        .call()?
        .into_body()
        .read_to_string()?;
    ensure!(
        page.contains("haproxy_backend_active_servers{proxy=\"canary\"} 0"),
        "{page}"
    );
    Ok(())
}

pub fn a_misspelled_directive_fails_the_check_of_its_gateway() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    for file in [
        "haproxy/outrider.cfg",
        "haproxy/split.map",
        "nginx/outrider.conf",
        "nginx/split.conf",
    ] {
        let name = file.split_once('/').context("a file of a gateway")?.1;
        fs::copy(repository("configs").join(file), scratch.path().join(name))?;
    }
    let (haproxy, nginx) = (
        program("haproxy", "haproxy")?,
        program("nginx", "nginx-light")?,
    );
    let accepts = |gateway: &str| -> anyhow::Result<bool> {
        let mut command = match gateway {
            "haproxy" => Command::new(&haproxy),
            _ => Command::new(&nginx),
        };
        match gateway {
            "haproxy" => command
                .args(["-c", "-f", "outrider.cfg"])
                .env("OUTRIDER_SPLIT_MAP", "split.map"),
            _ => command
                .args(["-t", "-c", "outrider.conf", "-p"])
                .arg(scratch.path()),
        };
        command.current_dir(scratch.path());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command.status()?.success())
    };
    for (gateway, file, word) in [
        ("haproxy", "outrider.cfg", "default_backend"),
        ("haproxy", "outrider.cfg", "map_str_int"),
        ("haproxy", "outrider.cfg", "hard-stop-after"),
        ("nginx", "outrider.conf", "proxy_buffering"),
        ("nginx", "outrider.conf", "worker_shutdown_timeout"),
        ("nginx", "split.conf", "split_clients"),
    ] {
        ensure!(accepts(gateway)?, "{gateway} refuses configs/{gateway}");
        let path = scratch.path().join(file);
        let text = fs::read_to_string(&path)?;
        ensure!(text.contains(word), "{file} has no {word}");
        fs::write(&path, text.replace(word, &format!("{word}x")))?;
        ensure!(!accepts(gateway)?, "{gateway} accepts {word}x");
        fs::write(&path, text)?;
    }
    Ok(())
}

/// Whether so many of [`CALLERS`] are no further from `percent` than four standard deviations.
fn within_sampling_error(served: usize, percent: usize) -> bool {
    let share = percent as f64 / 100.0;
    let deviation = (CALLERS as f64 * share * (1.0 - share)).sqrt();
    (served as f64 - CALLERS as f64 * share).abs() <= 4.0 * deviation
}

/// The callers that the canary serves.
fn served_by_canary(agent: &ureq::Agent, gateway: SocketAddr) -> anyhow::Result<BTreeSet<usize>> {
    let mut served = BTreeSet::new();
    for caller in 0..CALLERS {
        let road = ask(
            agent,
            gateway,
            &[("Authorization", &format!("Bearer sk-{caller:06}"))],
        )?;
        if road == "canary" {
            served.insert(caller);
        }
    }
    Ok(served)
}

/// Which server answers a request with these headers; the header that the gateway adds must say the same.
fn ask(
    agent: &ureq::Agent,
    gateway: SocketAddr,
    headers: &[(&str, &str)],
) -> anyhow::Result<String> {
    let mut request = agent.get(format!("http://{gateway}/v1/models"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.call()?;
    let header = answer
        .headers()
        .get("X-Outrider-Version")
        .context("no header X-Outrider-Version")?;
    let header = header.to_str()?.to_owned();
    let body = answer.into_body().read_to_string()?;
    ensure!(
        body == header,
        "{body} answered, and the gateway says {header}"
    );
    Ok(body)
}

/// A server that answers with its name.
struct Backend {
    address: SocketAddr,
    ready: Arc<AtomicBool>,
}

impl Backend {
    fn start(name: &'static str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let ready = Arc::new(AtomicBool::new(true));
        let its_ready = Arc::clone(&ready);
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let ready = Arc::clone(&its_ready);
                // A gateway that closes a connection is no fault.
                thread::spawn(move || drop(answer(connection, name, &ready)));
            }
        });
        Ok(Self { address, ready })
    }
}

fn answer(connection: TcpStream, name: &str, ready: &AtomicBool) -> anyhow::Result<()> {
    let mut writer = connection.try_clone()?;
    let mut lines = BufReader::new(connection).lines();
    while let Some(request) = lines.next().transpose()? {
        while !lines.next().context("half a request")??.is_empty() {}
        let is_down = request.contains(" /readyz ") && !ready.load(Ordering::SeqCst);
        let status = if is_down { "503 Down" } else { "200 OK" };
        let length = name.len();
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{name}");
        // In one piece: the second of two would wait for the first one's acknowledgement.
        writer.write_all(answer.as_bytes())?;
    }
    Ok(())
}

/// A gateway that ends with its test.
struct Gateway(Child);

impl Drop for Gateway {
    fn drop(&mut self) {
        let id = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        // A master that is killed leaves its workers behind. It may have ended by itself; then there is nothing left to do.
        let _ = nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        let seen = holds();
        if matches!(seen, Ok(true)) {
            return Ok(());
        }
        if began.elapsed() > DEADLINE {
            bail!("not seen in {} s: {what}: {seen:?}", DEADLINE.as_secs());
        }
        thread::sleep(POLL_INTERVAL);
    }
}
