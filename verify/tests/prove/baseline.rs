//! A baseline is the same bytes for the same service, and says where another one goes another way.

use std::fs;

use outrider_verify::baseline::{self, Baseline};
use outrider_verify::lossless::Settings;
use outrider_verify::lossless::compare::Aspect;
use outrider_verify::prompts::{built_in, spread};
use outrider_verify::report::Verdict;

use crate::service::{Behaviour, serve};
use crate::{connect, verify};

#[test]
fn a_service_is_held_to_what_it_said() {
    let directory = tempfile::tempdir().unwrap();
    let cases = spread(built_in(), 3);
    let record = |behaviour| {
        let service = connect(&serve(behaviour));
        let file = baseline::file_of(directory.path(), service.model());
        let recorded =
            baseline::record(&service, &cases, &Settings::default(), &|_, _| {}).unwrap();
        recorded.write(&file).unwrap();
        assert_eq!(Baseline::read(&file).unwrap(), recorded);
        (fs::read(&file).unwrap(), file)
    };
    let (bytes, file) = record(Behaviour::default());
    assert_eq!(file.file_name().unwrap(), "sha256-5ea.jsonl");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    // Recorded without drafting: what is wrong with it does not get into the record.
    let (again, _) = record(Behaviour {
        wrong_one_in: Some(10),
        ..Behaviour::default()
    });
    assert!(bytes == again);

    let check = |behaviour| {
        let service = connect(&serve(behaviour));
        let recorded = Baseline::read(&file).unwrap();
        baseline::check(&service, &recorded, &file, 4, &|_, _| {})
    };
    let same = check(Behaviour::default());
    assert_eq!(same.verdict, Verdict::Pass, "{same}");
    assert_eq!(same.answers, 9 * 3 * 2);
    let wrong_drafts = check(Behaviour {
        wrong_one_in: Some(100),
        ..Behaviour::default()
    });
    assert_eq!(wrong_drafts.verdict, Verdict::Fail, "{wrong_drafts}");
    assert!(
        wrong_drafts
            .differences
            .iter()
            .all(|difference| difference.recorded_without_drafting)
    );
    // Another target is wrong without drafting as well.
    let other = check(Behaviour {
        unsteady_one_in: Some(2),
        ..Behaviour::default()
    });
    assert_eq!(other.verdict, Verdict::Fail, "{other}");
    let difference = &other.differences[0];
    assert_eq!(difference.aspect, Aspect::Token);
    assert!(!difference.recorded_without_drafting);
    let gone = check(Behaviour {
        status: 401,
        ..Behaviour::default()
    });
    assert_eq!(gone.verdict, Verdict::CouldNotRun, "{gone}");
}

#[test]
fn the_command_records_once_and_checks_against_the_file_of_the_digest() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().to_str().unwrap();
    let endpoint = serve(Behaviour::default()).endpoint();
    let run = |what: &str, more: &[&str], code: i32, part: &str| {
        let mut arguments = vec!["baseline", what, "--endpoint", &endpoint];
        arguments.extend(more);
        let output = verify(&arguments);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(part), "{text}");
    };
    let few = ["--directory", directory, "--prompts-per-scenario", "1"];
    let there = ["--directory", directory];
    run("check", &there, 2, "record it with");
    run("record", &few, 0, "18 answers are in");
    run("record", &few, 64, "--replace replaces it");
    run("check", &there, 0, "18 of 18 answers are equal");
    let file = format!("{directory}/broken.jsonl");
    fs::write(&file, "{}\n").unwrap();
    run("check", &["--file", &file], 64, "broken.jsonl, line 1");
}
