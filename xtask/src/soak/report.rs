//! What a soak found, as data and as text, and what it must hold.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::caller::Counts;
use super::disturb::Disturbances;
use super::{Args, Run};
use crate::machine::Machine;
use crate::session::Scrape;

/// Version of the JSON form.
const SCHEMA_VERSION: u32 = 1;
/// Most growth of resident memory, as a share of its level after the first tenth.
const MEMORY_GROWTH: f64 = 0.02;

/// Everything a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this form.
    pub schema_version: u32,
    /// Version of the tool that wrote it.
    pub tool_version: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// Name of the model.
    pub model: String,
    /// Digest of the bundle's manifest.
    pub bundle_digest: String,
    /// How long the callers went on.
    pub seconds: u64,
    /// What was drawn.
    pub seed: u64,
    /// Requests that the callers drew from.
    pub cases: usize,
    /// What the callers did.
    pub callers: Counts,
    /// What the operator did.
    pub operator: Disturbances,
    /// Resident memory.
    pub memory: Memory,
    /// Whether no completion ran or waited in the end.
    pub slots_freed: bool,
    /// What the server counted.
    pub server: Server,
}

/// Resident memory of the server, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// The median of the second tenth of the run.
    pub early_bytes: u64,
    /// The median of the last tenth.
    pub late_bytes: u64,
    /// The most that was seen.
    pub most_bytes: u64,
}

/// What the server counted during the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Server {
    /// Tokens of all answers.
    pub generated_tokens: f64,
    /// Drafted tokens that were kept.
    pub accepted_tokens: f64,
    /// Draft passes that failed.
    pub draft_errors: f64,
    /// Completions given up.
    pub cancelled: f64,
}

impl Memory {
    /// The levels of a run that took `length`; nothing when it was too short to tell.
    pub fn of(readings: &[(Duration, u64)], length: Duration) -> Self {
        let median = |from: Duration, to: Duration| {
            let within = readings.iter().filter(|(at, _)| (from..to).contains(at));
            let mut bytes: Vec<u64> = within.map(|(_, bytes)| *bytes).collect();
            bytes.sort_unstable();
            bytes.get(bytes.len() / 2).copied().unwrap_or(0)
        };
        let tenth = length / 10;
        Self {
            early_bytes: median(tenth, 2 * tenth),
            late_bytes: median(9 * tenth, Duration::MAX),
            most_bytes: readings.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0),
        }
    }

    /// Growth as a share of the early level.
    pub fn growth(&self) -> f64 {
        self.late_bytes as f64 / self.early_bytes as f64 - 1.0
    }
}

impl Report {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is one thing that the run found"
    )]
    pub(super) fn new(
        run: &Run,
        args: &Args,
        length: Duration,
        memory: &[(Duration, u64)],
        callers: Counts,
        operator: Disturbances,
        slots_freed: bool,
        (before, after): (&Scrape, &Scrape),
    ) -> Self {
        let counted = |name| after.growth(before, name);
        Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            machine: Machine::current(),
            model: run.session.model().to_owned(),
            bundle_digest: run.session.fact("bundle_digest").to_owned(),
            seconds: length.as_secs(),
            seed: args.seed,
            cases: run.cases.len(),
            callers,
            operator,
            memory: Memory::of(memory, length),
            slots_freed,
            server: Server {
                generated_tokens: counted("outrider_generated_tokens_total"),
                accepted_tokens: counted("outrider_accepted_tokens_total"),
                draft_errors: counted("outrider_draft_errors_total"),
                cancelled: counted("outrider_completions_cancelled_total"),
            },
        }
    }

    /// Every way in which the server was not what it must be.
    pub fn breaches(&self) -> Vec<String> {
        let mut breaches = Vec::new();
        if self.callers.unexpected_total > 0 {
            breaches.push(format!(
                "{} answers or errors were not what they had to be, allowed is none",
                self.callers.unexpected_total
            ));
        }
        if self.callers.answered.values().sum::<u64>() == 0 {
            breaches.push("no answer came to its end".to_owned());
        }
        if !self.operator.failed.is_empty() {
            breaches.push(format!(
                "the operator failed: {}",
                self.operator.failed.join(", ")
            ));
        }
        // What is not a number is a breach as well.
        let growth = self.memory.growth();
        if growth.is_nan() || growth.abs() > MEMORY_GROWTH {
            breaches.push(format!(
                "resident memory went from {} to {} bytes ({:+.1} %), allowed is {:.0} %",
                self.memory.early_bytes,
                self.memory.late_bytes,
                growth * 100.0,
                MEMORY_GROWTH * 100.0
            ));
        }
        if !self.slots_freed {
            breaches.push("completions run or wait although every caller has left".to_owned());
        }
        if self.server.draft_errors > 0.0 {
            breaches.push(format!(
                "{} draft passes failed, allowed is none",
                self.server.draft_errors
            ));
        }
        if self.server.accepted_tokens == 0.0 {
            breaches.push("nothing was drafted".to_owned());
        }
        breaches
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let each = |counts: &mut dyn Iterator<Item = (String, u64)>| {
            counts
                .map(|(what, count)| format!("{count} {what}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let callers = &self.callers;
        writeln!(
            f,
            "{}, {} s, seed {}, {} requests to draw from",
            self.model, self.seconds, self.seed, self.cases
        )?;
        let mut answered = callers
            .answered
            .iter()
            .map(|(how, n)| ((*how).to_owned(), *n));
        writeln!(f, "  answered as alone  {}", each(&mut answered))?;
        writeln!(f, "  given up           {}", callers.cancelled)?;
        let mut refused = callers.refused.iter().map(|(code, n)| (code.clone(), *n));
        writeln!(f, "  rightly refused    {}", each(&mut refused))?;
        writeln!(f, "  no room            {}", callers.no_room)?;
        writeln!(f, "  unexpected         {}", callers.unexpected_total)?;
        for what in &callers.unexpected {
            writeln!(f, "    {what}")?;
        }
        writeln!(
            f,
            "  switched           {} times, files read again {} times",
            self.operator.switched, self.operator.reloads
        )?;
        writeln!(
            f,
            "  memory             {:.1} MiB in the second tenth, {:.1} in the last ({:+.2} %), {:.1} at most",
            mib(self.memory.early_bytes),
            mib(self.memory.late_bytes),
            self.memory.growth() * 100.0,
            mib(self.memory.most_bytes)
        )?;
        writeln!(
            f,
            "  tokens             {} generated, of which {} drafted; {} draft errors",
            self.server.generated_tokens, self.server.accepted_tokens, self.server.draft_errors
        )?;
        write!(
            f,
            "  slots              {}",
            if self.slots_freed {
                "all free"
            } else {
                "not free"
            }
        )?;
        for breach in self.breaches() {
            write!(f, "\nnot held: {breach}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn readings(bytes: impl Fn(u64) -> u64) -> Vec<(Duration, u64)> {
        (0..1000)
            .map(|at| (Duration::from_millis(at * 100), bytes(at)))
            .collect()
    }

    fn report(memory: Memory) -> Report {
        Report {
            schema_version: SCHEMA_VERSION,
            tool_version: "0.1.0",
            machine: Machine {
                processor: "Some CPU".to_owned(),
                processors: 2,
                platform: "linux x86_64".to_owned(),
            },
            model: "tiny".to_owned(),
            bundle_digest: "0".repeat(64),
            seconds: 100,
            seed: 1,
            cases: 36,
            callers: Counts {
                answered: BTreeMap::from([("streamed", 90), ("whole", 40)]),
                cancelled: 50,
                refused: BTreeMap::from([("400 invalid_json".to_owned(), 3)]),
                ..Counts::default()
            },
            operator: Disturbances {
                switched: 8,
                reloads: 4,
                failed: Vec::new(),
            },
            memory,
            slots_freed: true,
            server: Server {
                generated_tokens: 5000.0,
                accepted_tokens: 2000.0,
                draft_errors: 0.0,
                cancelled: 50.0,
            },
        }
    }

    #[test]
    fn memory_is_judged_by_its_levels_and_not_by_the_start_or_a_moment() {
        let length = Duration::from_secs(100);
        let starting = readings(|at| {
            if at < 80 {
                10
            } else {
                1000 + u64::from(at == 500) * 900
            }
        });
        let level = Memory::of(&starting, length);
        assert_eq!(
            level,
            Memory {
                early_bytes: 1000,
                late_bytes: 1000,
                most_bytes: 1900
            }
        );
        let growing = Memory::of(&readings(|at| 1_000_000 + at * 100), length);
        assert!(growing.growth() > MEMORY_GROWTH, "{growing:?}");
        assert!(Memory::of(&[], length).growth().is_nan());
    }

    #[test]
    fn a_run_that_holds_has_no_breach() {
        let report = report(Memory {
            early_bytes: 1000 << 20,
            late_bytes: 1010 << 20,
            most_bytes: 1020 << 20,
        });
        assert!(report.breaches().is_empty());
        insta::assert_snapshot!(report.to_string());
    }

    #[test]
    fn every_breach_is_named() {
        let mut report = report(Memory {
            early_bytes: 1000,
            late_bytes: 1021,
            most_bytes: 1021,
        });
        report.callers.unexpected_total = 1;
        report.callers.answered.clear();
        report
            .operator
            .failed
            .push("PUT was answered 500".to_owned());
        report.slots_freed = false;
        report.server.draft_errors = 2.0;
        report.server.accepted_tokens = 0.0;
        insta::assert_snapshot!(report.breaches().join("\n"));
    }
}
