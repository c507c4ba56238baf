//! What can be wrong with a configuration, and how it is said.

use std::borrow::Cow;
use std::fmt;

use super::keys::Kind;
use super::layers::{LayerError, Origin};

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read as a layer.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Keys or values are wrong; every fault is listed.
    #[error("{}", list(.0))]
    Faults(Vec<Fault>),
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Dotted path of the key.
    pub path: String,
    /// The value as given; absent for unknown keys, whose values might be secrets, and for keys that are not set.
    pub value: Option<String>,
    /// Where the value came from.
    pub origin: Origin,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with one key.
#[derive(Clone, Debug, PartialEq)]
pub enum Problem {
    /// There is no such key.
    UnknownKey {
        /// The key that was probably meant.
        suggestion: Option<String>,
    },
    /// An environment variable that was meant to hold a value has a name that is not read.
    MisspeltVariable {
        /// The variable that was probably meant.
        suggestion: Option<String>,
    },
    /// The path names a group of keys, not a value.
    NotAGroup,
    /// The value is of the wrong type or out of range.
    NotAllowed {
        /// What is allowed.
        allowed: Kind,
    },
    /// The key must be set.
    Required,
    /// The key must be set because this other one is.
    RequiredWith(&'static str),
    /// The value does not go with another one.
    Conflict(&'static str),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path)?;
        let value = self.value.as_deref().map(without_credentials);
        let value = value.as_deref().unwrap_or("null");
        match &self.problem {
            Problem::UnknownKey { suggestion } => {
                f.write_str("unknown key")?;
                if let Some(suggestion) = suggestion {
                    write!(f, "; did you mean {suggestion}?")?;
                }
            }
            Problem::MisspeltVariable { suggestion } => {
                f.write_str(
                    "is not read: the variables of keys begin with OUTRIDER__ and have `__` between groups",
                )?;
                if let Some(suggestion) = suggestion {
                    write!(f, "; did you mean {suggestion}?")?;
                }
            }
            Problem::NotAGroup => write!(f, "is {value}, but it is a group of keys")?,
            Problem::NotAllowed { allowed } => write!(f, "is {value}, but it must be {allowed}")?,
            Problem::Required => f.write_str("is required")?,
            Problem::RequiredWith(other) => write!(f, "is required, because {other} is set")?,
            Problem::Conflict(reason) => match &self.value {
                Some(_) => write!(f, "is {value}, but {reason}")?,
                None => f.write_str(reason)?,
            },
        }
        match &self.origin {
            Origin::Default => Ok(()),
            origin => write!(f, " ({origin})"),
        }
    }
}

/// A value without the user and password of a URL, or of one that lacks its scheme, and without the query of one: logs and reports are read by many.
pub(super) fn without_credentials(value: &str) -> Cow<'_, str> {
    let scheme = value.find("://").map(|at| at + "://".len());
    // Without a scheme an `@` alone may be part of a name.
    let begin = scheme.unwrap_or(usize::from(value.starts_with('"')));
    let mut shown = match value[begin..].rsplit_once('@') {
        Some((credentials, rest)) if scheme.is_some() || credentials.contains(':') => {
            Cow::from(format!("{}…@{rest}", &value[..begin]))
        }
        _ => value.into(),
    };
    if scheme.is_some()
        && let Some(query) = shown.find('?')
    {
        let quote = if shown.ends_with('"') { "\"" } else { "" };
        shown = format!("{}?…{quote}", &shown[..query]).into();
    }
    shown
}

fn list(faults: &[Fault]) -> String {
    let lines: Vec<String> = faults.iter().map(|fault| format!("  {fault}")).collect();
    let plural = if faults.len() == 1 { "" } else { "s" };
    format!(
        "{} fault{plural} in the configuration:\n{}",
        faults.len(),
        lines.join("\n")
    )
}

/// The known name that `name` was probably meant to be.
pub fn suggestion<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let last = |path: &str| {
        path.trim_matches('"')
            .rsplit('.')
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    known
        .into_iter()
        .map(|candidate| {
            let whole = strsim::damerau_levenshtein(name, candidate);
            // A key under the wrong group is as near as a small misspelling.
            let moved = strsim::damerau_levenshtein(&last(name), &last(candidate)) + 1;
            (whole.min(moved), candidate)
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= 1 + last(name).len() / 4)
        .map(|(_, candidate)| candidate.to_owned())
}
