//! libFuzzer around the entry functions of `outrider_tests::fuzz`; `cargo xtask fuzz` builds and runs it.
//!
//! One program has all targets, so that there is one to build; an environment variable says which it feeds.

#![no_main]

use std::alloc::System;
use std::sync::OnceLock;

use cap::Cap;
use libfuzzer_sys::fuzz_target;
use outrider_tests::fuzz::Target;
use xtask::fuzz::{INPUT_MEMORY_BYTES, TARGET_VARIABLE};

/// libFuzzer sees no single allocation without a sanitizer: one that is too large must fail here.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

static TARGET: OnceLock<&Target> = OnceLock::new();

fn prepare() -> &'static Target {
    let name = std::env::var(TARGET_VARIABLE).unwrap_or_default();
    let target = Target::find(&name).unwrap_or_else(|| panic!("{TARGET_VARIABLE} is {name:?}"));
    target.prepare();
    MEMORY
        .set_limit(MEMORY.allocated() + INPUT_MEMORY_BYTES)
        .expect("a limit above what is in use can be set");
    target
}

fuzz_target!(init: { TARGET.get_or_init(prepare); }, |data: &[u8]| {
    if let Some(target) = TARGET.get() {
        (target.run)(data);
    }
});
