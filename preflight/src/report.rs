//! What was found, for people and for programs.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use crate::checks::{Finding, Outcome};

/// Version of the form of a report as JSON.
pub const SCHEMA_VERSION: u32 = 1;

/// The page that says what each check looks at; [`explain`] quotes it.
const PAGE: &str = include_str!("../../docs/preflight.md");

/// What all findings together came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A server will run here as configured.
    Pass,
    /// It will run, and somebody would regret it.
    Warn,
    /// It will not run, or not as configured, or nobody can tell.
    Fail,
}

/// How many findings came to what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// [`Outcome::Pass`].
    pub pass: usize,
    /// [`Outcome::Warn`].
    pub warn: usize,
    /// [`Outcome::Fail`].
    pub fail: usize,
    /// [`Outcome::Skip`].
    pub skip: usize,
    /// [`Outcome::Unknown`].
    pub unknown: usize,
    /// Checks that nobody asked for, see [`Selection`]; they are not among the findings.
    pub left_out: usize,
}

/// Every finding and what they came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What all findings came to.
    pub verdict: Verdict,
    /// How many came to what.
    pub counts: Counts,
    /// The findings, in the order of the checks.
    pub checks: Vec<Finding>,
}

impl Report {
    /// The report of these findings.
    pub fn new(checks: Vec<Finding>) -> Self {
        let mut counts = Counts::default();
        let mut verdict = Verdict::Pass;
        for finding in &checks {
            let count = match finding.outcome {
                Outcome::Pass => &mut counts.pass,
                Outcome::Skip => &mut counts.skip,
                Outcome::Warn => &mut counts.warn,
                Outcome::Unknown => &mut counts.unknown,
                Outcome::Fail => &mut counts.fail,
            };
            *count += 1;
            verdict = match (verdict, finding.outcome) {
                (_, Outcome::Fail) => Verdict::Fail,
                (_, Outcome::Unknown) if finding.required => Verdict::Fail,
                (Verdict::Pass, Outcome::Warn | Outcome::Unknown) => Verdict::Warn,
                (verdict, _) => verdict,
            };
        }
        // Where nothing was checked nobody can tell.
        if counts.skip == checks.len() {
            verdict = Verdict::Fail;
        }
        Self {
            schema_version: SCHEMA_VERSION,
            verdict,
            counts,
            checks,
        }
    }

    /// The report of what is left of these findings: what was left out is counted, so that nobody takes a part for the whole.
    ///
    /// # Errors
    ///
    /// See [`Selection::of`].
    pub fn selected(checks: Vec<Finding>, selection: &Selection) -> Result<Self, UnknownCheck> {
        let total = checks.len();
        let mut report = Self::new(selection.of(checks)?);
        report.counts.left_out = total - report.checks.len();
        Ok(report)
    }

    /// The exit code: 0 pass, 1 fail, 3 warnings where they count (`strict`).
    pub fn exit_code(&self, strict: bool) -> u8 {
        match self.verdict {
            Verdict::Fail => 1,
            Verdict::Warn if strict => 3,
            Verdict::Warn | Verdict::Pass => 0,
        }
    }

    /// The report as JSON, with a line feed at its end.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        format!("{}\n", json.expect("a report has text and numbers only"))
    }

    /// The report as lines of text with colours.
    pub fn to_text(&self) -> String {
        let id_width = self.checks.iter().map(|finding| finding.id.len()).max();
        let id_width = id_width.unwrap_or(0);
        let mut text = String::new();
        for finding in &self.checks {
            // Writing to a string can't fail.
            let _ = write_finding(&mut text, finding, id_width);
        }
        let _ = writeln!(text, "{}", self.summary());
        text
    }

    fn summary(&self) -> String {
        let Counts {
            pass,
            warn,
            fail,
            skip,
            unknown,
            left_out,
        } = self.counts;
        let (verdict, style) = match self.verdict {
            Verdict::Pass if left_out > 0 => ("no fault in this part", style(Outcome::Pass)),
            Verdict::Warn if left_out > 0 => ("warnings in this part", style(Outcome::Warn)),
            Verdict::Pass => ("ready to start", style(Outcome::Pass)),
            Verdict::Warn => ("ready to start, with warnings", style(Outcome::Warn)),
            Verdict::Fail if self.counts.skip == self.checks.len() => (
                "nothing was checked, so nobody can tell",
                style(Outcome::Fail),
            ),
            Verdict::Fail => ("not ready to start", style(Outcome::Fail)),
        };
        let left_out = match left_out {
            0 => String::new(),
            count => format!(", {count} left out"),
        };
        format!(
            "{style}{verdict}{style:#}: {pass} passed, {warn} warned, {fail} failed, {unknown} unknown, {skip} skipped{left_out}"
        )
    }
}

fn write_finding(text: &mut String, finding: &Finding, id_width: usize) -> std::fmt::Result {
    let name = match finding.outcome {
        Outcome::Pass => "pass",
        Outcome::Skip => "skip",
        Outcome::Warn => "warn",
        Outcome::Unknown => "unknown",
        Outcome::Fail => "fail",
    };
    let style = style(finding.outcome);
    let indent = " ".repeat(7 + 2 + id_width + 2);
    let evidence = printable(&finding.evidence);
    let mut lines = evidence.lines();
    writeln!(
        text,
        "{style}{name:7}{style:#}  {:id_width$}  {}",
        finding.id,
        lines.next().unwrap_or_default()
    )?;
    for line in lines {
        writeln!(text, "{indent}{line}")?;
    }
    let remedy = printable(finding.remedy.as_deref().unwrap_or_default());
    for (number, line) in remedy.lines().enumerate() {
        let mark = if number == 0 { "->" } else { "  " };
        writeln!(text, "{indent}{style}{mark}{style:#} {line}")?;
    }
    Ok(())
}

/// `text` with control characters other than the end of a line spelled out: names of files and facts of others must not steer a terminal.
fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && character != '\n' {
            printable.extend(character.escape_default());
        } else {
            printable.push(character);
        }
    }
    printable
}

fn style(outcome: Outcome) -> Style {
    match outcome {
        Outcome::Pass => AnsiColor::Green.on_default(),
        Outcome::Skip => Style::new().dimmed(),
        Outcome::Warn => AnsiColor::Yellow.on_default(),
        Outcome::Unknown => AnsiColor::Magenta.on_default(),
        Outcome::Fail => AnsiColor::Red.on_default().bold(),
    }
}

/// Which findings are wanted.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Ids, or parts such as `gpu`; all when there are none.
    pub only: Vec<String>,
    /// Ids, or parts, that are left out.
    pub skip: Vec<String>,
}

impl Selection {
    /// The wanted ones of `findings`.
    ///
    /// # Errors
    ///
    /// A name of `only` or `skip` is that of no finding: it may be misspelt, and a check that was left out by mistake must not count as passed.
    pub fn of(&self, findings: Vec<Finding>) -> Result<Vec<Finding>, UnknownCheck> {
        let names = |name: &str, finding: &Finding| name == finding.id || name == finding.part();
        for name in self.only.iter().chain(&self.skip) {
            if !findings.iter().any(|finding| names(name, finding)) {
                return Err(UnknownCheck(name.clone()));
            }
        }
        let is_wanted = |finding: &Finding| {
            let is_named = |list: &[String]| list.iter().any(|name| names(name, finding));
            (self.only.is_empty() || is_named(&self.only)) && !is_named(&self.skip)
        };
        Ok(findings.into_iter().filter(is_wanted).collect())
    }
}

/// A name that is that of no check.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no check and no part of the checks here; --json shows all ids")]
pub struct UnknownCheck(pub String);

/// What the documentation says of a check: what it looks at, and when it is not a pass.
pub fn explain(id: &str) -> Option<String> {
    let (_, looks_at, complains) = rows().find(|row| row.0 == id)?;
    Some(format!("{id}: {looks_at}\nNot a pass: {complains}\n"))
}

/// Ids of all checks that the documentation knows.
pub fn documented_ids() -> impl Iterator<Item = &'static str> {
    rows().map(|row| row.0)
}

/// Rows of the tables of checks: id, what it looks at, when it is not a pass.
fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    PAGE.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ");
        let id = cells.next()?.strip_suffix('`')?;
        let row = (id, cells.next()?, cells.next()?);
        id.contains('.').then_some(row)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        vec![
            Finding::pass("config.faults", "no fault in 47 keys"),
            Finding::warn(
                "config.prompt_text",
                "prompts are written\ninto a file",
                "do not\nwrite them",
            ),
            Finding::skip("gpu.driver", "serving.runtime.execution_provider is cpu"),
            Finding::unknown("host.clock", "nobody says", "ask somebody").optional(),
            Finding::fail("host.listen", "taken", "take another"),
        ]
    }

    #[test]
    fn a_person_sees_every_finding_with_its_evidence_and_remedy() {
        let text = Report::new(findings()).to_text();
        insta::assert_snapshot!(anstream::adapter::strip_str(&text).to_string());
    }

    #[test]
    fn what_others_named_does_not_steer_a_terminal() {
        let finding = Finding::warn("a.b", "x\u{1b}[2Jy\rz", "see\u{7}");
        let text = Report::new(vec![finding]).to_text();
        let text = anstream::adapter::strip_str(&text).to_string();
        assert!(text.contains("x\\u{1b}[2Jy\\rz"), "{text:?}");
        assert!(text.contains("-> see\\u{7}\n"), "{text:?}");
    }

    #[test]
    fn a_program_sees_the_same() {
        insta::assert_snapshot!(Report::new(findings()).to_json());
    }

    #[test]
    fn what_is_unknown_fails_when_it_is_required_and_warns_when_it_is_not() {
        let unknown = || Finding::unknown("a.b", "", "");
        for (finding, verdict, codes) in [
            (Finding::pass("a.b", ""), Verdict::Pass, (0, 0)),
            (Finding::skip("a.b", ""), Verdict::Pass, (0, 0)),
            (Finding::warn("a.b", "", ""), Verdict::Warn, (0, 3)),
            (unknown().optional(), Verdict::Warn, (0, 3)),
            (unknown(), Verdict::Fail, (1, 1)),
            (Finding::fail("a.b", "", ""), Verdict::Fail, (1, 1)),
        ] {
            // A pass beside it changes nothing, in either order.
            for checks in [
                vec![finding.clone(), Finding::pass("c.d", "")],
                vec![Finding::pass("c.d", ""), finding.clone()],
            ] {
                let report = Report::new(checks);
                assert_eq!(report.verdict, verdict, "{finding:?}");
                assert_eq!((report.exit_code(false), report.exit_code(true)), codes);
            }
        }
    }

    #[test]
    fn a_report_in_which_nothing_was_checked_is_never_ready() {
        for checks in [Vec::new(), vec![Finding::skip("a.b", "")]] {
            let report = Report::new(checks);
            assert_eq!(
                (report.verdict, report.exit_code(false)),
                (Verdict::Fail, 1)
            );
            assert!(report.to_text().contains("nothing was checked"));
        }
    }

    #[test]
    fn a_part_is_not_called_ready() {
        let summary = |skip: &[&str]| {
            let selection = Selection {
                skip: skip.iter().map(|name| (*name).to_owned()).collect(),
                ..Selection::default()
            };
            let report = Report::selected(findings(), &selection).unwrap();
            let text = anstream::adapter::strip_str(&report.to_text()).to_string();
            text.lines().last().unwrap().to_owned()
        };
        for (skip, expected) in [
            (
                &["host", "config.prompt_text"][..],
                "no fault in this part: 1 passed, 0 warned, 0 failed, 0 unknown, 1 skipped, 3 left out",
            ),
            (
                &["host"],
                "warnings in this part: 1 passed, 1 warned, 0 failed, 0 unknown, 1 skipped, 2 left out",
            ),
            (
                &["gpu"],
                "not ready to start: 1 passed, 1 warned, 1 failed, 1 unknown, 0 skipped, 1 left out",
            ),
        ] {
            assert_eq!(summary(skip), expected);
        }
    }

    #[test]
    fn parts_and_ids_choose_and_a_misspelt_one_is_an_error() {
        let ids = |only: &[&str], skip: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let selection = Selection {
                only: owned(only),
                skip: owned(skip),
            };
            let chosen = selection.of(findings()).map_err(|error| error.to_string());
            chosen.map(|findings| {
                findings
                    .iter()
                    .map(|finding| finding.id)
                    .collect::<Vec<_>>()
            })
        };
        assert_eq!(ids(&[], &[]).unwrap().len(), 5);
        assert_eq!(
            ids(&["host"], &["host.clock"]).unwrap(),
            ["host.listen"],
            "a part, without one of its checks"
        );
        assert_eq!(ids(&["gpu.driver"], &[]).unwrap(), ["gpu.driver"]);
        assert!(ids(&["gpu.drivers"], &[]).is_err());
        assert!(ids(&[], &["hosts"]).is_err());
    }
}
