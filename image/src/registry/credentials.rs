//! Credentials as Docker and its relatives keep them: `config.json`, and helpers that are asked.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fmt, fs, io};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::RegistryError;

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Name of the user.
    pub user: String,
    /// Password or token.
    pub secret: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credentials({:?}, …)", self.user)
    }
}

/// The part of Docker's `config.json` that is about credentials; the rest is other programs'.
#[derive(Clone, Default, Deserialize)]
pub struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
    #[serde(default, rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
    #[serde(default, rename = "credsStore")]
    store: Option<String>,
}

#[derive(Clone, Deserialize)]
struct Auth {
    auth: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Username")]
    user: String,
    #[serde(rename = "Secret")]
    secret: String,
}

impl DockerConfig {
    /// Reads a `config.json`; one that isn't there has no credentials.
    pub fn load(path: &Path) -> Result<Self, RegistryError> {
        let fault = |problem: String| RegistryError::Credentials {
            registry: path.display().to_string(),
            problem,
        };
        match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| fault(error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(fault(error.to_string())),
        }
    }

    /// Credentials for a registry, when there are any. A helper that the file names is asked first.
    pub fn find(&self, registry: &str) -> Result<Option<Credentials>, RegistryError> {
        if let Some(helper) = self.helpers.get(registry).or(self.store.as_ref()) {
            return ask(helper, registry);
        }
        let known = [
            registry.to_owned(),
            format!("https://{registry}"),
            format!("http://{registry}"),
        ];
        let auth = known
            .iter()
            .find_map(|name| self.auths.get(name)?.auth.as_ref());
        let Some(auth) = auth else {
            return Ok(None);
        };
        let decoded = STANDARD
            .decode(auth)
            .ok()
            .and_then(|bytes| String::from_utf8(bytes).ok());
        match decoded.as_ref().and_then(|text| text.split_once(':')) {
            Some((user, secret)) => Ok(Some(Credentials {
                user: user.to_owned(),
                secret: secret.to_owned(),
            })),
            None => Err(RegistryError::Credentials {
                registry: registry.to_owned(),
                problem: "`auth` must be the base64 form of user:password".to_owned(),
            }),
        }
    }
}

/// Asks a credential helper, which gets the registry on its input and writes JSON.
fn ask(helper: &str, registry: &str) -> Result<Option<Credentials>, RegistryError> {
    let program = format!("docker-credential-{helper}");
    let fault = |problem: String| RegistryError::Credentials {
        registry: registry.to_owned(),
        problem: format!("{program}: {problem}"),
    };
    let asked = (|| {
        let mut child = Command::new(&program)
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().expect("the input is a pipe");
        input.write_all(registry.as_bytes())?;
        drop(input);
        child.wait_with_output()
    })();
    let output = asked.map_err(|error: io::Error| fault(error.to_string()))?;
    if !output.status.success() {
        // Helpers say on their output that they know nothing, and nothing else tells it from a failure.
        let said = String::from_utf8_lossy(&output.stdout);
        if said.contains("credentials not found") {
            return Ok(None);
        }
        return Err(fault(format!("ends with {}", output.status)));
    }
    let answer: Answer = serde_json::from_slice(&output.stdout)
        .map_err(|_| fault("answers no credentials".to_owned()))?;
    Ok(Some(Credentials {
        user: answer.user,
        secret: answer.secret,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str) -> Result<Option<Credentials>, RegistryError> {
        let config: DockerConfig = serde_json::from_str(text).unwrap();
        config.find("r.example:5000")
    }

    #[test]
    fn credentials_of_the_registry_and_of_no_other_are_found() {
        let auth = STANDARD.encode("user:pass:word");
        for name in ["r.example:5000", "https://r.example:5000"] {
            let text = format!(
                r#"{{"auths": {{"{name}": {{"auth": "{auth}"}}}}, "currentContext": "x"}}"#
            );
            let found = find(&text).unwrap().unwrap();
            assert_eq!(
                (found.user.as_str(), found.secret.as_str()),
                ("user", "pass:word")
            );
            assert!(!format!("{found:?}").contains("pass"));
        }
        let text = format!(r#"{{"auths": {{"r.example": {{"auth": "{auth}"}}}}}}"#);
        assert_eq!(find(&text).unwrap(), None);
        assert_eq!(find("{}").unwrap(), None);
    }

    #[test]
    fn credentials_that_cannot_be_had_are_an_error() {
        let message = find(r#"{"auths": {"r.example:5000": {"auth": "%"}}}"#)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("r.example:5000") && message.contains("base64"),
            "{message}"
        );
        let message = find(r#"{"credsStore": "that-is-not-there"}"#)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("docker-credential-that-is-not-there"),
            "{message}"
        );
    }
}
