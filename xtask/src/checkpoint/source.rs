//! Where a checkpoint came from: names, digests and licences of its files.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::Context;
use outrider_bundle::manifest::Source;
use sha2::{Digest, Sha256};

/// Describes a weight file; reads it once from end to end.
pub fn describe(path: &Path, licence: Option<String>) -> anyhow::Result<Source> {
    let name = path
        .file_name()
        .with_context(|| format!("{} has no file name", path.display()))?
        .to_string_lossy()
        .into_owned();
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut hasher = Hasher(Sha256::new());
    io::copy(&mut file, &mut hasher).with_context(|| path.display().to_string())?;
    Ok(Source {
        name,
        sha256: hex::encode(hasher.0.finalize()),
        licence,
    })
}

struct Hasher(Sha256);

impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The SPDX expression of a licence tag as model hubs and GGUF metadata write it; `None` when the tag says nothing.
pub fn spdx(tag: &str) -> Option<String> {
    let tag = tag.trim();
    let known = match tag.to_ascii_lowercase().as_str() {
        "" | "other" | "unknown" => return None,
        "apache-2.0" => "Apache-2.0",
        "mit" => "MIT",
        "bsd-2-clause" => "BSD-2-Clause",
        "bsd-3-clause" => "BSD-3-Clause",
        "cc0-1.0" => "CC0-1.0",
        "cc-by-4.0" => "CC-BY-4.0",
        "cc-by-sa-4.0" => "CC-BY-SA-4.0",
        "cc-by-nc-4.0" => "CC-BY-NC-4.0",
        "cc-by-nc-sa-4.0" => "CC-BY-NC-SA-4.0",
        "gpl-3.0" => "GPL-3.0-only",
        "agpl-3.0" => "AGPL-3.0-only",
        _ => {
            let reference: String = tag
                .chars()
                .map(|c| {
                    if c.is_ascii_alphanumeric() || c == '.' {
                        c
                    } else {
                        '-'
                    }
                })
                .collect();
            return Some(format!("LicenseRef-{reference}"));
        }
    };
    Some(known.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_tag_becomes_an_spdx_expression() {
        for (tag, expected) in [
            ("apache-2.0", Some("Apache-2.0")),
            ("MIT", Some("MIT")),
            ("llama3.1", Some("LicenseRef-llama3.1")),
            ("my own licence", Some("LicenseRef-my-own-licence")),
            ("other", None),
            ("", None),
        ] {
            assert_eq!(spdx(tag).as_deref(), expected, "{tag}");
        }
    }

    #[test]
    fn a_source_carries_the_digest_of_the_whole_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights.bin");
        std::fs::write(&path, "abc").unwrap();
        let source = describe(&path, None).unwrap();
        assert_eq!(source.name, "weights.bin");
        assert_eq!(
            source.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
