//! The report as one page that needs nothing beside it: style and charts are in it, there is no script, and it opens from a file.

use minijinja::{Environment, Value, context};
use serde::Serialize;
use serde_json::Value as Json;

use super::{Report, chart};
use crate::lossless::report::{Class, Difference};

const TEMPLATE: &str = include_str!("report.html");
/// Differences that are shown side by side; `report.json` has all of them.
const SHOWN_DIFFERENCES: usize = 50;

/// A difference as the page shows it.
#[derive(Serialize)]
struct Shown<'a> {
    difference: &'a Difference,
    /// What both texts begin with.
    common: &'a str,
    is_near_tie: bool,
}

/// The page.
///
/// # Errors
///
/// When the template does not fit the report, which the tests rule out.
pub fn render(report: &Report) -> anyhow::Result<String> {
    let mut environment = Environment::new();
    environment.add_template("report.html", TEMPLATE)?;
    let svg = |chart: Option<String>| chart.map(Value::from_safe_string);
    let perf = report.perf.as_ref();
    let acceptance = match (perf, &report.lossless) {
        (Some(perf), _) => chart::acceptance(
            perf.scenarios
                .iter()
                .map(|row| (row.scenario.as_str(), row.acceptance_length)),
        ),
        (None, Some(lossless)) => chart::acceptance(
            lossless
                .scenarios
                .iter()
                .map(|row| (row.scenario.as_str(), row.acceptance_length)),
        ),
        (None, None) => None,
    };
    let memory = report.soak.as_ref().and_then(|soak| soak.memory.as_ref());
    let differences = report
        .lossless
        .iter()
        .flat_map(|lossless| &lossless.differences);
    let differences: Vec<Shown<'_>> = differences.take(SHOWN_DIFFERENCES).map(shown).collect();
    let page = environment.get_template("report.html")?.render(context! {
        report => value(serde_json::to_value(report)?),
        steps => value(serde_json::to_value(report.steps())?),
        differences => value(serde_json::to_value(differences)?),
        ratios => svg(perf.and_then(chart::ratios)),
        speeds => svg(perf.and_then(chart::speeds)),
        acceptance => svg(acceptance),
        memory => svg(memory.and_then(chart::memory)),
        gate => serde_yaml::to_string(&report.gate)?,
    });
    Ok(page?)
}

/// JSON as a template sees it.
fn value(json: Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => flag.into(),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => number.as_f64().into(),
        },
        Json::String(text) => text.into(),
        Json::Array(values) => values.into_iter().map(value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.into_iter().map(|(name, field)| (name, value(field))))
        }
    }
}

fn shown(difference: &Difference) -> Shown<'_> {
    let reference = &difference.reference;
    let common = reference
        .full_text
        .len()
        .saturating_sub(reference.text.len());
    Shown {
        difference,
        // Where one side has no text, the answers have nothing in common.
        common: reference.full_text.get(..common).unwrap_or_default(),
        is_near_tie: difference.class == Class::NearTie,
    }
}
