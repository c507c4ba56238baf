//! Lists of checks: each is a function that returns evidence, or says why it has none.

use serde_json::Value;

use crate::client::{ClientError, Response};
use crate::report::{Check, Outcome, chain};
use crate::service::CouldNotRun;
use crate::wire::{Generation, ShapeError, error_of, shorten};

/// Runs checks in order, each given as name, what a right service does, and outcome; says why it ended before the last one, when it did.
///
/// The iterator makes a check when it is asked for the next one, so nothing runs behind one that could not.
pub fn run(
    outcomes: impl Iterator<Item = (&'static str, &'static str, Result<String, Stop>)>,
) -> (Vec<Check>, Option<String>) {
    let mut checks = Vec::new();
    for (name, expected, outcome) in outcomes {
        let (outcome, actual) = match outcome {
            Ok(actual) => (Outcome::Pass, actual),
            Err(Stop::Fail(actual)) => (Outcome::Fail, actual),
            Err(Stop::Skip(why)) => (Outcome::Skip, why),
            Err(Stop::CouldNotRun(why)) => return (checks, Some(format!("{name}: {why}"))),
        };
        checks.push(Check {
            name,
            outcome,
            expected: expected.to_owned(),
            actual,
        });
    }
    (checks, None)
}

/// Why a check has no evidence of success.
pub enum Stop {
    /// What was found instead.
    Fail(String),
    /// What the service lacks.
    Skip(String),
    /// There is nothing to judge.
    CouldNotRun(String),
}

impl Stop {
    /// The same with another text.
    pub fn map(self, text: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Fail(found) => Self::Fail(text(found)),
            Self::Skip(why) => Self::Skip(text(why)),
            Self::CouldNotRun(why) => Self::CouldNotRun(text(why)),
        }
    }
}

impl From<ClientError> for Stop {
    fn from(error: ClientError) -> Self {
        Self::CouldNotRun(chain(&error))
    }
}

impl From<ShapeError> for Stop {
    fn from(error: ShapeError) -> Self {
        Self::Fail(error.to_string())
    }
}

impl From<CouldNotRun> for Stop {
    fn from(error: CouldNotRun) -> Self {
        Self::CouldNotRun(error.0)
    }
}

/// An error body with message and type under the status that is expected.
pub fn typed_error(answer: &Response, status: u16) -> Result<String, String> {
    let seen = format!("{} {}", answer.status, shorten(&answer.text()));
    if answer.status != status {
        return Err(seen);
    }
    let Some(body) = answer.json() else {
        return Err(format!("{seen}, which is no JSON"));
    };
    let (message, kind) = error_of(&body).map_err(|error| format!("{seen}, in which {error}"))?;
    Ok(format!("{status} {kind}: {}", shorten(&message)))
}

/// The JSON of a 200.
pub fn ok_json(answer: &Response) -> Result<Value, Stop> {
    if answer.status != 200 {
        return Err(Stop::Fail(format!(
            "{} {}",
            answer.status,
            shorten(&answer.text())
        )));
    }
    answer.json().ok_or_else(|| {
        Stop::Fail(format!(
            "200 with a body that is no JSON: {}",
            shorten(&answer.text())
        ))
    })
}

/// What every answer must have, whatever was asked.
pub fn complete(found: Generation) -> Result<Generation, Stop> {
    if !matches!(found.finish_reason.as_deref(), Some("stop" | "length")) {
        return Err(Stop::Fail(format!(
            "finish reason {:?}, expected `stop` or `length`",
            found.finish_reason
        )));
    }
    Ok(found)
}

/// Names the first thing that differs.
pub fn equal(first: &Generation, second: &Generation) -> Result<(), Stop> {
    let differs = |what: &str, first: String, second: String| {
        Err(Stop::Fail(format!(
            "{what} differs: {first}, then {second}"
        )))
    };
    if let (Some(a), Some(b)) = (&first.token_ids, &second.token_ids)
        && a != b
    {
        let position = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let rest = |ids: &[u64]| format!("{:?}", &ids[position..ids.len().min(position + 4)]);
        return differs(&format!("token {position}"), rest(a), rest(b));
    }
    if first.text != second.text {
        return differs(
            "text",
            format!("{:?}", first.text),
            format!("{:?}", second.text),
        );
    }
    if first.finish_reason != second.finish_reason {
        return differs(
            "finish reason",
            format!("{:?}", first.finish_reason),
            format!("{:?}", second.finish_reason),
        );
    }
    if first.token_ids.is_some() != second.token_ids.is_some() {
        return differs(
            "presence of token ids",
            first.token_ids.is_some().to_string(),
            second.token_ids.is_some().to_string(),
        );
    }
    if first.usage != second.usage {
        return differs(
            "usage",
            format!("{:?}", first.usage),
            format!("{:?}", second.usage),
        );
    }
    Ok(())
}

/// An answer on one line.
pub fn summary(found: &Generation) -> String {
    let reason = found.finish_reason.as_deref().unwrap_or("none");
    let tokens = found.usage.map_or_else(String::new, |usage| {
        format!(", {} tokens", usage.completion_tokens)
    });
    format!("{:?} ({reason}{tokens})", shorten(&found.text))
}
