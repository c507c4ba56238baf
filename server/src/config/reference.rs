//! Configurations as text: the effective one, and the reference file with every key.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde_yaml::{Mapping, Value};

use super::fault::without_credentials;
use super::keys::{Default, KEYS, Key};
use super::{Scalar, Setting, default_of};

/// Settings as YAML.
pub(super) fn effective(settings: &[Setting]) -> String {
    serde_yaml::to_string(&nested(settings, whole)).unwrap_or_default()
}

/// Settings as one line of JSON, without what is secret in a URL.
pub(super) fn effective_json(settings: &[Setting]) -> String {
    serde_json::to_string(&nested(settings, without_credentials)).unwrap_or_default()
}

fn whole(text: &str) -> Cow<'_, str> {
    text.into()
}

/// Settings in their groups, texts as `shown` has them.
fn nested(settings: &[Setting], shown: fn(&str) -> Cow<'_, str>) -> Mapping {
    let mut root = Mapping::new();
    for setting in settings {
        let value = setting.value.as_ref().map(|scalar| yaml(scalar, shown));
        let value = value.unwrap_or(Value::Null);
        let mut group = &mut root;
        let mut parts = setting.key.path.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                group.insert(part.into(), value);
                break;
            }
            let inner = group
                .entry(part.into())
                .or_insert_with(|| Value::Mapping(Mapping::new()));
            let Value::Mapping(inner) = inner else { break };
            group = inner;
        }
    }
    root
}

fn yaml(scalar: &Scalar, shown: fn(&str) -> Cow<'_, str>) -> Value {
    match scalar {
        Scalar::Flag(flag) => Value::Bool(*flag),
        Scalar::Text(text) => Value::String(shown(text).into_owned()),
        Scalar::Integer(value) => Value::Number((*value).into()),
        Scalar::Share(value) => Value::Number((*value).into()),
    }
}

/// The text of `configs/server.yaml`: every key with its meaning, its values and its default.
pub fn reference() -> String {
    let mut text = String::from(
        "# Every key of the server's configuration, with its default.\n\
         # Later layers win: this file, then environment variables such as OUTRIDER__SERVING__RUNTIME__MAX_CONCURRENCY=8,\n\
         # then flags such as --set serving.runtime.max_concurrency=8.\n\
         # SIGHUP reads all of it again; a fault, or a change of a key without `SIGHUP applies a change`, refuses the whole.\n\
         # Print what holds in the end, or every fault, with: outrider-server --config FILE --check-config\n",
    );
    let mut open: Vec<&str> = Vec::new();
    for key in KEYS {
        let mut groups: Vec<&str> = key.path.split('.').collect();
        let name = groups.pop().unwrap_or_default();
        let shared = open.iter().zip(&groups).take_while(|(a, b)| a == b).count();
        open.truncate(shared);
        for group in &groups[shared..] {
            let indent = "  ".repeat(open.len());
            let _ = writeln!(text, "{indent}{group}:");
            open.push(group);
        }
        let opens_a_group = shared < groups.len();
        if !opens_a_group {
            text.push('\n');
        }
        describe(&mut text, key, name, open.len());
    }
    text
}

fn describe(text: &mut String, key: &Key, name: &str, depth: usize) {
    let indent = "  ".repeat(depth);
    for line in key.help.lines() {
        let _ = writeln!(text, "{indent}# {line}");
    }
    let changes = if key.changes_while_running() {
        " SIGHUP applies a change."
    } else {
        ""
    };
    let _ = match key.default {
        Default::Value(_) => {
            let value = default_of(key)
                .map(|scalar| serde_yaml::to_string(&yaml(&scalar, whole)).unwrap_or_default());
            writeln!(
                text,
                "{indent}# Value: {}.{changes}\n{indent}{name}: {}",
                key.kind,
                value.unwrap_or_default().trim_end()
            )
        }
        Default::Unset(meaning) => writeln!(
            text,
            "{indent}# Value: {}. Not set: {meaning}.{changes}\n{indent}# {name}:",
            key.kind
        ),
    };
}
