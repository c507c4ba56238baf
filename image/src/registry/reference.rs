//! Names of images in registries.

use std::fmt;
use std::str::FromStr;

use super::RegistryError;
use crate::definition::is_digest;

/// Name of an image: registry, repository, and a tag, a digest or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Host, with the port when there is one. There is no default registry.
    pub registry: String,
    /// Repository, such as `team/outrider`.
    pub repository: String,
    /// Tag.
    pub tag: Option<String>,
    /// Digest of the manifest, `sha256:…`.
    pub digest: Option<String>,
}

impl FromStr for Reference {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        let fault = |problem| RegistryError::Reference {
            text: text.to_owned(),
            problem,
        };
        let (registry, rest) = text.split_once('/').ok_or(fault("names no registry"))?;
        let is_host = !registry.is_empty()
            && registry
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte));
        if !is_host || !(registry.contains(['.', ':']) || registry == "localhost") {
            return Err(fault("names no registry"));
        }
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.to_owned())),
            None => (rest, None),
        };
        if digest.as_deref().is_some_and(|digest| !is_digest(digest)) {
            return Err(fault("has a digest that is not sha256: and 64 digits"));
        }
        let (repository, tag) = match rest.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag.to_owned())),
            None => (rest, None),
        };
        let is_part = |part: &str| {
            part.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
                && part.bytes().all(|byte| {
                    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte)
                })
        };
        if !repository.split('/').all(is_part) {
            return Err(fault("has a repository that can't be"));
        }
        let is_tag = |tag: &str| {
            (1..=128).contains(&tag.len())
                && !tag.starts_with(['.', '-'])
                && tag
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        if tag.as_deref().is_some_and(|tag| !is_tag(tag)) {
            return Err(fault("has a tag that can't be"));
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag,
            digest,
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(out, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(out, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl Reference {
    /// Whether the registry is on this machine.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        let host = host.trim_matches(['[', ']']);
        host == "localhost"
            || host
                .parse()
                .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_alike() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for text in [
            "127.0.0.1:5000/app",
            "[::1]:5000/a/b:v1.2",
            "registry.example/team/app:latest",
            &format!("localhost/app:v1@{digest}"),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), *text);
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "app",
            "library/app",
            "h.example/",
            "h.example/App",
            "h.example/a@sha256:1",
            "h.example/a:-x",
            "h.example/../a",
            "u@h.example/a",
        ] {
            text.parse::<Reference>().unwrap_err();
        }
    }

    #[test]
    fn only_loopback_is_loopback() {
        for (text, expected) in [
            ("127.0.0.1:5000/a", true),
            ("[::1]:5000/a", true),
            ("localhost:80/a", true),
            ("127.0.0.1.example/a", false),
            ("10.0.0.1:5000/a", false),
        ] {
            assert_eq!(
                text.parse::<Reference>().unwrap().is_loopback(),
                expected,
                "{text}"
            );
        }
    }
}
