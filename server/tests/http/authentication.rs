//! Keys of callers and tokens of operators.

use std::io::{Read as _, Write as _};
use std::path::Path;

use outrider_server::audit::AuditLog;
use outrider_server::auth::{self, KeyRing};
use outrider_server::http::Settings;
use serde_json::json;

use crate::fake::FakeBackend;
use crate::server::{Reply, TestServer};

const ALICE: &str = "outrider-a11ce-a11ce-a11ce-a11ce-a11ce";
const BOB: &str = "outrider-b0bb0bb0bb0bb0bb0bb0bb0bb0bb0b";
const OPERATOR: &str = "outrider-0pe7a7070pe7a7070pe7a707";

fn ring(dir: &Path, keys: &[(&str, &str)]) -> KeyRing {
    let lines: Vec<String> = keys
        .iter()
        .map(|(name, secret)| auth::line_of(name, secret).unwrap())
        .collect();
    let path = dir.join("keys");
    std::fs::write(&path, lines.join("\n")).unwrap();
    KeyRing::read(&path).unwrap()
}

fn settings() -> Settings {
    let dir = tempfile::tempdir().unwrap();
    Settings {
        api_keys: Some(ring(dir.path(), &[("alice", ALICE), ("bob", BOB)])),
        admin_tokens: Some(ring(dir.path(), &[("operator", OPERATOR)])),
        ..TestServer::settings()
    }
}

fn bearer(secret: &str) -> String {
    format!("Bearer {secret}")
}

fn refused(reply: &Reply) -> String {
    let error = &reply.json()["error"];
    format!(
        "{} {} {} {} www-authenticate: {}\n    {}\n",
        reply.status,
        error["type"].as_str().unwrap(),
        error["code"].as_str().unwrap(),
        error["param"],
        reply.header("www-authenticate").unwrap(),
        error["message"].as_str().unwrap()
    )
}

#[test]
fn without_a_known_key_nothing_is_answered() {
    let server = TestServer::with(FakeBackend::new(), settings());
    let body = json!({"model": "fake", "prompt": "hi"}).to_string();
    let json_type = ("content-type", "application/json");
    let mut answers = std::collections::BTreeSet::new();
    for (method, path) in [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake"),
        ("DELETE", "/v1/models"),
        ("GET", "/v1/nothing"),
    ] {
        for authorization in [
            None,
            Some(String::new()),
            Some("Basic YWxpY2U6".to_owned()),
            Some(ALICE.to_owned()),
            Some(bearer("")),
            Some(bearer("alice")),
            Some(bearer(&ALICE[1..])),
            Some(bearer(&ALICE.to_uppercase())),
            Some(bearer(OPERATOR)),
        ] {
            let mut headers = vec![json_type];
            headers.extend(
                authorization
                    .as_ref()
                    .map(|value| ("authorization", value.as_str())),
            );
            let body = if method == "POST" { body.as_str() } else { "" };
            let reply = server.ask(method, path, &headers, body);
            assert!(reply.header("x-request-id").is_some());
            answers.insert(refused(&reply));
        }
    }
    insta::assert_snapshot!(Vec::from_iter(answers).concat());
    assert!(server.backend.requests().is_empty());
}

#[test]
fn a_key_is_asked_for_before_a_head_is_judged_and_the_connection_ends_either_way() {
    let server = TestServer::with(FakeBackend::new(), settings());
    let alice = format!("authorization: {}\n", bearer(ALICE));
    for (authorization, status) in [("", "401"), (&alice, "400")] {
        let mut stream = server.connect();
        let head = format!("GET /v1/models HTTP/1.1\nhost: x\n{authorization}\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
}

#[test]
fn two_keys_in_one_request_are_none() {
    let server = TestServer::with(FakeBackend::new(), settings());
    let (alice, bob) = (bearer(ALICE), bearer(BOB));
    let headers = [("authorization", alice.as_str()), ("authorization", &bob)];
    assert_eq!(server.ask("GET", "/v1/models", &headers, "").status, 401);
}

#[test]
fn the_name_of_the_key_is_the_caller() {
    let server = TestServer::with(FakeBackend::new(), settings());
    let body = json!({"model": "fake", "prompt": "hi"}).to_string();
    for (secret, name) in [(ALICE, "alice"), (BOB, "bob")] {
        let authorization = bearer(secret);
        let headers = [
            ("authorization", authorization.as_str()),
            ("content-type", "application/json"),
        ];
        let reply = server.ask("POST", "/v1/completions", &headers, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let requests = server.backend.requests();
        assert_eq!(requests.last().unwrap().caller.as_ref(), name);
    }
}

#[test]
fn other_keys_hold_from_the_moment_they_are_put_in_place() {
    let server = TestServer::with(FakeBackend::new(), settings());
    let status = |secret| {
        let authorization = bearer(secret);
        let headers = [("authorization", authorization.as_str())];
        server.ask("GET", "/v1/models", &headers, "").status
    };
    assert_eq!((status(ALICE), status(BOB)), (200, 200));
    let dir = tempfile::tempdir().unwrap();
    server.state.apply(Settings {
        api_keys: Some(ring(dir.path(), &[("bob", BOB)])),
        ..settings()
    });
    assert_eq!((status(ALICE), status(BOB)), (401, 200));
}

#[test]
fn operators_need_a_token_and_probes_do_not() {
    let server = TestServer::with(FakeBackend::new().with_draft(), settings());
    let operator = bearer(OPERATOR);
    let alice = bearer(ALICE);
    let json_type = ("content-type", "application/json");
    for (method, path, body) in [
        ("GET", "/metrics", ""),
        ("GET", "/admin/speculation", ""),
        ("PUT", "/admin/speculation", "{\"enabled\": false}"),
    ] {
        for headers in [vec![json_type], vec![json_type, ("authorization", &alice)]] {
            let reply = server.ask(method, path, &headers, body);
            assert_eq!(
                (reply.status, reply.code()),
                (401, "invalid_api_key".to_owned()),
                "{path}"
            );
        }
    }
    let state = |headers: &[_]| server.ask("GET", "/admin/speculation", headers, "").ok();
    let authorized = [json_type, ("authorization", operator.as_str())];
    assert_eq!(
        state(&authorized)["enabled"],
        true,
        "a refused switch is none"
    );
    let off = server.ask(
        "PUT",
        "/admin/speculation",
        &authorized,
        "{\"enabled\": false}",
    );
    assert_eq!(off.ok()["enabled"], false);
    assert_eq!(server.ask("GET", "/metrics", &authorized, "").status, 200);
    for probe in ["/livez", "/readyz"] {
        assert_eq!(server.admin(probe).status, 200, "{probe}");
    }
}

#[test]
fn without_keys_a_name_that_leads_here_is_not_answered() {
    let server = TestServer::with(
        FakeBackend::new(),
        Settings {
            local_hosts: true,
            local_admin_hosts: true,
            ..TestServer::settings()
        },
    );
    for path in ["/v1/models", "/livez", "/metrics", "/admin/speculation"] {
        for (host, status) in [
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("evil.example:8000", 421),
        ] {
            let reply = server.ask("GET", path, &[("host", host)], "");
            assert_eq!(reply.status, status, "{path} {host}: {}", reply.body);
            if status == 421 {
                assert_eq!(reply.code(), "misdirected_request");
            }
        }
    }
}

#[test]
fn who_is_turned_away_while_the_server_goes_down_is_known_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let log = AuditLog::open(&outrider_server::config::Audit {
        path: path.clone(),
        prompt_text: false,
        max_file_bytes: 1 << 20,
        max_files: 2,
    })
    .unwrap();
    let server = TestServer::audited(FakeBackend::new(), log.clone());
    server.state.apply(settings());
    server.drain.begin();
    let reply = server.ask(
        "POST",
        "/v1/completions",
        &[("authorization", &bearer(ALICE))],
        "",
    );
    assert_eq!(reply.status, 503, "{}", reply.body);
    actix_web::rt::System::new().block_on(server.drain.idle());
    log.end();
    let line = std::fs::read_to_string(path).unwrap();
    assert!(line.contains("\"caller\":\"alice\""), "{line}");
}
