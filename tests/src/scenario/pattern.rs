//! Patterns of scenarios: what an answer must look like.

use serde_json::{Map, Value};

/// Whether `value` (`None` where there is none) matches; else where it does not, and why.
pub fn matches(
    pattern: &Value,
    value: Option<&Value>,
    saved: &Map<String, Value>,
) -> Result<(), String> {
    if let Some((operator, argument)) = operator(pattern) {
        return apply(operator, argument, value, saved);
    }
    let Some(value) = value else {
        return Err(format!(": nothing there, expected {pattern}"));
    };
    match (pattern, value) {
        (Value::Object(patterns), Value::Object(map)) => {
            for (key, pattern) in patterns {
                matches(pattern, map.get(key), saved)
                    .map_err(|mismatch| format!(".{key}{mismatch}"))?;
            }
            Ok(())
        }
        (Value::Array(patterns), Value::Array(entries)) => {
            if patterns.len() != entries.len() {
                return Err(format!(
                    ": {} entries, expected {}",
                    entries.len(),
                    patterns.len()
                ));
            }
            for (index, (pattern, entry)) in patterns.iter().zip(entries).enumerate() {
                matches(pattern, Some(entry), saved)
                    .map_err(|mismatch| format!(".{index}{mismatch}"))?;
            }
            Ok(())
        }
        (pattern, value) if equal(pattern, value) => Ok(()),
        (pattern, value) => Err(format!(": {value}, expected {pattern}")),
    }
}

/// The operator of a pattern that is a map with one key that begins with `$`.
fn operator(pattern: &Value) -> Option<(&str, &Value)> {
    let map = pattern.as_object().filter(|map| map.len() == 1)?;
    let (name, argument) = map.iter().next()?;
    name.starts_with('$').then_some((name.as_str(), argument))
}

fn apply(
    operator: &str,
    argument: &Value,
    value: Option<&Value>,
    saved: &Map<String, Value>,
) -> Result<(), String> {
    let verdict = match operator {
        "$absent" => value.is_none() && *argument == true,
        "$not" => matches(argument, value, saved).is_err(),
        "$all" => {
            let patterns = argument
                .as_array()
                .filter(|patterns| !patterns.is_empty())
                .ok_or_else(|| malformed(operator, argument))?;
            return patterns
                .iter()
                .try_for_each(|pattern| matches(pattern, value, saved));
        }
        _ => {
            let Some(value) = value else {
                return Err(format!(": nothing there, expected {operator} {argument}"));
            };
            match operator {
                "$saved" => {
                    let known = argument.as_str().and_then(|name| saved.get(name));
                    equal(known.ok_or_else(|| malformed(operator, argument))?, value)
                }
                "$type" => {
                    has_type(value, argument).ok_or_else(|| malformed(operator, argument))?
                }
                "$contains" | "$lacks" | "$starts" => {
                    let part = argument
                        .as_str()
                        .ok_or_else(|| malformed(operator, argument))?;
                    value.as_str().is_some_and(|text| match operator {
                        "$contains" => text.contains(part),
                        "$lacks" => !text.contains(part),
                        _ => text.starts_with(part),
                    })
                }
                "$length" => {
                    let length = match value {
                        Value::String(text) => Some(text.chars().count()),
                        Value::Array(entries) => Some(entries.len()),
                        _ => None,
                    };
                    let expected = argument
                        .as_u64()
                        .ok_or_else(|| malformed(operator, argument))?;
                    length.is_some_and(|length| length as u64 == expected)
                }
                "$between" => {
                    let bounds: Option<Vec<f64>> = argument
                        .as_array()
                        .and_then(|bounds| bounds.iter().map(Value::as_f64).collect());
                    let Some(&[least, most]) = bounds.as_deref() else {
                        return Err(malformed(operator, argument));
                    };
                    value
                        .as_f64()
                        .is_some_and(|number| (least..=most).contains(&number))
                }
                "$each" => {
                    let Some(entries) = value.as_array().filter(|entries| !entries.is_empty())
                    else {
                        return Err(format!(": {value}, expected a list that is not empty"));
                    };
                    for (index, entry) in entries.iter().enumerate() {
                        matches(argument, Some(entry), saved)
                            .map_err(|mismatch| format!(".{index}{mismatch}"))?;
                    }
                    true
                }
                _ => return Err(malformed(operator, argument)),
            }
        }
    };
    if verdict {
        return Ok(());
    }
    let shown = value.map_or_else(|| "nothing there".to_owned(), Value::to_string);
    Err(format!(": {shown}, expected {operator} {argument}"))
}

fn malformed(operator: &str, argument: &Value) -> String {
    format!(": the pattern {operator} {argument} is not of the format")
}

fn has_type(value: &Value, name: &Value) -> Option<bool> {
    Some(match name.as_str()? {
        "text" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "list" => value.is_array(),
        "map" => value.is_object(),
        _ => return None,
    })
}

/// Equality that counts numbers by value, whatever they were written as.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a == b
                || a.as_f64()
                    .is_some_and(|a| b.as_f64() == Some(a) && a.fract() == 0.0 && a.abs() < 1e15)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| equal(a, b)))
        }
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pattern_matches_what_its_description_says_and_nothing_else() {
        let saved = Map::from_iter([("ids".to_owned(), json!([1, 2]))]);
        let value = json!({ "text": "grüße", "list": [1, 2], "empty": [], "one": 1.0, "null": null, "map": { "inner": true } });
        let check = |pattern: Value, expected: bool| {
            let found = matches(&pattern, Some(&value), &saved);
            assert_eq!(found.is_ok(), expected, "{pattern}: {found:?}");
        };
        check(json!({}), true);
        check(json!({ "one": 1, "map": {} }), true);
        check(json!({ "one": 2 }), false);
        check(json!({ "one": "1" }), false);
        check(json!({ "null": null }), true);
        check(json!({ "missing": null }), false);
        check(json!({ "missing": { "$absent": true } }), true);
        check(json!({ "null": { "$absent": true } }), false);
        check(json!({ "list": [1, 2] }), true);
        check(json!({ "list": [1] }), false);
        check(json!({ "list": [2, 1] }), false);
        check(json!({ "list": { "$saved": "ids" } }), true);
        check(json!({ "empty": { "$saved": "ids" } }), false);
        check(json!({ "list": { "$saved": "unknown" } }), false);
        check(json!({ "text": { "$contains": "rüß" } }), true);
        check(json!({ "text": { "$contains": "x" } }), false);
        check(json!({ "list": { "$contains": "1" } }), false);
        check(json!({ "text": { "$lacks": "x" } }), true);
        check(json!({ "text": { "$lacks": "g" } }), false);
        check(json!({ "list": { "$lacks": "x" } }), false);
        check(json!({ "text": { "$starts": "gr" } }), true);
        check(json!({ "text": { "$starts": "ü" } }), false);
        check(
            json!({ "text": { "$length": 5 }, "list": { "$length": 2 } }),
            true,
        );
        check(json!({ "text": { "$length": 7 } }), false);
        check(json!({ "one": { "$length": 1 } }), false);
        check(json!({ "one": { "$between": [1, 2] } }), true);
        check(json!({ "one": { "$between": [1.5, 2] } }), false);
        check(json!({ "list": { "$each": { "$between": [1, 2] } } }), true);
        check(json!({ "list": { "$each": 1 } }), false);
        check(json!({ "empty": { "$each": 1 } }), false);
        check(json!({ "list": { "$not": [1] } }), true);
        check(json!({ "list": { "$not": [1, 2] } }), false);
        check(
            json!({ "text": { "$all": [{ "$contains": "g" }, { "$contains": "ß" }] } }),
            true,
        );
        check(
            json!({ "text": { "$all": [{ "$contains": "g" }, { "$contains": "x" }] } }),
            false,
        );
        check(json!({ "text": { "$all": [] } }), false);
        check(
            json!({ "text": { "$type": "text" }, "list": { "$type": "list" }, "map": { "$type": "map" } }),
            true,
        );
        check(json!({ "one": { "$type": "number" } }), true);
        check(json!({ "one": { "$type": "integer" } }), false);
        check(json!({ "null": { "$type": "text" } }), false);
        check(json!({ "text": { "$type": "unknown" } }), false);
        check(json!({ "text": { "$unknown": 1 } }), false);
    }

    #[test]
    fn large_numbers_are_not_taken_for_their_neighbours() {
        assert!(!equal(
            &json!(9_007_199_254_740_993_u64),
            &json!(9_007_199_254_740_992_u64)
        ));
        assert!(equal(&json!(3), &json!(3.0)));
        assert!(equal(&json!(u64::MAX), &json!(u64::MAX)));
    }
}
