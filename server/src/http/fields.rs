//! Reading a request body field by field, so that nothing in it is ignored.
//!
//! [`Fields`] owns one JSON object. Every accepted field is taken out of it by name and type; what is left at the end was not
//! expected and is refused. `null` is the same as leaving a field out.
//! Each broken rule is one variant of [`Rule`], reported with the path of the field, the value given and what is allowed.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::code::Code;

/// A field that breaks a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    /// Path of the field, such as `messages[0].content`.
    pub path: String,
    /// The rule it breaks.
    pub rule: Rule,
}

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// It must be given.
    Missing,
    /// It is not known.
    Unknown {
        /// The field that was probably meant.
        suggestion: Option<String>,
    },
    /// It is known, but not supported by this server.
    Unsupported,
    /// It has the wrong type.
    Type {
        /// The type it must have.
        expected: &'static str,
        /// The type it has.
        found: &'static str,
    },
    /// It is too small.
    TooSmall {
        /// Value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// It is too large.
    TooLarge {
        /// Value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// It is none of the values that are supported.
    Value {
        /// Value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A text or list is empty.
    Empty,
    /// A list has too many entries.
    TooMany {
        /// Entries given.
        given: usize,
        /// Most entries allowed.
        most: usize,
    },
    /// It does not go with another field.
    Conflict(&'static str),
}

impl Rule {
    /// The code that callers see.
    pub fn code(&self) -> Code {
        match self {
            Self::Missing => Code::MissingParameter,
            Self::Unknown { .. } => Code::UnknownParameter,
            Self::Unsupported => Code::UnsupportedParameter,
            Self::Type { .. } => Code::InvalidType,
            Self::TooSmall { .. } => Code::BelowMinimum,
            Self::TooLarge { .. } => Code::AboveMaximum,
            Self::Value { .. } => Code::UnsupportedValue,
            Self::Empty => Code::EmptyValue,
            Self::TooMany { .. } => Code::TooManyEntries,
            Self::Conflict(_) => Code::ConflictingParameters,
        }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match &self.rule {
            Rule::Missing => write!(f, "`{path}` is required"),
            Rule::Unknown { suggestion } => {
                write!(f, "`{path}` is not a known field")?;
                match suggestion {
                    Some(suggestion) => write!(f, "; did you mean `{suggestion}`?"),
                    None => Ok(()),
                }
            }
            Rule::Unsupported => {
                write!(f, "`{path}` is not supported by this server; leave it out")
            }
            Rule::Type { expected, found } => write!(f, "`{path}` must be {expected}, not {found}"),
            Rule::TooSmall { given, allowed }
            | Rule::TooLarge { given, allowed }
            | Rule::Value { given, allowed } => {
                write!(f, "`{path}` is {given}; it must be {allowed}")
            }
            Rule::Empty => write!(f, "`{path}` must not be empty"),
            Rule::TooMany { given, most } => write!(
                f,
                "`{path}` has {given} entries; at most {most} are allowed"
            ),
            Rule::Conflict(reason) => write!(f, "`{path}` {reason}"),
        }
    }
}

impl std::error::Error for FieldError {}

/// The result of reading a field.
pub type FieldResult<T> = Result<T, FieldError>;

/// The fields of one JSON object that have not been taken yet.
pub struct Fields {
    path: String,
    map: Map<String, Value>,
    taken: Vec<&'static str>,
}

impl Fields {
    /// The fields of the object at `path`; the empty path is the request body.
    pub fn of(value: Value, path: &str) -> FieldResult<Self> {
        match value {
            Value::Object(map) => Ok(Self {
                path: path.to_owned(),
                map,
                taken: Vec::new(),
            }),
            other => Err(wrong_type(path, "an object", &other)),
        }
    }

    /// Full path of the field `name`.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// The error that the field `name` breaks `rule`.
    pub fn error(&self, name: &str, rule: Rule) -> FieldError {
        FieldError {
            path: self.path(name),
            rule,
        }
    }

    /// Takes a field of any type.
    pub fn take(&mut self, name: &'static str) -> Option<Value> {
        self.taken.push(name);
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes `true` or `false`.
    pub fn flag(&mut self, name: &'static str) -> FieldResult<Option<bool>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_type(&self.path(name), "true or false", &other)),
        }
    }

    /// Takes a text.
    pub fn text(&mut self, name: &'static str) -> FieldResult<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// Takes a whole number within bounds; `1.0` is not one.
    pub fn integer(
        &mut self,
        name: &'static str,
        bounds: RangeInclusive<i64>,
    ) -> FieldResult<Option<i64>> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => integer(&self.path(name), &value, bounds).map(Some),
        }
    }

    /// Takes a count within bounds.
    pub fn count(
        &mut self,
        name: &'static str,
        bounds: RangeInclusive<u32>,
    ) -> FieldResult<Option<usize>> {
        let bounds = i64::from(*bounds.start())..=i64::from(*bounds.end());
        let value = self.integer(name, bounds)?;
        Ok(value.map(|value| usize::try_from(value).unwrap_or(usize::MAX)))
    }

    /// Takes a number within bounds.
    pub fn number(&mut self, name: &'static str, bounds: Bounds) -> FieldResult<Option<f32>> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => number(&self.path(name), &value, bounds).map(Some),
        }
    }

    /// Takes a list.
    pub fn list(&mut self, name: &'static str) -> FieldResult<Option<Vec<Value>>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong_type(&self.path(name), "a list", &other)),
        }
    }

    /// Takes an object.
    pub fn object(&mut self, name: &'static str) -> FieldResult<Option<Self>> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => Self::of(value, &self.path(name)).map(Some),
        }
    }

    /// Takes a field that has no effect here and is accepted only with a value that asks for none.
    pub fn only(&mut self, name: &'static str, allowed: &[Value]) -> FieldResult<()> {
        let Some(value) = self.take(name) else {
            return Ok(());
        };
        if allowed.contains(&value) {
            return Ok(());
        }
        if allowed.is_empty() {
            return Err(self.error(name, Rule::Unsupported));
        }
        let texts: Vec<String> = allowed.iter().map(Value::to_string).collect();
        Err(self.error(
            name,
            Rule::Value {
                given: shown(&value),
                allowed: format!("{} or left out", texts.join(", ")),
            },
        ))
    }

    /// Takes what is left as a free object.
    pub fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses what was not taken.
    pub fn finish(self) -> FieldResult<()> {
        let Some(name) = self.map.keys().next() else {
            return Ok(());
        };
        let suggestion = crate::config::suggestion(name, self.taken.iter().copied());
        Err(self.error(&shorten(name), Rule::Unknown { suggestion }))
    }
}

/// Bounds of a number.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    min: f64,
    max: f64,
    open_below: bool,
}

impl Bounds {
    /// From `min` to `max`, both allowed.
    pub const fn closed(min: f64, max: f64) -> Self {
        Self {
            min,
            max,
            open_below: false,
        }
    }

    /// Above `min` and up to `max`.
    pub const fn above(min: f64, max: f64) -> Self {
        Self {
            min,
            max,
            open_below: true,
        }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open_below {
            write!(f, "above {} and at most {}", self.min, self.max)
        } else {
            write!(f, "from {} to {}", self.min, self.max)
        }
    }
}

/// Magnitude from which on a number has no signed 64-bit form.
const BEYOND_64_BITS: f64 = 9_223_372_036_854_775_808.0;

/// Reads a whole number at `path`.
pub fn integer(path: &str, value: &Value, bounds: RangeInclusive<i64>) -> FieldResult<i64> {
    let Value::Number(number) = value else {
        return Err(wrong_type(path, "an integer", value));
    };
    let error = |rule| FieldError {
        path: path.to_owned(),
        rule,
    };
    let allowed = || match (*bounds.start(), *bounds.end()) {
        (i64::MIN, i64::MAX) => "a signed 64-bit integer".to_owned(),
        (start, i64::MAX) => format!("at least {start}"),
        (start, end) => format!("from {start} to {end}"),
    };
    let too_large = |number: &Number| {
        error(Rule::TooLarge {
            given: number.to_string(),
            allowed: allowed(),
        })
    };
    match number.as_i64() {
        Some(value) if value < *bounds.start() => Err(error(Rule::TooSmall {
            given: number.to_string(),
            allowed: allowed(),
        })),
        Some(value) if value > *bounds.end() => Err(too_large(number)),
        Some(value) => Ok(value),
        None if number.is_u64() => Err(too_large(number)),
        // A whole number beyond 64 bits reaches us as a decimal number, so nobody can tell which of both was written; it is out of bounds as either.
        None if number.as_f64().is_some_and(|value| value >= BEYOND_64_BITS) => {
            Err(too_large(number))
        }
        None if number
            .as_f64()
            .is_some_and(|value| value <= -BEYOND_64_BITS) =>
        {
            Err(error(Rule::TooSmall {
                given: number.to_string(),
                allowed: allowed(),
            }))
        }
        None => Err(error(Rule::Type {
            expected: "an integer",
            found: "a decimal number",
        })),
    }
}

/// Reads a number at `path`.
pub fn number(path: &str, value: &Value, bounds: Bounds) -> FieldResult<f32> {
    let Some(number) = value.as_f64() else {
        return Err(wrong_type(path, "a number", value));
    };
    let error = |rule| FieldError {
        path: path.to_owned(),
        rule,
    };
    // The bounds hold for the value that is used, which has single precision.
    let narrowed = number as f32;
    let used = f64::from(narrowed);
    if used < bounds.min || (bounds.open_below && used <= bounds.min) {
        let given = if number > bounds.min {
            format!("{value}, which is {narrowed} in single precision")
        } else {
            value.to_string()
        };
        return Err(error(Rule::TooSmall {
            given,
            allowed: bounds.to_string(),
        }));
    }
    if number > bounds.max {
        return Err(error(Rule::TooLarge {
            given: value.to_string(),
            allowed: bounds.to_string(),
        }));
    }
    Ok(narrowed)
}

/// The error that `value` has the wrong type.
pub fn wrong_type(path: &str, expected: &'static str, value: &Value) -> FieldError {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    FieldError {
        path: if path.is_empty() {
            "body".to_owned()
        } else {
            path.to_owned()
        },
        rule: Rule::Type { expected, found },
    }
}

/// A value as it is repeated in a message.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(list) if list.is_empty() => "[]".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        other => shorten(&other.to_string()),
    }
}

/// Keeps what a caller sent from filling an error message.
pub fn shorten(text: &str) -> String {
    const LONGEST: usize = 64;
    if text.chars().count() <= LONGEST {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(LONGEST).collect();
    short.push('…');
    short
}

/// A JSON value that refuses an object with the same key twice, where readers would differ on which one counts.
pub struct StrictJson(pub Value);

impl<'de> Deserialize<'de> for StrictJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strict;

        impl<'de> Visitor<'de> for Strict {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
                let number =
                    Number::from_f64(value).ok_or_else(|| E::custom("number out of range"))?;
                Ok(Value::Number(number))
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::String(value.to_owned()))
            }

            fn visit_string<E>(self, value: String) -> Result<Value, E> {
                Ok(Value::String(value))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(StrictJson(value)) = entries.next_element()? {
                    list.push(value);
                }
                Ok(Value::Array(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
                let mut map = Map::new();
                while let Some(key) = entries.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format_args!(
                            "the key `{}` is given twice",
                            shorten(&key)
                        )));
                    }
                    let StrictJson(value) = entries.next_value()?;
                    map.insert(key, value);
                }
                Ok(Value::Object(map))
            }
        }

        deserializer.deserialize_any(Strict).map(Self)
    }
}
