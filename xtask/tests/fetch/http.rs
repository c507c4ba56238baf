//! Sources `https` and `hf`.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use outrider_bundle::digest::sha256_hex;

use crate::server::{Answer, Server};
use crate::{Setup, content};

/// A server of one file that knows ranges, after a first answer that breaks off.
fn breaks_off_once(after: usize) -> Server {
    Server::start(move |request, index| match (index, request.range_start()) {
        (0, _) => Answer::new(200, &content())
            .header("ETag", "\"one\"")
            .dropped_after(after),
        (_, Some(start)) => Answer::range(&content(), start).header("ETag", "\"one\""),
        (_, None) => Answer::new(200, &content()),
    })
}

fn https_lock(setup: &Setup, server: &Server) -> std::path::PathBuf {
    setup.lock(
        &format!("https = {{ url = \"{}/model.bin\" }}", server.url),
        None,
        &content(),
    )
}

#[test]
fn a_whole_file_arrives_and_a_second_run_asks_for_nothing() {
    let server = Server::start(|_, _| Answer::new(200, &content()));
    let setup = Setup::new();
    let lock = https_lock(&setup, &server);
    let summary = setup.fetch(&lock).unwrap();
    assert_eq!(
        (summary.files, summary.fetched, summary.fetched_bytes),
        (1, 1, content().len() as u64)
    );
    assert_eq!(setup.stored(), content());
    assert_eq!(setup.left(), ["model.bin"]);
    assert_eq!(
        server.requests()[0].header("accept-encoding"),
        Some("identity")
    );

    assert_eq!(setup.fetch(&lock).unwrap().fetched, 0);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn several_members_come_from_below_one_url() {
    let server = Server::start(|request, _| Answer::new(200, request.path.as_bytes()));
    let setup = Setup::new();
    let source = format!("https = {{ url = \"{}/models/\" }}", server.url);
    let lock = setup.lock_of(
        &source,
        &[
            ("a", Some("x/a"), b"/models/x/a"),
            ("b", Some("x y/ü#?%"), b"/models/x%20y/%C3%BC%23%3F%25"),
        ],
    );
    assert_eq!(setup.fetch(&lock).unwrap().fetched, 2);
    assert_eq!(setup.left(), ["a", "b"]);
}

#[test]
fn a_dropped_connection_is_resumed_where_it_broke() {
    let server = breaks_off_once(500_000);
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(setup.left(), ["model.bin"]);
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    let start = requests[1].range_start().unwrap();
    assert!(start > 0 && start <= 500_000, "{start}");
    assert_eq!(requests[1].header("if-range"), Some("\"one\""));
}

#[test]
fn a_later_run_goes_on_where_a_failed_one_stopped() {
    let server = Server::start(|request, index| match (index, request.range_start()) {
        (0, None) => Answer::new(200, &content())
            .header("ETag", "\"one\"")
            .dropped_after(500_000),
        (1..=3, Some(_)) => Answer::new(503, b"busy"),
        (4, Some(start)) => Answer::range(&content(), start).header("ETag", "\"one\""),
        other => panic!("{other:?}"),
    });
    let setup = Setup::new();
    let lock = https_lock(&setup, &server);
    let error = setup.error(&lock);
    assert!(
        error.contains("gave up after 3 attempts") && error.contains("503"),
        "{error}"
    );
    assert!(
        setup.left().iter().any(|name| name.ends_with(".partial")),
        "{:?}",
        setup.left()
    );
    setup.fetch(&lock).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(setup.left(), ["model.bin"]);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file_again() {
    let server = Server::start(|_, index| match index {
        0 => Answer::new(200, &content()).dropped_after(500_000),
        _ => Answer::new(200, &content()),
    });
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_server_that_never_gets_further_is_given_up() {
    let server = Server::start(|_, _| Answer::new(200, &content()).dropped_after(500_000));
    let setup = Setup::new();
    let error = setup.error(&https_lock(&setup, &server));
    assert!(error.contains("gave up after 3 attempts"), "{error}");
    assert!(server.requests().len() <= 4, "{}", server.requests().len());
}

#[test]
fn a_file_that_changes_between_two_answers_is_fetched_whole() {
    let old: Vec<u8> = content().iter().map(|byte| !byte).collect();
    let server = Server::start(move |request, index| match (index, request.range_start()) {
        (0, _) => Answer::new(200, &old)
            .header("ETag", "\"old\"")
            .dropped_after(500_000),
        (_, Some(start)) => Answer::range(&content(), start).header("ETag", "\"new\""),
        (_, None) => Answer::new(200, &content()).header("ETag", "\"new\""),
    });
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(setup.stored(), content());
}

#[test]
fn a_mixture_of_two_versions_without_tags_is_fetched_whole() {
    let old: Vec<u8> = content().iter().map(|byte| !byte).collect();
    let server = Server::start(move |request, index| match (index, request.range_start()) {
        (0, _) => Answer::new(200, &old).dropped_after(500_000),
        (_, Some(start)) => Answer::range(&content(), start),
        (_, None) => Answer::new(200, &content()),
    });
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn an_answer_for_another_range_is_not_appended() {
    let server = Server::start(|request, index| match (index, request.range_start()) {
        (0, _) => Answer::new(200, &content()).dropped_after(500_000),
        (_, Some(start)) => Answer::range(&content(), start - 1),
        (_, None) => Answer::new(200, &content()),
    });
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(setup.stored(), content());
}

#[test]
fn wrong_bytes_name_the_file_and_both_digests_and_leave_nothing() {
    let mut wrong = content();
    wrong[700_000] ^= 1;
    let (expected, actual) = (sha256_hex(&content()), sha256_hex(&wrong));
    let server = Server::start(move |_, _| Answer::new(200, &wrong));
    let setup = Setup::new();
    let error = setup.error(&https_lock(&setup, &server));
    for part in [
        "model.bin",
        &format!("has sha256 {actual}"),
        &format!("the lock says {expected}"),
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(setup.left(), [""; 0]);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_file_of_another_size_is_refused_before_its_first_byte() {
    for size in [content().len() - 1, content().len() + 1] {
        let server = Server::start(move |_, _| Answer::new(200, &vec![1; size]));
        let setup = Setup::new();
        let error = setup.error(&https_lock(&setup, &server));
        assert!(
            error.contains(&format!("model.bin has {size} bytes at")),
            "{error}"
        );
        assert_eq!(setup.left(), [""; 0]);
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn a_cut_file_of_unknown_size_is_never_taken_for_the_whole() {
    let server = Server::start(|_, _| Answer::unsized_body(200, &content()[..1000]));
    let setup = Setup::new();
    let error = setup.error(&https_lock(&setup, &server));
    assert!(
        error.contains("the answer ended after 1000 of 1200000 bytes"),
        "{error}"
    );
    assert!(!setup.left().contains(&"model.bin".to_owned()));
}

#[test]
fn a_file_of_unknown_size_is_stopped_where_it_passes_the_lock() {
    let server = Server::start(|_, _| Answer::unsized_body(200, &vec![1; 64 << 20]));
    let setup = Setup::new();
    let error = setup.error(&https_lock(&setup, &server));
    assert!(
        error.contains("model.bin is larger than the 1200000 bytes the lock says"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_missing_file_is_asked_for_once() {
    let server = Server::start(|_, _| Answer::new(404, b"no"));
    let setup = Setup::new();
    let error = setup.error(&https_lock(&setup, &server));
    assert!(
        error.contains(&format!("{}/model.bin answers 404", server.url)),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_busy_server_is_asked_again() {
    let server = Server::start(|_, index| match index {
        0 => Answer::new(503, b"busy").header("Retry-After", "0"),
        1 => Answer::new(429, b"slow down"),
        _ => Answer::new(200, &content()),
    });
    let setup = Setup::new();
    setup.fetch(&https_lock(&setup, &server)).unwrap();
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let setup = Setup::new();
    let lock = setup.lock(
        "https = { url = \"http://127.0.0.1:1/model.bin\" }",
        None,
        &content(),
    );
    let error = setup.error(&lock);
    assert!(
        error.contains("no answer from http://127.0.0.1:1/model.bin"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn a_partial_file_of_another_lock_is_not_continued() {
    let server = Server::start(|request, index| match index {
        0 => Answer::new(200, &content()).dropped_after(500_000),
        1..=2 => Answer::new(503, b"busy"),
        _ => {
            assert_eq!(request.range_start(), None);
            Answer::new(200, b"other")
        }
    });
    let setup = Setup::new();
    setup.error(&https_lock(&setup, &server));
    let source = format!("https = {{ url = \"{}/model.bin\" }}", server.url);
    setup.fetch(&setup.lock(&source, None, b"other")).unwrap();
    assert_eq!(setup.stored(), b"other");
    assert_eq!(setup.left(), ["model.bin"]);
}

#[test]
fn two_fetches_at_once_download_once() {
    let server = Server::start(|_, _| Answer::new(200, &content()));
    let setup = Arc::new(Setup::new());
    let lock = https_lock(&setup, &server);
    let fetched = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                fetched.fetch_add(setup.fetch(&lock).unwrap().fetched, Ordering::Relaxed)
            });
        }
    });
    assert_eq!(fetched.into_inner(), 1);
    assert_eq!(server.requests().len(), 1);
    assert_eq!(setup.stored(), content());
}

fn hf_lock(setup: &Setup) -> std::path::PathBuf {
    setup.lock(
        "hf = { repository = \"org/name\", revision = \"4f1e\" }",
        Some("onnx/model 1.bin"),
        &content(),
    )
}

#[test]
fn a_repository_file_is_asked_for_by_revision_and_with_the_token() {
    let server = Server::start(|_, _| Answer::new(200, &content()));
    let mut setup = Setup::new();
    setup.settings.hf_endpoint = format!("{}/", server.url);
    setup.settings.hf_token = Some("hf_secret".to_owned());
    setup.fetch(&hf_lock(&setup)).unwrap();
    assert_eq!(setup.stored(), content());
    let request = &server.requests()[0];
    assert_eq!(request.path, "/org/name/resolve/4f1e/onnx/model%201.bin");
    assert_eq!(request.header("authorization"), Some("Bearer hf_secret"));
}

#[test]
fn the_token_does_not_follow_a_redirect_to_another_host() {
    let files = Server::start(|request, index| match (index, request.range_start()) {
        (0, _) => Answer::new(200, &content())
            .header("ETag", "\"one\"")
            .dropped_after(500_000),
        (_, Some(start)) => Answer::range(&content(), start).header("ETag", "\"one\""),
        other => panic!("{other:?}"),
    });
    let target = format!(
        "{}/blob?signature=1",
        files.url.replace("127.0.0.1", "localhost")
    );
    let hub = Server::start(move |_, _| Answer::new(302, b"").header("Location", &target));
    let mut setup = Setup::new();
    setup.settings.hf_endpoint = hub.url.clone();
    setup.settings.hf_token = Some("hf_secret".to_owned());
    setup.fetch(&hf_lock(&setup)).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(
        hub.requests().len(),
        2,
        "a signed address is asked for anew"
    );
    for request in files.requests() {
        assert_eq!(request.header("authorization"), None);
    }
}

#[test]
fn a_repository_that_wants_a_token_says_so() {
    let server = Server::start(|_, _| Answer::new(401, b""));
    let mut setup = Setup::new();
    setup.settings.hf_endpoint = server.url.clone();
    let error = setup.error(&hf_lock(&setup));
    assert!(
        error.contains("answers 401") && error.contains("HF_TOKEN"),
        "{error}"
    );
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn the_command_takes_endpoint_and_token_from_the_environment() {
    let server = Server::start(|_, _| Answer::new(200, &content()));
    let setup = Setup::new();
    let lock = hf_lock(&setup);
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(["fetch", "--lock"])
            .arg(&lock)
            .arg("--store")
            .arg(&setup.settings.store);
        command
            .env("HF_ENDPOINT", &server.url)
            .env("HF_TOKEN", "hf_secret");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (stdout, stderr) = run();
    assert_eq!(stdout, "fetched 1 file, 1200000 bytes\n");
    assert_eq!(stderr, "model: fetching 1 of 1 files, 1200000 bytes, MIT\n");
    assert_eq!(
        server.requests()[0].header("authorization"),
        Some("Bearer hf_secret")
    );
    assert_eq!(
        run(),
        (
            "nothing to fetch: 1 file there and intact\n".to_owned(),
            String::new()
        )
    );
}
