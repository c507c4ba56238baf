//! nginx: an included file with `split_clients`, tested before it takes the old one's place, and a reload that is seen to have happened.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_bundle::digest::write_atomic;

use super::Gateway;

/// Most time until workers of the new configuration serve, and no others do.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// A running nginx.
#[derive(Clone, Debug)]
pub struct Nginx {
    /// The program.
    pub program: PathBuf,
    /// Its prefix.
    pub prefix: PathBuf,
    /// Its configuration.
    pub config: PathBuf,
    /// The included file with the split.
    pub split: PathBuf,
    /// The file with the process id of the master.
    pub pid: PathBuf,
    /// What makes other callers the first in another rollout.
    pub salt: String,
}

impl Nginx {
    fn text(&self, percent: u8) -> String {
        // nginx allows no share of 0 %.
        let canary = match percent {
            0 => String::new(),
            100 => {
                return format!(
                    "split_clients \"{}/$outrider_caller\" $outrider_split {{\n    * canary;\n}}\n",
                    self.salt
                );
            }
            percent => format!("    {percent}% canary;\n"),
        };
        format!(
            "split_clients \"{}/$outrider_caller\" $outrider_split {{\n{canary}    * stable;\n}}\n",
            self.salt
        )
    }

    fn test(&self) -> anyhow::Result<()> {
        let output = Command::new(&self.program)
            .arg("-t")
            .arg("-q")
            .arg("-p")
            .arg(&self.prefix)
            .arg("-c")
            .arg(&self.config)
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        if !output.status.success() {
            bail!(
                "nginx -t: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    fn master(&self) -> anyhow::Result<i32> {
        let text = fs::read_to_string(&self.pid)
            .with_context(|| format!("cannot read {}", self.pid.display()))?;
        let number = text.trim().parse();
        number.with_context(|| format!("{}: {text:?} is no process id", self.pid.display()))
    }

    fn workers(master: i32) -> anyhow::Result<BTreeSet<String>> {
        let path = format!("/proc/{master}/task/{master}/children");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Ok(text.split_whitespace().map(str::to_owned).collect())
    }
}

/// Whether a worker takes requests: one that ends its last ones says so in its title.
fn serves(worker: &str) -> bool {
    // A process that is gone has no title.
    let title = fs::read(format!("/proc/{worker}/cmdline")).unwrap_or_default();
    let title = String::from_utf8_lossy(&title);
    !title.is_empty() && !title.contains("shutting down")
}

impl Gateway for Nginx {
    fn percent(&self) -> anyhow::Result<Option<u8>> {
        Self::workers(self.master()?)?;
        let text = fs::read_to_string(&self.split)
            .with_context(|| format!("cannot read {}", self.split.display()))?;
        let directives = |line: &str| {
            let line = line.trim();
            (!line.is_empty() && !line.starts_with('#')).then(|| line.to_owned())
        };
        let found: Vec<String> = text.lines().filter_map(directives).collect();
        let is_share = |percent: &u8| {
            let text = self.text(*percent);
            // The first line has the salt, which is another one before the first step.
            text.lines().skip(1).map(str::trim).eq(found.iter().skip(1))
        };
        Ok((0..=100).find(is_share))
    }

    fn set(&self, percent: u8) -> anyhow::Result<()> {
        let master = self.master()?;
        let before = Self::workers(master)?;
        let old = fs::read(&self.split)
            .with_context(|| format!("cannot read {}", self.split.display()))?;
        let aside = self.split.with_extension("new");
        write_atomic(&self.split, &aside, self.text(percent).as_bytes())
            .with_context(|| format!("cannot write {}", self.split.display()))?;
        if let Err(error) = self.test() {
            write_atomic(&self.split, &aside, &old)
                .with_context(|| format!("cannot write {}", self.split.display()))?;
            return Err(error);
        }
        kill(Pid::from_raw(master), Signal::SIGHUP).context("cannot signal nginx")?;
        let began = Instant::now();
        // Workers of the old configuration take requests until they know that they shall end, also when new ones are there.
        while Self::workers(master)?.is_subset(&before)
            || before.iter().any(|worker| serves(worker))
        {
            if began.elapsed() > RELOAD_TIMEOUT {
                bail!(
                    "nginx still serves by its old configuration {} s after the reload: see its error log",
                    RELOAD_TIMEOUT.as_secs()
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    fn describe(&self, percent: u8) -> String {
        format!(
            "{}:\n{}nginx -t, then SIGHUP to the process in {}",
            self.split.display(),
            self.text(percent),
            self.pid.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_share_is_a_file_that_reads_back_as_that_share() {
        let directory = tempfile::tempdir().unwrap();
        let own = std::process::id().to_string();
        let nginx = Nginx {
            program: "nginx".into(),
            prefix: directory.path().into(),
            config: "none".into(),
            split: directory.path().join("split.conf"),
            pid: directory.path().join("pid"),
            salt: "new".to_owned(),
        };
        fs::write(&nginx.pid, own).unwrap();
        for percent in 0..=100 {
            let text = nginx.text(percent).replace("new/", "first/");
            fs::write(&nginx.split, format!("# A comment.\n{text}")).unwrap();
            assert_eq!(nginx.percent().unwrap(), Some(percent));
        }
        fs::write(
            &nginx.split,
            "split_clients x $y {\n    7.5% canary;\n    * stable;\n}\n",
        )
        .unwrap();
        assert_eq!(nginx.percent().unwrap(), None);
    }
}
