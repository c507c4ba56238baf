//! Keys of callers and of operators: the file they are listed in, and the search for a secret among them.
//!
//! A file has one key a line: the name of whoever uses it, and the lower-case hexadecimal SHA-256 of the secret.
//! The secrets themselves are in no file of the server and in no message. They must be random, since a plain hash of a text that people choose can
//! be guessed; [`generate`] makes one, and [`line_of`] refuses short ones.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use crate::small_file;

/// Longest name of a key.
const MAX_NAME_BYTES: usize = 64;

/// Shortest secret that [`line_of`] takes: 128 bits as hexadecimal digits.
const MIN_SECRET_BYTES: usize = 32;

/// Random bytes of a secret that [`generate`] makes.
const SECRET_RANDOM_BYTES: usize = 32;

/// What a generated secret begins with, so that scanners for leaked secrets find it.
const SECRET_PREFIX: &str = "outrider-";

/// The keys of one file.
#[derive(Clone)]
pub struct KeyRing {
    keys: Vec<Key>,
}

#[derive(Clone)]
struct Key {
    name: Arc<str>,
    digest: [u8; 32],
}

/// Says how many keys there are, and not which.
impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyRing of {}", self.keys.len())
    }
}

/// Why a file of keys can't be used. No message repeats what stands in the file, since it might be a secret.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file can't be read.
    #[error("cannot read the keys in {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Anyone on the machine can add a key.
    #[error("the keys in {} can be changed by every user of this machine: its mode is {mode:03o}, which must not let others write", path.display())]
    Writable {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A line is not a key.
    #[error("the keys in {}, line {line}: {fault}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        fault: LineFault,
    },
    /// The file has no key, so that nobody could call.
    #[error("there is no key in {}; it must have one at least", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with one line of a file of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineFault {
    /// There are more or fewer than two words.
    #[error("must be a name, a space and the SHA-256 of the secret")]
    Shape,
    /// The name has other characters, or is too long.
    #[error("the name must be 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` and `.`")]
    Name,
    /// The second word is not a digest.
    #[error("the SHA-256 of the secret must be 64 lower-case hexadecimal digits")]
    Digest,
    /// The secret is that of an earlier line.
    #[error("the same secret is in line {0} already")]
    Twice(usize),
}

/// Why a key can't be made.
#[derive(Debug, thiserror::Error)]
pub enum NewKeyError {
    /// The name has other characters, or is too long.
    #[error("the name of a key must be 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` and `.`")]
    Name,
    /// The secret is one that could be guessed.
    #[error("the secret has {bytes} bytes; it must have {MIN_SECRET_BYTES} or more, and be random")]
    Short {
        /// Its length.
        bytes: usize,
    },
    /// The secret can't be sent in a header.
    #[error("the secret must be visible ASCII characters without spaces")]
    Characters,
    /// The system gave no random bytes.
    #[error("the system gave no random bytes: {0}")]
    Random(String),
}

impl KeyRing {
    /// The keys of a file.
    ///
    /// # Errors
    ///
    /// The file can't be read, can be changed by everyone, has a line that is not a key, or has no key.
    pub fn read(path: &Path) -> Result<Self, KeyFileError> {
        let unreadable = |source| KeyFileError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let mode = small_file::mode(path).map_err(unreadable)?;
        if mode & small_file::OTHERS_WRITE != 0 {
            return Err(KeyFileError::Writable {
                path: path.to_owned(),
                mode,
            });
        }
        if mode & small_file::OTHERS_READ != 0 {
            tracing::warn!(
                path = %path.display(),
                mode = format_args!("{mode:03o}"),
                "every user of this machine can read the hashes of the keys"
            );
        }
        let text = small_file::read_text(path).map_err(unreadable)?;
        let ring = Self::parse(&text).map_err(|(line, fault)| KeyFileError::Line {
            path: path.to_owned(),
            line,
            fault,
        })?;
        if ring.keys.is_empty() {
            return Err(KeyFileError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(ring)
    }

    /// The keys in the text of a file; the error has the number of its line.
    fn parse(text: &str) -> Result<Self, (usize, LineFault)> {
        let mut keys: Vec<Key> = Vec::new();
        let mut lines: Vec<usize> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let key = Key::parse(line).map_err(|fault| (number, fault))?;
            if let Some(earlier) = keys.iter().position(|other| other.digest == key.digest) {
                return Err((number, LineFault::Twice(lines[earlier])));
            }
            keys.push(key);
            lines.push(number);
        }
        Ok(Self { keys })
    }

    /// Keys in the ring.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The name of the key with this secret.
    ///
    /// Every key is compared, each in constant time, so that the time taken tells nothing about the keys.
    pub fn name_of(&self, secret: &[u8]) -> Option<Arc<str>> {
        let digest = digest_of(secret);
        let mut found = u64::MAX;
        for (index, key) in (0_u64..).zip(&self.keys) {
            found.conditional_assign(&index, key.digest.ct_eq(&digest));
        }
        let key = self.keys.get(usize::try_from(found).ok()?)?;
        Some(key.name.clone())
    }
}

impl Key {
    fn parse(line: &str) -> Result<Self, LineFault> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [name, digest] = words[..] else {
            return Err(LineFault::Shape);
        };
        if !is_name(name) {
            return Err(LineFault::Name);
        }
        let mut bytes = [0; 32];
        let is_lower = !digest.bytes().any(|byte| byte.is_ascii_uppercase());
        if !is_lower || hex::decode_to_slice(digest, &mut bytes).is_err() {
            return Err(LineFault::Digest);
        }
        Ok(Self {
            name: name.into(),
            digest: bytes,
        })
    }
}

/// The line that lists `secret` under `name`.
///
/// # Errors
///
/// The name or the secret is not one that can be used.
pub fn line_of(name: &str, secret: &str) -> Result<String, NewKeyError> {
    if !is_name(name) {
        return Err(NewKeyError::Name);
    }
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(NewKeyError::Characters);
    }
    if secret.len() < MIN_SECRET_BYTES {
        return Err(NewKeyError::Short {
            bytes: secret.len(),
        });
    }
    Ok(format!(
        "{name} {}",
        hex::encode(digest_of(secret.as_bytes()))
    ))
}

/// A new random secret, of 256 bits.
///
/// # Errors
///
/// The system has no random bytes to give.
pub fn generate() -> Result<String, NewKeyError> {
    let mut bytes = [0; SECRET_RANDOM_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| NewKeyError::Random(error.to_string()))?;
    Ok(format!("{SECRET_PREFIX}{}", hex::encode(bytes)))
}

fn digest_of(secret: &[u8]) -> [u8; 32] {
    Sha256::digest(secret).into()
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn secret(character: char) -> String {
        String::from(character).repeat(MIN_SECRET_BYTES)
    }

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn a_secret_is_found_by_itself_and_by_nothing_else() {
        let text = format!(
            "# keys of the test\n\n  {}  \n{}\n{}\n",
            line_of("alice", &secret('a')).unwrap(),
            line_of("bob", &secret('b')).unwrap(),
            // The second secret of one caller, while the first is being replaced.
            line_of("alice", &secret('c')).unwrap(),
        );
        let (_dir, path) = file(&text, 0o640);
        let ring = KeyRing::read(&path).unwrap();
        assert_eq!(ring.len(), 3);
        let name = |secret: &str| {
            ring.name_of(secret.as_bytes())
                .map(|name| name.as_ref().to_owned())
        };
        assert_eq!(name(&secret('a')).as_deref(), Some("alice"));
        assert_eq!(name(&secret('b')).as_deref(), Some("bob"));
        assert_eq!(name(&secret('c')).as_deref(), Some("alice"));
        let longer = secret('a') + "a";
        let hash = hex::encode(digest_of(secret('a').as_bytes()));
        for other in ["", "alice", &secret('d'), &longer, &longer[2..], &hash] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_its_line_and_without_its_text() {
        let good = line_of("alice", &secret('a')).unwrap();
        let digest = good.split(' ').nth(1).unwrap();
        let cases = [
            "alice my-secret-in-plain-text".to_owned(),
            "my-secret-in-plain-text".to_owned(),
            format!("alice {digest} my-secret-in-plain-text"),
            format!("my:secret:in:plain:text {digest}"),
            format!("{} {digest}", "x".repeat(65)),
            format!("alice {}", digest.to_uppercase()),
            format!("alice {}", &digest[2..]),
            format!("alice {digest}00"),
            format!("{good}\nbob {digest}"),
        ];
        let mut table = String::new();
        for text in cases {
            let (dir, path) = file(&format!("# a comment\n{text}\n"), 0o600);
            let error = KeyRing::read(&path).unwrap_err().to_string();
            assert!(
                !error.contains("plain") && !error.contains(digest),
                "{error}"
            );
            let directory = format!("{}/", dir.path().display());
            table.push_str(&format!("{}\n", error.replace(&directory, "")));
        }
        for (text, mode) in [("", 0o600), ("# nothing\n", 0o600), (&good, 0o602)] {
            let (dir, path) = file(text, mode);
            let directory = format!("{}/", dir.path().display());
            let error = KeyRing::read(&path).unwrap_err().to_string();
            table.push_str(&format!("{}\n", error.replace(&directory, "")));
        }
        table.push_str(&format!(
            "{}\n",
            KeyRing::read(Path::new("nowhere/keys")).unwrap_err()
        ));
        insta::assert_snapshot!(table);
    }

    #[test]
    fn only_secrets_that_cannot_be_guessed_are_taken() {
        assert!(matches!(
            line_of("alice", "password"),
            Err(NewKeyError::Short { bytes: 8 })
        ));
        for secret in [secret(' '), secret('é'), secret('\n')] {
            assert!(matches!(
                line_of("alice", &secret),
                Err(NewKeyError::Characters)
            ));
        }
        assert!(matches!(
            line_of("a b", &secret('a')),
            Err(NewKeyError::Name)
        ));
        let (one, other) = (generate().unwrap(), generate().unwrap());
        assert_ne!(one, other);
        assert!(line_of("alice", &one).is_ok());
    }
}
