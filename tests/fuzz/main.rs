//! The kept inputs of the fuzz targets: seeds, and cases that once broke a reader.
//!
//! Memory is limited, so that a reader that allocates what an input merely claims fails here as it does under the fuzzer. Such a failure ends the
//! process without naming the input; `cargo xtask fuzz TARGET` replays these inputs first and names it.

#![expect(
    clippy::print_stdout,
    reason = "the last path is that of the input that failed"
)]

use std::alloc::System;
use std::fs;

use cap::Cap;
use outrider_tests::fixtures;
use outrider_tests::fuzz::TARGETS;
use xtask::fuzz::{INPUT_MEMORY_BYTES, TARGET_NAMES};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

#[test]
fn every_kept_input_passes_and_each_target_accepts_one() {
    for target in &TARGETS {
        target.prepare();
        let directory = fixtures::data(&format!("fuzz-cases/{}", target.name));
        let mut accepted = 0;
        let entries = fs::read_dir(&directory)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        for entry in entries {
            let path = entry.unwrap().path();
            let input = fs::read(&path).unwrap();
            println!("{}", path.display());
            MEMORY
                .set_limit(MEMORY.allocated() + INPUT_MEMORY_BYTES)
                .unwrap();
            accepted += usize::from((target.run)(&input));
            MEMORY.set_limit(usize::MAX).unwrap();
        }
        assert!(
            accepted > 0,
            "{}: no input gets past the first check",
            target.name
        );
    }
}

#[test]
fn the_command_line_names_every_target() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, TARGET_NAMES);
}
