//! NVML through its real wrapper, played by the stand-in.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use outrider_preflight::collect::gpu::{Options, collect};
use outrider_preflight::facts::Reading;
use outrider_preflight::facts::gpu::{GpuFacts, Libcuda, NvmlFacts, NvmlOutcome};
use serde_json::Value;

use crate::{Case, cases, complaints, facts, judge, text};

/// Far more than an answer takes on any machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Longer than a process takes to start, and waited for in full by each call that hangs.
const IMPATIENCE: Duration = Duration::from_secs(5);

/// A scenario in a directory of its own, with the library that plays it.
struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    fn new(case: &Case) -> Self {
        let base = match case.base.as_deref() {
            Some("h100") => include_str!("data/nvml-h100.json"),
            Some("h200") => include_str!("data/nvml-h200.json"),
            Some("two-h100") => include_str!("data/nvml-two-h100.json"),
            other => panic!("{}: {other:?} is no base", case.name),
        };
        let base: Value = serde_json::from_str(base).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let scenario = case.apply_to(base).to_string();
        std::fs::write(dir.path().join("scenario.json"), scenario).unwrap();
        let stage = Self { dir };
        // Cargo builds a library that a test depends on beside the test.
        let deps = std::env::current_exe().unwrap();
        std::fs::copy(deps.with_file_name("libfake_nvml.so"), stage.library()).unwrap();
        stage
    }

    fn library(&self) -> PathBuf {
        self.dir.path().join("libnvidia-ml.so.1")
    }

    fn read(&self, call_limit: Duration) -> NvmlFacts {
        read(self.library(), call_limit)
    }

    /// `text` without the directory, which is another one each time.
    fn without_dir(&self, text: &str) -> String {
        text.replace(&*self.dir.path().to_string_lossy(), "DIR")
    }
}

fn read(nvml_library: PathBuf, call_limit: Duration) -> NvmlFacts {
    let options = Options {
        nvml_library,
        program: env!("CARGO_BIN_EXE_outrider-preflight").into(),
        call_limit,
        total_limit: PATIENCE,
        utilisation_samples: 2,
    };
    collect(&options).nvml
}

/// What is said of a machine with `devices` on its bus that is healthy but for what NVML said.
fn said_of(nvml: NvmlFacts, devices: usize) -> String {
    let mut gpu: GpuFacts = serde_json::from_str(include_str!("data/healthy.json")).unwrap();
    if let Reading::Known(functions) = &mut gpu.pci_functions {
        functions.truncate(devices);
    }
    if let NvmlOutcome::Read(system) = &nvml.outcome
        && let Some(driver) = system.driver_version.known()
    {
        let libcuda = gpu.libcuda.known().unwrap().clone().unwrap();
        gpu.kernel_module = Reading::Known(Some(driver.clone()));
        gpu.libcuda = Reading::Known(Some(Libcuda {
            version: Some(driver.clone()),
            ..libcuda
        }));
    }
    text(&complaints(judge(&facts(GpuFacts { nvml, ..gpu }))))
}

/// Every scenario of a file with what is said of it.
fn sections(yaml: &str, call_limit: Duration) -> String {
    let mut all = String::new();
    for case in cases(yaml) {
        let stage = Stage::new(&case);
        let devices = if case.base.as_deref() == Some("two-h100") {
            2
        } else {
            1
        };
        let said = said_of(stage.read(call_limit), devices);
        all += &format!("# {}\n{}\n", case.name, stage.without_dir(&said));
    }
    all
}

fn healthy(base: &str) -> Stage {
    Stage::new(&Case {
        name: base.to_owned(),
        base: Some(base.to_owned()),
        read_by_another: false,
        set: Default::default(),
    })
}

#[test]
fn what_nvml_says_is_what_the_facts_hold() {
    for base in ["h100", "h200"] {
        let stage = healthy(base);
        let facts = serde_json::to_string_pretty(&stage.read(PATIENCE)).unwrap();
        insta::assert_snapshot!(base, stage.without_dir(&facts));
    }
}

#[test]
fn each_scenario_has_the_verdict_of_its_machine() {
    insta::assert_snapshot!(sections(include_str!("data/scenarios.yaml"), PATIENCE));
}

#[test]
fn a_call_that_hangs_is_ended_and_named() {
    insta::assert_snapshot!(sections(include_str!("data/hangs.yaml"), IMPATIENCE));
}

#[test]
fn a_library_that_is_not_there_is_a_failure_with_a_remedy() {
    let nvml = read("/nowhere/libnvidia-ml.so.1".into(), PATIENCE);
    insta::assert_snapshot!(said_of(nvml, 1));
}

#[test]
fn the_program_asks_the_library_that_it_is_given() {
    let stage = healthy("h100");
    let output = Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
        .current_dir(stage.dir.path())
        .args(["--only", "gpu.nvml,gpu.memory,gpu.ecc", "--nvml-library"])
        .arg(stage.library())
        .args(["--set", "serving.runtime.execution_provider=cuda"])
        .args(["--set", "serving.bundle=bundle"])
        .args([
            "--set",
            "serving.runtime.onnxruntime_library=libonnxruntime.so",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    insta::assert_snapshot!(stage.without_dir(&String::from_utf8(output.stdout).unwrap()));
}
