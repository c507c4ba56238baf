//! The gate: which steps are run, how, and what they must show, as a file that is reviewed like code.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::lossless::plan;
use crate::prompts::{self, Case, PROMPTS_PER_SCENARIO, PromptError, SCENARIOS};
use crate::{perf, soak};

/// Version of the file format.
pub const GATE_VERSION: u32 = 1;
/// Most requests in flight and most repetitions of anything: beyond it stands a typing error.
const MOST: usize = 100_000;

/// A gate. A step that is left out is not run; a key that is left out has the default of its command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// [`GATE_VERSION`].
    pub gate_version: u32,
    /// What is asked.
    #[serde(default)]
    pub prompts: Prompts,
    /// Runs `smoke`.
    pub smoke: Option<Checks>,
    /// Runs `boundary`.
    pub boundary: Option<Checks>,
    /// Runs `lossless`.
    pub lossless: Option<plan::Settings>,
    /// Runs `perf`.
    pub perf: Option<perf::Settings>,
    /// Runs `soak`.
    pub soak: Option<soak::Settings>,
}

/// A step without settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checks {}

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prompts {
    /// Scenarios of the built-in set; none means all of them, unless there are files.
    pub scenarios: Vec<String>,
    /// Most prompts of a scenario; null for 14 of the built-in set and all of a file.
    pub per_scenario: Option<usize>,
    /// Files of prompts, asked beside the scenarios that are named; relative to the gate.
    pub files: Vec<PathBuf>,
}

/// Why there is no gate.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The file can't be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is no gate.
    #[error("{}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// The cause, with its place.
        #[source]
        source: serde_yaml::Error,
    },
    /// A value makes no sense.
    #[error("{}: `{key}` is {value}, expected {expected}", path.display())]
    Value {
        /// Which file.
        path: PathBuf,
        /// Which key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A file of prompts can't be used.
    #[error(transparent)]
    Prompts(#[from] PromptError),
}

/// A gate with the digest of its file.
#[derive(Clone, Debug, PartialEq)]
pub struct GateFile {
    /// Which file.
    pub path: PathBuf,
    /// SHA-256 of its bytes, in hexadecimal.
    pub digest: String,
    /// What it says.
    pub gate: Gate,
}

impl GateFile {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, GateError> {
        let bytes = std::fs::read(path).map_err(|source| GateError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        let gate: Gate = serde_yaml::from_slice(&bytes).map_err(|source| GateError::Format {
            path: path.to_owned(),
            source,
        })?;
        let file = Self {
            path: path.to_owned(),
            digest: hex::encode(Sha256::digest(&bytes)),
            gate,
        };
        match file.gate.fault() {
            None => Ok(file),
            Some(Fault {
                key,
                value,
                expected,
            }) => Err(GateError::Value {
                path: path.to_owned(),
                key,
                value,
                expected,
            }),
        }
    }

    /// What the gate asks.
    pub fn cases(&self) -> Result<Vec<Case>, GateError> {
        let Prompts {
            scenarios,
            per_scenario,
            files,
        } = &self.gate.prompts;
        let built_in = |case: &Case| match (scenarios.is_empty(), files.is_empty()) {
            (true, only) => only,
            (false, _) => scenarios.contains(&case.scenario),
        };
        let cases = prompts::built_in().into_iter().filter(built_in).collect();
        let mut cases = prompts::spread(cases, per_scenario.unwrap_or(PROMPTS_PER_SCENARIO));
        let directory = self.path.parent().unwrap_or(Path::new("."));
        for file in files {
            let own = prompts::read(&directory.join(file))?;
            cases.extend(prompts::spread(own, per_scenario.unwrap_or(usize::MAX)));
        }
        Ok(cases)
    }
}

struct Fault {
    key: &'static str,
    value: String,
    expected: String,
}

impl Gate {
    /// The first value that makes no sense.
    fn fault(&self) -> Option<Fault> {
        let fault = |key, value: String, expected: &str| {
            Some(Fault {
                key,
                value,
                expected: expected.to_owned(),
            })
        };
        if self.gate_version != GATE_VERSION {
            return fault("gate_version", self.gate_version.to_string(), "1");
        }
        let unknown = |scenario: &&String| !SCENARIOS.contains(&scenario.as_str());
        if let Some(unknown) = self.prompts.scenarios.iter().find(unknown) {
            let known = format!("one of {}", SCENARIOS.join(", "));
            return fault("prompts.scenarios", format!("`{unknown}`"), &known);
        }
        let mut counts = Vec::new();
        let mut shares = Vec::new();
        if let Some(per_scenario) = self.prompts.per_scenario {
            counts.push(("prompts.per_scenario", per_scenario, 1));
        }
        if let Some(lossless) = &self.lossless {
            counts.extend([
                ("lossless.sampling", lossless.samplings.len(), 1),
                ("lossless.max_tokens", clamped(lossless.max_tokens), 1),
                ("lossless.repeat", lossless.repeat, 1),
                ("lossless.concurrency", lossless.concurrency, 1),
            ]);
            shares.extend([
                ("lossless.min_drafted_share", lossless.min_drafted_share),
                ("lossless.noise_limit_nats", lossless.noise_limit_nats),
            ]);
        }
        if let Some(perf) = &self.perf {
            counts.extend([
                ("perf.concurrency", perf.concurrencies.len(), 1),
                ("perf.rounds", perf.rounds, 2),
                ("perf.requests", perf.requests, 1),
                ("perf.max_tokens", clamped(perf.max_tokens), 2),
            ]);
            let each = perf.concurrencies.iter();
            counts.extend(each.map(|&concurrency| ("perf.concurrency", concurrency, 1)));
            shares.extend([
                ("perf.least_effect_share", perf.least_effect_share),
                ("perf.widest_interval_share", perf.widest_interval_share),
            ]);
        }
        if let Some(soak) = &self.soak {
            counts.extend([
                ("soak.concurrency", soak.concurrency, 1),
                ("soak.max_tokens", clamped(soak.max_tokens), 1),
            ]);
            shares.extend([
                ("soak.max_error_share", soak.max_error_share),
                ("soak.max_memory_growth_share", soak.max_memory_growth_share),
            ]);
            if !(1.0..=2_592_000.0).contains(&soak.duration_s) {
                let value = soak.duration_s.to_string();
                return fault("soak.duration_s", value, "1 to 2592000 seconds");
            }
        }
        for (key, value, least) in counts {
            if !(least..=MOST).contains(&value) {
                return fault(key, value.to_string(), &format!("{least} to {MOST}"));
            }
        }
        for (key, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return fault(key, value.to_string(), "0 to 1");
            }
        }
        None
    }
}

fn clamped(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GateFile, GateError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.yaml");
        std::fs::write(&path, text).unwrap();
        GateFile::read(&path)
    }

    #[test]
    fn the_gate_of_the_repository_runs_every_step_with_the_defaults() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/verify/gate.yaml");
        let file = GateFile::read(&path).unwrap();
        let gate = &file.gate;
        assert_eq!(gate.lossless, Some(plan::Settings::default()));
        assert_eq!(gate.perf, Some(perf::Settings::default()));
        assert_eq!(gate.soak, Some(soak::Settings::default()));
        assert!(gate.smoke.is_some() && gate.boundary.is_some());
        assert_eq!(file.digest.len(), 64);
        assert_eq!(file.cases().unwrap().len(), 9 * PROMPTS_PER_SCENARIO);
    }

    #[test]
    fn a_key_or_value_that_makes_no_sense_is_named() {
        let check = |text: &str, part: &str| {
            let error = read(text).unwrap_err();
            let text = crate::report::chain(&error);
            assert!(text.contains(part), "{text}");
        };
        check("gate_version: 2", "`gate_version` is 2, expected 1");
        check("gate_version: 1\nlosless: {}", "losless");
        check("gate_version: 1\nlossless: {max_token: 3}", "max_token");
        check(
            "gate_version: 1\nlossless: {concurrency: 0}",
            "`lossless.concurrency` is 0, expected 1 to",
        );
        check(
            "gate_version: 1\nperf: {rounds: 1}",
            "`perf.rounds` is 1, expected 2 to",
        );
        check(
            "gate_version: 1\nsoak: {max_error_share: 1.5}",
            "`soak.max_error_share` is 1.5, expected 0 to 1",
        );
        check(
            "gate_version: 1\nprompts: {scenarios: [chess]}",
            "`chess`, expected one of chat",
        );
    }

    #[test]
    fn files_take_the_place_of_scenarios_that_are_not_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.yaml");
        std::fs::write(directory.path().join("mine.jsonl"), "\"a\"\n\"b\"\n").unwrap();
        let count = |text: &str| {
            std::fs::write(&path, text).unwrap();
            GateFile::read(&path).unwrap().cases().unwrap().len()
        };
        assert_eq!(count("gate_version: 1\nprompts: {files: [mine.jsonl]}"), 2);
        let both =
            "gate_version: 1\nprompts: {files: [mine.jsonl], scenarios: [chat], per_scenario: 1}";
        assert_eq!(count(both), 2);
    }
}
