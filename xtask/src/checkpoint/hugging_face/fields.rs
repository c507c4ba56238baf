//! A JSON object whose fields are taken out one by one, so that what nobody asked for is left over and can be refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value};

/// The fields of an object that nobody has taken yet.
pub struct Fields {
    /// Where the object is, for messages: a file, or a key of one.
    place: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The object in a file of the checkpoint.
    pub fn read(directory: &Path, name: &str) -> anyhow::Result<Fields> {
        let bytes = fs::read(directory.join(name)).with_context(|| name.to_string())?;
        let value =
            serde_json::from_slice(&bytes).with_context(|| format!("{name} is not JSON"))?;
        Fields::of(name.to_string(), value)
    }

    /// The object in a file of the checkpoint, `None` when there is no such file.
    pub fn read_optional(directory: &Path, name: &str) -> anyhow::Result<Option<Fields>> {
        if !directory.join(name).exists() {
            return Ok(None);
        }
        Fields::read(directory, name).map(Some)
    }

    /// An object without fields.
    pub fn empty(place: &str) -> Fields {
        Fields {
            place: place.to_owned(),
            map: Map::new(),
        }
    }

    fn of(place: String, value: Value) -> anyhow::Result<Fields> {
        match value {
            Value::Object(map) => Ok(Fields { place, map }),
            other => bail!("{place} is {other}, expected an object"),
        }
    }

    /// Where the object is.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Whether the key is there, be it null.
    pub fn contains(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Whether the key is there and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// A field as it is. Null means the same as no field.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    fn convert<T>(
        &mut self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> anyhow::Result<Option<T>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match convert(&value) {
            Some(converted) => Ok(Some(converted)),
            None => bail!("{}: {key} is {value}, expected {expected}", self.place),
        }
    }

    /// A number of things, from 0.
    pub fn size(&mut self, key: &str) -> anyhow::Result<Option<usize>> {
        self.convert(key, "a whole number from 0", as_size)
    }

    /// A number of things that has no default.
    pub fn required_size(&mut self, key: &str) -> anyhow::Result<usize> {
        self.size(key)?
            .with_context(|| format!("{}: {key} is missing", self.place))
    }

    /// A number.
    pub fn number(&mut self, key: &str) -> anyhow::Result<Option<f64>> {
        self.convert(key, "a number", Value::as_f64)
    }

    /// A number that has no default.
    pub fn required_number(&mut self, key: &str) -> anyhow::Result<f64> {
        self.number(key)?
            .with_context(|| format!("{}: {key} is missing", self.place))
    }

    /// A boolean.
    pub fn flag(&mut self, key: &str) -> anyhow::Result<Option<bool>> {
        self.convert(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn text(&mut self, key: &str) -> anyhow::Result<Option<String>> {
        self.convert(key, "a string", |value| value.as_str().map(str::to_string))
    }

    /// A list of strings.
    pub fn texts(&mut self, key: &str) -> anyhow::Result<Option<Vec<String>>> {
        self.convert(key, "a list of strings", |value| {
            value
                .as_array()?
                .iter()
                .map(|text| text.as_str().map(str::to_string))
                .collect()
        })
    }

    /// An object.
    pub fn object(&mut self, key: &str) -> anyhow::Result<Option<Fields>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        Fields::of(format!("{}: {key}", self.place), value).map(Some)
    }

    /// What nobody has taken, without nulls and the keys in `harmless`.
    pub fn leftover(self, harmless: &[&str]) -> BTreeMap<String, Value> {
        let left = self.map.into_iter();
        left.filter(|(key, value)| !value.is_null() && !harmless.contains(&key.as_str()))
            .collect()
    }

    /// Refuses everything that is left.
    pub fn finish(self) -> anyhow::Result<()> {
        let place = self.place.clone();
        let left = describe(&self.leftover(&[]));
        ensure!(
            left.is_empty(),
            "{place} has settings that are not supported: {left}"
        );
        Ok(())
    }
}

/// Settings for a message.
pub fn describe(settings: &BTreeMap<String, Value>) -> String {
    let settings = settings
        .iter()
        .map(|(key, value)| format!("{key} = {value}"));
    settings.collect::<Vec<_>>().join(", ")
}

/// A whole number from 0, however JSON writes it.
pub fn as_size(value: &Value) -> Option<usize> {
    if let Some(size) = value.as_u64() {
        return size.try_into().ok();
    }
    let number = value.as_f64()?;
    (number.fract() == 0.0 && (0.0..=u32::MAX.into()).contains(&number)).then_some(number as usize)
}
