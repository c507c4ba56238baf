//! Recorded facts, and what is said of them.

use outrider_preflight::checks::{Finding, Outcome};
use outrider_preflight::facts::Reading;
use outrider_preflight::facts::config::ExecutionProvider;
use outrider_preflight::facts::gpu::GpuFacts;
use outrider_preflight::report;
use serde_json::Value;

use crate::{Case, cases, complaints, facts, judge, runtime, text};

/// Two healthy devices.
fn healthy() -> Value {
    serde_json::from_str(include_str!("data/healthy.json")).unwrap()
}

/// The facts of `case`, in which `/gpu0` and `/gpu1` stand for what is known of the two devices.
fn gpu(case: &Case) -> GpuFacts {
    let set = case.set.iter().map(|(pointer, value)| {
        let device = pointer
            .strip_prefix("/gpu")
            .filter(|rest| rest.as_bytes().get(1) == Some(&b'/'));
        let pointer = match device {
            Some(rest) => {
                let (index, field) = rest.split_at(1);
                format!("/nvml/outcome/read/devices/{index}/state/known{field}")
            }
            None => pointer.clone(),
        };
        (pointer, value.clone())
    });
    let case = Case {
        name: case.name.clone(),
        base: None,
        read_by_another: case.read_by_another,
        set: set.collect(),
    };
    serde_json::from_value(case.apply_to(healthy()))
        .unwrap_or_else(|error| panic!("{}: {error}", case.name))
}

/// Every case of a file with everything that is said of it beyond what is said of healthy devices.
fn sections(yaml: &str) -> String {
    let mut all = String::new();
    for case in cases(yaml) {
        let mut facts = facts(gpu(&case));
        facts.host.read_by_user = !case.read_by_another;
        let complaints = complaints(judge(&facts));
        all += &format!("# {}\n{}\n", case.name, text(&complaints));
    }
    all
}

#[test]
fn healthy_devices_pass_every_check() {
    let facts = facts(serde_json::from_value(healthy()).unwrap());
    insta::assert_snapshot!(text(&judge(&facts)));
}

#[test]
fn no_check_applies_to_a_configuration_that_uses_the_cpu() {
    let mut facts = facts(serde_json::from_value(healthy()).unwrap());
    facts.config.execution_provider = ExecutionProvider::Cpu;
    let findings = judge(&facts);
    let is_skip = |finding: &Finding| finding.outcome == Outcome::Skip;
    assert!(findings.iter().all(is_skip), "{}", text(&findings));
}

#[test]
fn facts_that_were_not_read_are_unknown_and_never_a_pass() {
    let findings = judge(&facts(GpuFacts::not_read("nobody looked")));
    insta::assert_snapshot!(text(&findings));
    assert_eq!(findings.len(), complaints(findings).len());
}

#[test]
fn each_value_that_is_unknown_is_told() {
    let mut silent = String::new();
    for field in [
        "compute_capability",
        "memory",
        "processes",
        "ecc_mode",
        "ecc_errors",
        "row_remap",
        "throttle_reasons",
        "power",
        "temperature_celsius",
        "pcie",
        "nvlinks_up",
        "mig_mode",
        "compute_mode",
        "persistence",
        "utilisation_percent",
    ] {
        let case = Case {
            name: field.to_owned(),
            base: None,
            read_by_another: false,
            set: [(
                format!("/gpu0/{field}"),
                serde_json::json!({"unknown": "the device did not say"}),
            )]
            .into_iter()
            .collect(),
        };
        let told = complaints(judge(&facts(gpu(&case))));
        // An exclusive device would ask for its processes; a shared one need not.
        if told
            .iter()
            .all(|finding| !finding.evidence.contains("the device did not say"))
        {
            silent += field;
        }
    }
    assert_eq!(silent, "");
}

macro_rules! snapshots_of {
    ($($test:ident: $file:literal;)*) => {$(
        #[test]
        fn $test() {
            insta::assert_snapshot!(sections(include_str!(concat!("data/", $file))));
        }
    )*};
}

snapshots_of! {
    faults_of_the_driver_are_found: "driver.yaml";
    devices_that_are_held_or_shut_are_found: "access.yaml";
    devices_that_are_not_what_is_meant_are_found: "selection.yaml";
    devices_that_others_use_are_found: "occupancy.yaml";
    sick_devices_are_found: "health.yaml";
    slow_devices_are_found: "speed.yaml";
}

/// The lowest driver is that of the major version of CUDA; a version that is not in the table is never a pass.
#[test]
fn a_driver_is_judged_by_the_cuda_of_the_runtime() {
    let mut lines = String::new();
    for (driver, cuda_major) in [
        ("580.95.05", 13),
        ("590.44.01", 13),
        ("575.57.08", 13),
        ("575.57.08", 12),
        ("525.60.13", 12),
        ("520.61.05", 12),
        ("520.61.05", 11),
        ("418.87.00", 11),
        ("580.95.05", 14),
    ] {
        let case = Case {
            name: driver.to_owned(),
            base: None,
            read_by_another: false,
            set: [
                ("/nvml/outcome/read/driver_version", driver),
                ("/kernel_module", driver),
            ]
            .into_iter()
            .map(|(pointer, driver)| (pointer.to_owned(), serde_json::json!({"known": driver})))
            .collect(),
        };
        let mut facts = facts(gpu(&case));
        facts.runtime = runtime(cuda_major);
        let mut findings = judge(&facts);
        findings.retain(|finding| finding.id == "gpu.driver_too_old");
        lines += &text(&findings);
    }
    insta::assert_snapshot!(lines);
}

/// Above the floor of its major version a driver is judged by the features that it says it has; the table only names what to install, and stands in where
/// the driver does not say.
#[test]
fn a_driver_is_judged_by_the_minor_version_of_cuda_where_a_file_tells_it() {
    let known =
        |major: u32, minor: u32| serde_json::json!({"known": {"major": major, "minor": minor}});
    let silent = || serde_json::json!({"unknown": "the function is not there"});
    let mut lines = String::new();
    for (driver, cuda, file) in [
        ("580.95.05", known(13, 0), "libcudart.so.13.0.96"),
        ("580.95.05", known(13, 0), "libcudart.so.13.1.80"),
        ("590.44.01", known(13, 1), "libcudart.so.13.1.80"),
        ("580.95.05", known(13, 0), "libcudart.so.13.4.12"),
        ("610.10.01", known(13, 5), "libcudart.so.13.4.12"),
        ("580.95.05", silent(), "libcudart.so.13.1.80"),
        ("590.44.01", silent(), "libcudart.so.13.1.80"),
        ("580.95.05", silent(), "libcudart.so.13.4.12"),
        ("535.104.05", known(12, 2), "libcudart.so.12.8.90"),
        ("580.95.05", known(13, 0), "libcudart.so.12.8.90"),
        ("580.95.05", known(13, 0), "libcudart.so.13"),
        ("575.57.08", known(12, 9), "libcudart.so.13.0.96"),
    ] {
        let case = Case {
            name: driver.to_owned(),
            base: None,
            read_by_another: false,
            set: [
                (
                    "/nvml/outcome/read/driver_version".to_owned(),
                    serde_json::json!({"known": driver}),
                ),
                ("/nvml/outcome/read/cuda_version".to_owned(), cuda),
            ]
            .into_iter()
            .collect(),
        };
        let mut facts = facts(gpu(&case));
        let major = file["libcudart.so.".len()..].split('.').next().unwrap();
        facts.runtime = runtime(major.parse().unwrap());
        if let Some(Reading::Known(provider)) = &mut facts.runtime.cuda_provider {
            provider.needed[0].real_path = Some(format!("/usr/local/cuda/lib64/{file}"));
        }
        let mut findings = judge(&facts);
        findings.retain(|finding| finding.id == "gpu.driver_too_old");
        lines += &text(&findings);
    }
    insta::assert_snapshot!(lines);
}

/// The catalogue lets these pass, warns of those, and wants a reset or a restart after the last.
#[test]
fn an_xid_is_as_bad_as_the_catalogue_says() {
    let mut lines = String::new();
    for number in [43, 63, 13, 38, 92, 94, 110, 119, 143, 155, 79, 48, 12] {
        let fault = serde_json::json!([{
            "of_switch": false, "pci_address": "0000:1b:00.0", "number": number, "count": 1,
            "last_at_seconds": 7100, "text": "text",
        }]);
        let case = Case {
            name: number.to_string(),
            base: None,
            read_by_another: false,
            set: [("/kernel_log/known/faults".to_owned(), fault)]
                .into_iter()
                .collect(),
        };
        let mut findings = judge(&facts(gpu(&case)));
        findings.retain(|finding| finding.id == "gpu.xid");
        lines += &text(&findings);
    }
    insta::assert_snapshot!(lines);
}

#[test]
fn every_check_is_documented_and_every_documented_check_exists() {
    let facts = facts(serde_json::from_value(healthy()).unwrap());
    let findings = judge(&facts);
    let found: Vec<_> = findings.iter().map(|finding| finding.id).collect();
    let documented: Vec<_> = report::documented_ids()
        .filter(|id| id.starts_with("gpu."))
        .collect();
    assert_eq!(found, documented);
}
