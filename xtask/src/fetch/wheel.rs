//! Files from Python wheels: pip brings the wheel from whatever index it is configured for, and the members are taken out while they are checked.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use outrider_bundle::lock::{LockedFile, Wheel};
use zip::ZipArchive;
use zip::result::ZipError;

use super::incoming::Incoming;
use super::progress::Progress;
use crate::python::INTERPRETER_VARIABLE;

/// How pip is called.
#[derive(Clone, Debug)]
pub struct Pip {
    /// The Python interpreter that has it.
    pub python: OsString,
    /// Environment variables on top of those of this process.
    pub variables: Vec<(OsString, OsString)>,
}

impl Default for Pip {
    fn default() -> Self {
        let python = env::var_os(INTERPRETER_VARIABLE).filter(|python| !python.is_empty());
        Self {
            python: python.unwrap_or_else(|| "python3".into()),
            variables: Vec::new(),
        }
    }
}

impl Pip {
    /// Brings a wheel into an empty directory. Pip itself refuses one with another digest.
    fn download(&self, wheel: &Wheel, dir: &Path) -> anyhow::Result<PathBuf> {
        let requirements = dir.join("requirements.txt");
        let requirement = format!(
            "{}=={} --hash=sha256:{}\n",
            wheel.package, wheel.version, wheel.wheel_sha256
        );
        fs::write(&requirements, requirement)
            .with_context(|| format!("cannot write {}", requirements.display()))?;

        let mut command = Command::new(&self.python);
        command.args([
            "-m",
            "pip",
            "download",
            "--require-hashes",
            "--no-deps",
            "--only-binary=:all:",
        ]);
        command.args([
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar=off",
        ]);
        if let (Some(python), Some(abi), Some(platform)) =
            (&wheel.python, &wheel.abi, &wheel.platform)
        {
            command.args([
                "--implementation=cp",
                "--python-version",
                python,
                "--abi",
                abi,
                "--platform",
                platform,
            ]);
        }
        command.arg("-r").arg(&requirements).arg("-d").arg(dir);
        command
            .envs(self.variables.iter().cloned())
            .stdin(Stdio::null());

        let python = self.python.to_string_lossy();
        let output = command
            .output()
            .with_context(|| format!("cannot run {python}, whose pip fetches {}", wheel.package))?;
        if !output.status.success() {
            let said = [output.stdout, output.stderr]
                .map(|text| String::from_utf8_lossy(&text).trim().to_owned())
                .join("\n");
            if said.contains("No module named pip") {
                bail!(
                    "{python} has no pip, which fetches {}; install it, or put the files into the store by hand",
                    wheel.package
                );
            }
            bail!(
                "pip cannot download {} {}:\n{}",
                wheel.package,
                wheel.version,
                last_lines(&said, 12)
            );
        }
        let entries =
            fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
        let mut wheels = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let is_wheel =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
        wheels.find(is_wheel).with_context(|| {
            format!(
                "pip says it downloaded {} and there is no wheel",
                wheel.package
            )
        })
    }
}

/// Brings files of a wheel into `dir`.
pub fn fetch_members(
    wheel: &Wheel,
    files: &[&LockedFile],
    dir: &Path,
    pip: &Pip,
    progress: Progress,
) -> anyhow::Result<()> {
    let aside = Aside::create(dir.join(".wheel"))?;
    let path = {
        let _spinner = progress.spinner(&format!(
            "pip downloads {} {}",
            wheel.package, wheel.version
        ));
        pip.download(wheel, &aside.0)?
    };
    let open = || anyhow::Ok(ZipArchive::new(File::open(&path)?)?);
    let mut archive =
        open().with_context(|| format!("cannot open the wheel of {}", wheel.package))?;
    for file in files {
        unpack(&mut archive, file, dir, progress)
            .with_context(|| format!("cannot unpack {} {}", wheel.package, wheel.version))?;
    }
    Ok(())
}

fn unpack(
    archive: &mut ZipArchive<File>,
    file: &LockedFile,
    dir: &Path,
    progress: Progress,
) -> anyhow::Result<()> {
    let member = file
        .member
        .as_deref()
        .context("a file of a wheel has a member")?;
    let mut stream = match archive.by_name(member) {
        Ok(stream) => stream,
        Err(ZipError::FileNotFound) => bail!("the wheel has no member {member}"),
        Err(error) => return Err(error).with_context(|| format!("cannot read member {member}")),
    };
    let bar = progress.bytes(&file.name, file.size_bytes);
    let mut incoming = Incoming::start(dir, file)?;
    incoming.write_all_of(&mut stream, |bytes| bar.advance(bytes))?;
    incoming.commit()
}

/// A directory for work in progress; what an interrupted run left in it is removed first.
struct Aside(PathBuf);

impl Aside {
    fn create(path: PathBuf) -> anyhow::Result<Self> {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
