//! HAProxy: one entry of a map, changed through the runtime socket without a reload, and written to the map file for the next start.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use outrider_bundle::digest::write_atomic;

use super::Gateway;

/// Most time of a command.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The map's one key.
const KEY: &str = "canary";

/// A running HAProxy.
#[derive(Clone, Debug)]
pub struct Haproxy {
    /// Its runtime socket.
    pub socket: PathBuf,
    /// The map file, by the name that its configuration has for it.
    pub map: PathBuf,
}

impl Haproxy {
    fn command(&self, command: &str) -> anyhow::Result<String> {
        let explain = || format!("{}: {command}", self.socket.display());
        let mut socket = UnixStream::connect(&self.socket).with_context(explain)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        socket
            .write_all(format!("{command}\n").as_bytes())
            .with_context(explain)?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).with_context(explain)?;
        Ok(answer.trim().to_owned())
    }

    fn running(&self) -> anyhow::Result<u8> {
        let command = format!("show map {}", self.map.display());
        let answer = self.command(&command)?;
        // Lines are an address, the key and the value.
        let value = answer.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            (words.next() == Some(KEY)).then(|| words.next())?
        });
        let value = value.with_context(|| format!("{command}: no {KEY} in {answer:?}"))?;
        percentage(value)
    }

    fn written(&self) -> anyhow::Result<u8> {
        let text = fs::read_to_string(&self.map)
            .with_context(|| format!("cannot read {}", self.map.display()))?;
        let value = text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(KEY)).then(|| words.next())?
        });
        let value = value.with_context(|| format!("{}: no {KEY}", self.map.display()))?;
        percentage(value)
    }
}

impl Gateway for Haproxy {
    fn percent(&self) -> anyhow::Result<Option<u8>> {
        let running = self.running()?;
        Ok((self.written().ok() == Some(running)).then_some(running))
    }

    fn set(&self, percent: u8) -> anyhow::Result<()> {
        // What runs comes first: a rollback waits for no disk.
        let command = format!("set map {} {KEY} {percent}", self.map.display());
        let answer = self.command(&command)?;
        if !answer.is_empty() {
            bail!("{command}: {answer}");
        }
        let text = format!(
            "# Percentage of callers, 0 to 100, that the canary serves.\n{KEY} {percent}\n"
        );
        write_atomic(&self.map, &self.map.with_extension("new"), text.as_bytes())
            .with_context(|| format!("cannot write {}", self.map.display()))?;
        let (running, written) = (self.running()?, self.written()?);
        if (running, written) != (percent, percent) {
            bail!("after {command} the map has {running} and its file {written}");
        }
        Ok(())
    }

    fn describe(&self, percent: u8) -> String {
        format!(
            "{}: set map {map} {KEY} {percent}; the same into {map}",
            self.socket.display(),
            map = self.map.display()
        )
    }
}

fn percentage(text: &str) -> anyhow::Result<u8> {
    match text.parse() {
        Ok(percent @ 0..=100) => Ok(percent),
        _ => bail!("{KEY} {text:?} must be a whole number from 0 to 100"),
    }
}
