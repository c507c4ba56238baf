//! `cargo xtask serve`, as a new user runs it.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::wire::{Api, Generation};
use serde_json::Value;
use xtask::server_process::free_addresses;

/// Stops the command, which stops its server, however the test ends.
struct Serving(Child);

impl Serving {
    fn stop(&mut self) -> anyhow::Result<std::process::ExitStatus> {
        kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM)?;
        Ok(self.0.wait()?)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // Nothing is left to do when it ended just now.
            let _ = self.stop();
        }
    }
}

pub fn the_printed_curl_line_works_and_a_stop_ends_the_server(_: &Servers) -> anyhow::Result<()> {
    let (listen, admin_listen) = free_addresses()?;
    let child = Command::new(fixtures::xtask_binary()?)
        .args([
            "serve",
            "--listen",
            &listen.to_string(),
            "--admin-listen",
            &admin_listen.to_string(),
        ])
        // The slab of a server without settings needs more memory than a small machine has beside the other servers of these tests.
        .args(["--", "--set", "serving.runtime.context_tokens=512"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut serving = Serving(child);
    let stdout = serving.0.stdout.take().context("no standard output")?;
    let mut log = serving.0.stderr.take().context("no standard error")?;
    // Read on a thread of its own, so that the server never waits for room in the pipe.
    let log = std::thread::spawn(move || {
        let mut text = String::new();
        log.read_to_string(&mut text).map(|_| text)
    });
    let mut lines = BufReader::new(stdout).lines();
    let Some(curl) = lines.find_map(|line| {
        line.ok()
            .filter(|line| line.trim_start().starts_with("curl "))
    }) else {
        let status = serving.0.wait()?;
        bail!(
            "no curl line, {status}: {}",
            log.join().expect("reading does not panic")?
        );
    };

    let url = curl.split_whitespace().nth(1).context("no address")?;
    let base = url
        .strip_suffix(Api::Chat.path())
        .context("not the chat interface")?;
    let body = curl.split('\'').nth(3).context("no body")?;
    let body: Value = serde_json::from_str(body)?;
    let client = Client::new(base, ClientOptions::default())?;
    let response = client.post(Api::Chat.path(), &body)?;
    assert_eq!(response.status, 200, "{}", response.text());
    let answer = Generation::from_whole(Api::Chat, &response.json().context("no JSON")?)?;
    assert!(!answer.text.is_empty(), "{}", response.text());

    let status = serving.stop()?;
    let log = log.join().expect("reading does not panic")?;
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(
        TcpListener::bind(listen).is_ok(),
        "the server still listens: {log}"
    );
    Ok(())
}

pub fn a_busy_port_is_an_error_that_names_it(_: &Servers) -> anyhow::Result<()> {
    let busy = TcpListener::bind("127.0.0.1:0")?;
    let address = busy.local_addr()?.to_string();
    let (free, _) = free_addresses()?;
    for (flags, named) in [
        (
            ["--listen", &address, "--admin-listen", &free.to_string()],
            "--listen",
        ),
        (
            ["--listen", &free.to_string(), "--admin-listen", &address],
            "--admin-listen",
        ),
    ] {
        let output = Command::new(fixtures::xtask_binary()?)
            .arg("serve")
            .args(flags)
            .output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&address) && error.contains(named), "{error}");
    }
    Ok(())
}
