//! Image definitions: what an image is made of, as TOML.
//!
//! A definition names files and says where they go; it holds no digest: those are in the [lock](crate::lock) beside it.
//! Every unknown key is an error. Paths in the image have no leading `/` where they are keys of files, and one where the kernel reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use outrider_bundle::manifest::FieldFault;
use outrider_bundle::paths::check_relative;
use serde::Deserialize;

use crate::Error;
use crate::tree::is_at_or_below;

/// The schema version this build reads.
pub const SCHEMA_VERSION: u32 = 1;

/// An image definition.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// Version of this format, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Name of the image; its lock and its titles carry it.
    pub name: String,
    /// Processor architecture.
    pub architecture: Architecture,
    /// What lies below everything else.
    pub base: Base,
    /// Libraries that the server loads: rarely changed, so above the base and below the models.
    #[serde(default)]
    pub runtime: Files,
    /// The model.
    #[serde(default)]
    pub bundle: Option<Bundle>,
    /// Server and configuration: most often changed, so the last layers, first what is built and then the rest.
    pub app: Files,
    /// How the image is run.
    pub config: Config,
}

/// Processor architectures, as OCI spells them; Debian spells these the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// 64-bit x86.
    Amd64,
    /// 64-bit Arm.
    Arm64,
}

impl Architecture {
    /// The spelling of OCI and Debian.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }
}

/// What lies below everything else in an image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Base {
    /// A root of a few Debian packages, unpacked and not installed.
    Debian(Debian),
    /// The layers of another image.
    Oci(Oci),
}

/// Debian packages that are unpacked into a root. No maintainer script runs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Debian {
    /// Package names; versions and digests are in the lock. Dependencies aren't followed: what isn't named isn't there.
    pub packages: Vec<String>,
    /// Paths that are left out, with everything below them. Copyright files stay.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Where the certificates of `ca-certificates` go in one file, which its maintainer script would have made.
    #[serde(default)]
    pub certificate_file: Option<String>,
}

/// An image that is on disk already.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Oci {
    /// Directory of an OCI image layout, relative to the root of the build.
    pub layout: PathBuf,
    /// Digest of the manifest, `sha256:…`.
    pub digest: String,
}

/// Files of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// The files.
    #[serde(default)]
    pub files: Vec<FileRule>,
    /// Directories that are there though they are empty, such as the places of mounts.
    #[serde(default)]
    pub directories: Vec<String>,
}

/// One file of a layer: from disk, or with its text in the definition.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRule {
    /// Path in the image.
    pub to: String,
    /// Path of the file, relative to the root of the build.
    #[serde(default)]
    pub from: Option<PathBuf>,
    /// Content of the file.
    #[serde(default)]
    pub text: Option<String>,
    /// Whether it is a program.
    #[serde(default)]
    pub executable: bool,
    /// Whether it is built from the same sources as the definition, so that no lock can have its digest; the provenance has it.
    #[serde(default)]
    pub built: bool,
}

/// The model of an image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// Directory of the bundle, relative to the root of the build.
    pub from: PathBuf,
    /// Directory in the image.
    pub to: String,
}

/// How an image is run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `uid:gid`, both numbers and not 0.
    pub user: String,
    /// Program and its fixed arguments.
    pub entrypoint: Vec<String>,
    /// Arguments that whoever runs the image may replace.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Environment variables.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Directory that the program starts in.
    pub working_dir: String,
    /// Signal that ends the program in order.
    pub stop_signal: String,
    /// Ports that the program listens on, such as `8080/tcp`.
    #[serde(default)]
    pub ports: Vec<String>,
    /// Labels, beside those that a build adds.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Where a supervisor asks how the program is.
    #[serde(default)]
    pub health: Option<Health>,
}

/// Where a supervisor asks how the program is; becomes labels, since OCI has no field for it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// TCP port.
    pub port: u16,
    /// Path that answers 200 while the process need not be restarted.
    pub live: String,
    /// Path that answers 200 while requests may be sent.
    pub ready: String,
}

impl Definition {
    /// Reads a definition.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| Error::read(path, source))?;
        Self::parse(&text).map_err(|error| error.in_file(path))
    }

    /// Reads a definition from its text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let definition: Self =
            toml::from_str(text).map_err(|source| Error::Toml(Box::new(source)))?;
        if definition.schema_version != SCHEMA_VERSION {
            return Err(Error::SchemaVersion {
                found: definition.schema_version,
                reads: SCHEMA_VERSION,
            });
        }
        let faults = definition.faults();
        if faults.is_empty() {
            Ok(definition)
        } else {
            Err(Error::Values(faults))
        }
    }

    /// Files of the runtime and of the app, in this order.
    pub fn files(&self) -> impl Iterator<Item = &FileRule> {
        self.runtime.files.iter().chain(&self.app.files)
    }

    /// Whether a path of the image belongs to the bundle.
    pub fn is_in_bundle(&self, path: &str) -> bool {
        let bundle = self.bundle.as_ref();
        bundle.is_some_and(|bundle| is_at_or_below(path, &bundle.to))
    }

    fn faults(&self) -> Vec<FieldFault> {
        let mut faults = Vec::new();
        let mut fault = |field: String, problem: String| faults.push(FieldFault { field, problem });
        if !is_word(&self.name) {
            fault(
                "name".to_owned(),
                format!("{:?} must be lower-case letters, digits and `-`", self.name),
            );
        }
        match &self.base {
            Base::Debian(debian) => debian.check(&mut fault),
            Base::Oci(oci) => {
                if !is_digest(&oci.digest) {
                    fault(
                        "base.oci.digest".to_owned(),
                        format!(
                            "{:?} must be `sha256:` and 64 lower-case hexadecimal digits",
                            oci.digest
                        ),
                    );
                }
            }
        }
        let mut places = BTreeSet::new();
        for (layer, files) in [("runtime", &self.runtime), ("app", &self.app)] {
            for (index, rule) in files.files.iter().enumerate() {
                rule.check(&format!("{layer}.files[{index}]"), &mut places, &mut fault);
            }
            for (index, path) in files.directories.iter().enumerate() {
                check_path(&format!("{layer}.directories[{index}]"), path, &mut fault);
            }
        }
        if let Some(bundle) = &self.bundle {
            check_path("bundle.to", &bundle.to, &mut fault);
        }
        self.config.check(&mut fault);
        faults
    }
}

impl Debian {
    fn check(&self, fault: &mut impl FnMut(String, String)) {
        if self.packages.is_empty() {
            fault(
                "base.debian.packages".to_owned(),
                "is empty, a root has at least one".to_owned(),
            );
        }
        let mut seen = BTreeSet::new();
        for (index, package) in self.packages.iter().enumerate() {
            let field = format!("base.debian.packages[{index}]");
            if !is_package_name(package) {
                fault(field, format!("{package:?} is no name of a Debian package"));
            } else if !seen.insert(package) {
                fault(field, format!("{package:?} comes twice"));
            }
        }
        for (index, path) in self.exclude.iter().enumerate() {
            check_path(&format!("base.debian.exclude[{index}]"), path, fault);
        }
        if let Some(path) = &self.certificate_file {
            check_path("base.debian.certificate_file", path, fault);
        }
    }
}

impl FileRule {
    fn check<'a>(
        &'a self,
        field: &str,
        places: &mut BTreeSet<&'a str>,
        fault: &mut impl FnMut(String, String),
    ) {
        check_path(&format!("{field}.to"), &self.to, fault);
        if !places.insert(&self.to) {
            fault(format!("{field}.to"), format!("{:?} comes twice", self.to));
        }
        if self.from.is_some() == self.text.is_some() {
            fault(
                field.to_owned(),
                "must have either `from` or `text`".to_owned(),
            );
        }
        if self.built && self.text.is_some() {
            fault(
                format!("{field}.built"),
                "is for files that are built, a text isn't".to_owned(),
            );
        }
    }
}

impl Config {
    /// User and group as numbers.
    pub fn user_ids(&self) -> Option<(u32, u32)> {
        let (user, group) = self.user.split_once(':')?;
        let number = |text: &str| {
            let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
            is_plain.then(|| text.parse().ok()).flatten()
        };
        Some((number(user)?, number(group)?))
    }

    fn check(&self, fault: &mut impl FnMut(String, String)) {
        let mut fault = |field: &str, problem: String| fault(format!("config.{field}"), problem);
        if self.user_ids().is_none() {
            fault(
                "user",
                format!("{:?} must be `uid:gid`, both numbers above 0", self.user),
            );
        }
        match self.entrypoint.first() {
            None => fault("entrypoint", "is empty, must name a program".to_owned()),
            Some(program) if !program.starts_with('/') => fault(
                "entrypoint[0]",
                format!("{program:?} must be an absolute path"),
            ),
            Some(_) => {}
        }
        if !self.working_dir.starts_with('/') {
            fault(
                "working_dir",
                format!("{:?} must be an absolute path", self.working_dir),
            );
        }
        if !self.stop_signal.starts_with("SIG") {
            fault(
                "stop_signal",
                format!("{:?} must be a name such as \"SIGTERM\"", self.stop_signal),
            );
        }
        for (index, port) in self.ports.iter().enumerate() {
            let number = port.strip_suffix("/tcp").and_then(|port| port.parse().ok());
            if number.is_none_or(|number: u16| number == 0) {
                fault(
                    &format!("ports[{index}]"),
                    format!("{port:?} must be a port and `/tcp`, such as \"8080/tcp\""),
                );
            }
        }
        for name in self.env.keys() {
            if name.is_empty() || name.contains('=') {
                fault("env", format!("{name:?} is no name of a variable"));
            }
        }
        for (path, field) in self.health.iter().flat_map(|health| {
            [
                (&health.live, "health.live"),
                (&health.ready, "health.ready"),
            ]
        }) {
            if !path.starts_with('/') {
                fault(field, format!("{path:?} must begin with `/`"));
            }
        }
    }
}

fn check_path(field: &str, path: &str, fault: &mut impl FnMut(String, String)) {
    if let Err(problem) = check_relative(path) {
        fault(field.to_owned(), format!("{path:?} {problem}"));
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// Debian Policy 5.6.1.
pub(crate) fn is_package_name(text: &str) -> bool {
    text.len() >= 2
        && text.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
        && text.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"+-.".contains(&byte)
        })
}

/// Whether a text is a digest as OCI writes it, with SHA-256.
pub(crate) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:")
        .is_some_and(outrider_bundle::digest::is_sha256)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = include_str!("../../images/cpu.toml");

    fn refusal(text: &str) -> String {
        let error = Definition::parse(text).unwrap_err();
        match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn definitions_of_the_tree_are_read() {
        for (text, name) in [
            (WHOLE, "outrider-cpu"),
            (include_str!("../../images/cuda.toml"), "outrider-cuda"),
        ] {
            assert_eq!(Definition::parse(text).unwrap().name, name);
        }
    }

    #[test]
    fn an_unknown_key_is_named_wherever_it_is() {
        for table in [
            "[config]",
            "[bundle]",
            "[base.debian]",
            "[app]",
            "[[app.files]]",
            "[config.health]",
        ] {
            let text = WHOLE.replacen(table, &format!("{table}\nsurprise = 1"), 1);
            assert!(
                text.contains("surprise"),
                "{table} is not in the definition"
            );
            let message = refusal(&text);
            assert!(
                message.contains("unknown field `surprise`"),
                "{table}: {message}"
            );
        }
        assert!(refusal(&format!("surprise = 1\n{WHOLE}")).contains("unknown field `surprise`"));
    }

    #[test]
    fn a_value_that_cannot_be_is_named() {
        for (from, to, expected) in [
            ("\"10001:10001\"", "\"0:0\"", "config.user: \"0:0\" must be"),
            ("\"10001:10001\"", "\"app\"", "config.user: \"app\" must be"),
            (
                "\"libc6\"",
                "\"ca-certificates\"",
                "\"ca-certificates\" comes twice",
            ),
            (
                "\"libc6\"",
                "\"lib c6\"",
                "\"lib c6\" is no name of a Debian package",
            ),
            (
                "to = \"usr/bin/outrider-server\"",
                "to = \"/usr/bin/outrider-server\"",
                "is absolute",
            ),
            (
                "to = \"usr/bin/outrider-server\"",
                "to = \"../outrider-server\"",
                "leaves the directory",
            ),
            (
                "built = true",
                "built = true\ntext = \"x\"",
                "must have either `from` or `text`",
            ),
            (
                "schema_version = 1",
                "schema_version = 2",
                "schema_version is 2, this build reads 1",
            ),
            (
                "\"8080/tcp\"",
                "\"8080\"",
                "config.ports[0]: \"8080\" must be",
            ),
            ("\"SIGTERM\"", "\"TERM\"", "config.stop_signal"),
            (
                "name = \"outrider-cpu\"",
                "name = \"Outrider CPU\"",
                "name: \"Outrider CPU\" must be",
            ),
        ] {
            assert!(WHOLE.contains(from), "{from} is not in the definition");
            let message = refusal(&WHOLE.replacen(from, to, 1));
            assert!(message.contains(expected), "{to}: {message}");
        }
    }
}
