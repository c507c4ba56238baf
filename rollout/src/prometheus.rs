//! Prometheus' query interface: one figure for one query, or the reason why there is none.

use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// Most time of a query.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What a query is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// A finite number.
    Value(f64),
    /// No series: nothing was measured.
    Absent,
    /// Not a number or infinite: nothing to divide by.
    NotANumber,
}

impl Answer {
    /// The number.
    pub fn value(self) -> Option<f64> {
        match self {
            Self::Value(value) => Some(value),
            Self::Absent | Self::NotANumber => None,
        }
    }
}

/// What answers queries.
pub trait Prometheus {
    /// The answer at a time, in seconds since 1970.
    fn ask(&self, query: &str, time_s: f64) -> anyhow::Result<Answer>;
}

/// A server.
pub struct Server {
    agent: ureq::Agent,
    url: String,
}

#[derive(Deserialize)]
struct Body {
    status: String,
    error: Option<String>,
    data: Option<Data>,
}

#[derive(Deserialize)]
#[serde(tag = "resultType", content = "result", rename_all = "lowercase")]
enum Data {
    Vector(Vec<Series>),
    Scalar((f64, String)),
    Matrix(serde::de::IgnoredAny),
    String(serde::de::IgnoredAny),
}

#[derive(Deserialize)]
struct Series {
    value: (f64, String),
}

impl Server {
    /// The server at a base URL.
    pub fn new(base: &str) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            .build();
        Self {
            agent: config.into(),
            url: format!("{}/api/v1/query", base.trim_end_matches('/')),
        }
    }
}

impl Prometheus for Server {
    fn ask(&self, query: &str, time_s: f64) -> anyhow::Result<Answer> {
        let request = self.agent.get(&self.url);
        let request = request
            .query("query", query)
            .query("time", format!("{time_s:.3}"));
        let mut response = request.call().with_context(|| self.url.clone())?;
        let text = response
            .body_mut()
            .read_to_string()
            .with_context(|| self.url.clone())?;
        parse(&text).with_context(|| format!("{} for {query}", self.url))
    }
}

/// The answer in the body of a response.
pub fn parse(text: &str) -> anyhow::Result<Answer> {
    let body: Body =
        serde_json::from_str(text).with_context(|| format!("no answer: {text:.200}"))?;
    if body.status != "success" {
        bail!("{}", body.error.as_deref().unwrap_or(&body.status));
    }
    let number = match body.data.context("the answer has no data")? {
        Data::Scalar((_, number)) => number,
        Data::Vector(mut series) => match series.len() {
            0 => return Ok(Answer::Absent),
            1 => series.remove(0).value.1,
            many => bail!("the query gives {many} series and must give one: sum them"),
        },
        Data::Matrix(_) | Data::String(_) => bail!("the query must give one number"),
    };
    let value: f64 = number
        .parse()
        .with_context(|| format!("no number: {number}"))?;
    Ok(if value.is_finite() {
        Answer::Value(value)
    } else {
        Answer::NotANumber
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(values: &[&str]) -> String {
        let series = values.iter();
        let series: Vec<_> = series
            .map(|value| format!(r#"{{"metric":{{}},"value":[1.5,"{value}"]}}"#))
            .collect();
        format!(
            r#"{{"status":"success","data":{{"resultType":"vector","result":[{}]}}}}"#,
            series.join(",")
        )
    }

    #[test]
    fn one_finite_number_is_a_figure_and_nothing_else_is() {
        assert_eq!(parse(&vector(&["0.5"])).unwrap(), Answer::Value(0.5));
        assert_eq!(parse(&vector(&[])).unwrap(), Answer::Absent);
        for odd in ["NaN", "+Inf", "-Inf"] {
            assert_eq!(parse(&vector(&[odd])).unwrap(), Answer::NotANumber, "{odd}");
        }
        let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1,"7"]}}"#;
        assert_eq!(parse(scalar).unwrap(), Answer::Value(7.0));
        for wrong in [
            vector(&["1", "2"]),
            vector(&["one"]),
            r#"{"status":"error","error":"parse error"}"#.to_owned(),
            r#"{"status":"success","data":{"resultType":"matrix","result":[]}}"#.to_owned(),
            "<html>".to_owned(),
        ] {
            assert!(parse(&wrong).is_err(), "{wrong}");
        }
    }
}
