//! Where values come from: the file, the environment, the flags, each as a figment provider.
//!
//! Environment variables and flags carry text; it is read by the key's own kind, so a model called `1.0` stays text.

use std::path::{Path, PathBuf};

use figment::value::{Dict, Map, Tag, Value};
use figment::{Metadata, Profile, Provider, Source};

use crate::small_file;

/// Prefix of the environment variables that hold configuration values.
pub const ENVIRONMENT_PREFIX: &str = "OUTRIDER__";

/// What variables begin with that were meant to hold values, but miss an underscore.
const MISSPELT_PREFIX: &str = "OUTRIDER_SERVING";

/// Name of the metadata of values that carry text, not typed values.
const ENVIRONMENT: &str = "environment";
const FLAGS: &str = "flags";

/// One layer of values.
pub struct Layer {
    metadata: Metadata,
    values: Dict,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        self.metadata.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

/// Why a layer could not be read at all.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not YAML, or gives a key twice.
    #[error("the configuration file {} is not valid YAML: {reason}", path.display())]
    NotYaml {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// The file holds something other than keys and values.
    #[error("the configuration file {} must hold keys and values, such as `serving:`", path.display())]
    NotAMapping {
        /// The file.
        path: PathBuf,
    },
}

impl Layer {
    /// The values of a YAML file.
    pub fn file(path: &Path) -> Result<Self, LayerError> {
        let text = small_file::read_text(path).map_err(|source| LayerError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        let yaml: serde_yaml::Value =
            serde_yaml::from_str(&text).map_err(|error| LayerError::NotYaml {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
        let not_a_mapping = || LayerError::NotAMapping {
            path: path.to_owned(),
        };
        let values = match Value::serialize(&yaml).map_err(|_| not_a_mapping())? {
            Value::Dict(_, values) => values,
            Value::Empty(..) => Dict::new(),
            _ => return Err(not_a_mapping()),
        };
        Ok(Self {
            metadata: Metadata::from("file", Source::File(path.to_owned())),
            values,
        })
    }

    /// The values, in their groups.
    pub fn values(&self) -> &Dict {
        &self.values
    }

    /// Where a key of this layer came from.
    pub fn origin(&self, path: &str) -> Origin {
        Origin::of(Some(&self.metadata), path)
    }

    /// The variables that start with [`ENVIRONMENT_PREFIX`]; `__` separates the parts of a key, in any case.
    pub fn environment(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let settings = variables.into_iter().filter_map(|(name, value)| {
            let key = name.strip_prefix(ENVIRONMENT_PREFIX)?;
            Some((key.to_lowercase().replace("__", "."), value))
        });
        Self::of_text(ENVIRONMENT, settings)
    }

    /// Names of variables that were meant to hold a value of a key, but have another prefix and so are not read.
    pub fn misspelt(variables: &[(String, String)]) -> impl Iterator<Item = &str> {
        variables
            .iter()
            .map(|(name, _)| name.as_str())
            .filter(|name| {
                name.starts_with(MISSPELT_PREFIX) && !name.starts_with(ENVIRONMENT_PREFIX)
            })
    }

    /// Values given on the command line, by the dotted path of their key; a later one wins.
    pub fn flags(settings: impl IntoIterator<Item = (String, String)>) -> Self {
        Self::of_text(FLAGS, settings)
    }

    fn of_text(name: &'static str, settings: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut values = Dict::new();
        for (path, text) in settings {
            insert(&mut values, &path, text);
        }
        Self {
            metadata: Metadata::named(name),
            values,
        }
    }
}

fn insert(values: &mut Dict, path: &str, text: String) {
    match path.split_once('.') {
        None => {
            values.insert(path.to_owned(), Value::String(Tag::Default, text));
        }
        Some((head, rest)) => {
            let inner = values
                .entry(head.to_owned())
                .or_insert_with(|| Value::Dict(Tag::Default, Dict::new()));
            if !matches!(inner, Value::Dict(..)) {
                *inner = Value::Dict(Tag::Default, Dict::new());
            }
            if let Value::Dict(_, inner) = inner {
                insert(inner, rest, text);
            }
        }
    }
}

/// The environment variable of a key.
pub(super) fn variable_of(path: &str) -> String {
    format!(
        "{ENVIRONMENT_PREFIX}{}",
        path.replace('.', "__").to_uppercase()
    )
}

/// Where the value of a key came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No layer set it.
    Default,
    /// A configuration file.
    File(PathBuf),
    /// The environment variable that belongs to the key.
    Environment(String),
    /// A command-line flag.
    Flag,
}

impl Origin {
    pub(super) fn of(metadata: Option<&Metadata>, path: &str) -> Self {
        match metadata {
            Some(metadata) if metadata.name == ENVIRONMENT => Self::Environment(variable_of(path)),
            Some(metadata) if metadata.name == FLAGS => Self::Flag,
            Some(metadata) => match metadata.source.as_ref().and_then(Source::file_path) {
                Some(file) => Self::File(file.to_owned()),
                None => Self::Default,
            },
            None => Self::Default,
        }
    }

    /// Whether the value is text that the key's kind must read.
    pub(super) fn carries_text(&self) -> bool {
        matches!(self, Self::Environment(_) | Self::Flag)
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(variable) => write!(f, "environment variable {variable}"),
            Self::Flag => f.write_str("command line"),
        }
    }
}
