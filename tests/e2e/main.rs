//! End-to-end tests: real binaries, real bundles, real sockets.
//!
//! Servers are shared between tests and stop when the last test has ended, passed or not.

mod admission;
mod bundles;
mod determinism;
mod drafting;
mod faults;
mod front_door;
mod goldens;
mod lifecycle;
mod measures;
mod observability;
mod openai;
mod smoke;
mod speculation;
mod stop;
mod utf8;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Trial};
use outrider_bundle::manifest::Precision;
use outrider_tests::scenario;
use outrider_tests::servers::Servers;

/// Makes trials of functions, each named by its module and itself.
macro_rules! trials {
    ($servers:expr, $($module:ident::{$($name:ident),+ $(,)?}),+ $(,)?) => {
        vec![$($({
            let servers: Arc<Servers> = Arc::clone($servers);
            Trial::test(concat!(stringify!($module), "::", stringify!($name)), move || {
                $module::$name(&servers).map_err(|error: anyhow::Error| format!("{error:#}").into())
            })
        }),+),+]
    };
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let servers = Arc::new(Servers::default());
    let mut trials = trials!(
        &servers,
        admission::{
            waits_and_answers_that_take_too_long_end_with_their_code,
            a_prompt_that_was_answered_is_cached_unless_the_cache_is_off,
        },
        bundles::{
            a_missing_truncated_or_changed_file_stops_the_start_and_is_named,
            a_graph_that_lacks_an_input_stops_the_start_and_names_it,
            a_device_that_its_graphs_do_not_run_on_stops_the_start,
        },
        determinism::{
            fp32_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk,
            int8_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk,
            int4_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk,
        },
        drafting::{
            a_switch_in_mid_stream_changes_no_token,
            a_damaged_draft_is_served_without_unless_it_is_required,
            settings_above_the_drafts_own_stop_the_start,
            a_bundle_without_a_draft_is_refused_where_one_is_required,
        },
        faults::{
            a_killed_server_cuts_its_streams_off_and_starts_again_as_before,
            a_stop_under_load_lets_every_stream_end_whole_or_with_an_error,
            files_overwritten_under_a_running_server_change_no_answer_and_refuse_the_next_start,
            ten_thousand_idle_connections_keep_nobody_from_an_answer,
            a_client_that_reads_a_byte_at_a_time_holds_up_nobody,
            a_wall_clock_that_jumps_touches_no_request,
            a_full_disk_under_the_audit_log_ends_readiness_and_no_request,
        },
        front_door::{
            the_printed_curl_line_works_and_a_stop_ends_the_server,
            a_busy_port_is_an_error_that_names_it,
        },
        goldens::{
            greedy_tokens_equal_the_reference_implementation,
            chat_renders_the_prompt_of_the_reference_implementation,
            first_logits_differ_as_those_of_the_reference_implementation,
        },
        lifecycle::{
            a_stop_tells_the_stream_that_it_cuts_off_and_logs_its_tokens,
            a_stop_lets_a_stream_come_to_its_end,
            nothing_is_reported_to_the_makers_of_the_runtime_or_kept_for_them,
        },
        measures::{
            int8_perplexity_is_within_three_percent_of_fp32,
            fp32_memory_is_little_more_than_weights_and_kv_slab,
            preflight_knows_what_a_server_with_full_slots_has_in_memory,
        },
        observability::{
            a_request_can_be_followed_from_caller_to_collector_log_and_audit_log,
        },
        openai::{the_official_client_is_served},
        smoke::{
            the_server_passes_the_smoke_checks,
            the_server_passes_at_the_edges,
            drafting_changes_no_answer_by_the_judgement_of_verify,
            verify_finds_each_fault_before_the_real_server,
        },
        speculation::{
            the_recorded_pair_gives_its_tokens_and_keeps_as_many_drafts,
            the_tiny_pair_loses_nothing_in_any_pair_of_settings,
            the_reference_pair_loses_nothing,
            sampled_tokens_follow_the_law_of_the_target,
        },
        stop::{stop_strings_end_the_text_wherever_they_fall},
        utf8::{streams_never_split_a_character},
    );
    trials.extend(scenarios(&servers));
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed() {
        eprint_logs(&servers);
    }
    drop(servers);
    conclusion.exit_code()
}

/// One trial for each scenario file.
fn scenarios(servers: &Arc<Servers>) -> Vec<Trial> {
    let files = scenario::files().expect("the scenarios are checked in");
    let trial = |file: PathBuf| {
        let servers = Arc::clone(servers);
        let name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Trial::test(format!("http::{name}"), move || {
            let run = || {
                let server = servers.of(Precision::Int8)?;
                let admin_endpoint = server.process().admin_endpoint();
                scenario::run(&file, &server.endpoint(), &admin_endpoint, server.model())
            };
            run().map_err(|error: anyhow::Error| format!("{error:#}").into())
        })
    };
    files.into_iter().map(trial).collect()
}

#[expect(
    clippy::print_stderr,
    reason = "the logs belong to the report of a failed run"
)]
fn eprint_logs(servers: &Servers) {
    eprintln!("{}", servers.logs());
}
