//! Holds `configs/` to what it is for: queries to the metrics that exist, gateways to real requests, manifests to schemas.
//!
//! A test that lacks a program fails and names the package that has it.

mod gateways;
mod manifests;
mod queries;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// Makes trials of functions, each named by its module and itself.
macro_rules! trials {
    ($($module:ident::{$($name:ident),+ $(,)?}),+ $(,)?) => {
        vec![$($(Trial::test(concat!(stringify!($module), "::", stringify!($name)), || {
            $module::$name().map_err(|error| Failed::from(format!("{error:#}")))
        })),+),+]
    };
}

fn main() -> ExitCode {
    let trials = trials!(
        gateways::{
            haproxy_splits_by_caller_and_takes_a_canary_that_is_not_ready_out,
            a_misspelled_directive_fails_the_check_of_its_gateway,
        },
        manifests::{
            objects_of_argo_rollouts_made_of_a_plan_pass_the_same_check,
            manifests_pass_and_every_misspelled_field_is_caught,
            rendered_manifests_are_those_of_the_overlays,
            pods_end_after_their_drain_and_run_without_privileges,
            probes_leave_a_large_model_time_to_load,
            variables_are_keys_of_the_server,
            every_way_to_serve_has_its_guards,
        },
        queries::{
            rules_and_dashboard_ask_only_for_metrics_that_exist,
            a_query_for_what_does_not_exist_is_noticed,
            each_alert_names_a_page_that_exists,
            each_alert_fires_and_stays_silent,
            a_misspelled_key_fails_promtool,
        },
    );
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A file of the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}
