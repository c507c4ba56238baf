//! Pages of other origins, which browsers let call only where the server says so.

use outrider_server::http::Connections;
use serde_json::json;

use crate::fake::FakeBackend;
use crate::server::{Reply, TestServer};

const ALLOWED: &str = "https://chat.example.com";

fn preflight(server: &TestServer, origin: &str) -> Reply {
    let headers = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,content-type,x-stainless-lang",
        ),
    ];
    server.ask("OPTIONS", "/v1/completions", &headers, "")
}

fn post(server: &TestServer, origin: &str) -> Reply {
    let body = json!({"model": "fake", "prompt": "hi"}).to_string();
    let headers = [("origin", origin), ("content-type", "application/json")];
    server.ask("POST", "/v1/completions", &headers, &body)
}

#[test]
fn no_page_may_call_unless_its_origin_is_named() {
    let closed = TestServer::start(FakeBackend::new());
    assert_eq!(preflight(&closed, ALLOWED).status, 405);
    let open = TestServer::connected(
        FakeBackend::new(),
        TestServer::settings(),
        Connections {
            cors_allowed_origins: vec![ALLOWED.to_owned(), "http://localhost:3000".to_owned()],
            ..Connections::default()
        },
    );
    for (server, origin, allowed) in [
        (&closed, ALLOWED, None),
        (&open, ALLOWED, Some(ALLOWED)),
        (
            &open,
            "http://localhost:3000",
            Some("http://localhost:3000"),
        ),
        (&open, "http://localhost:3001", None),
        (&open, "https://chat.example.com.evil.example", None),
        (&open, "null", None),
    ] {
        let granted = |reply: &Reply| {
            reply
                .header("access-control-allow-origin")
                .map(str::to_owned)
        };
        let asked = preflight(server, origin);
        assert_eq!(granted(&asked).as_deref(), allowed, "{origin}");
        let answer = post(server, origin);
        assert_eq!(granted(&answer).as_deref(), allowed, "{origin}");
        assert!(answer.header("access-control-allow-credentials").is_none());
    }
    let granted = preflight(&open, ALLOWED);
    assert_eq!(granted.status, 200);
    let headers = granted.header("access-control-allow-headers").unwrap();
    assert!(headers.contains("x-stainless-lang"), "{headers}");
    // The admin interface is for no page at all.
    let headers = [("origin", ALLOWED)];
    let probe = open.ask("GET", "/readyz", &headers, "");
    assert!(probe.header("access-control-allow-origin").is_none());
}

#[test]
fn a_page_sees_what_is_wrong_with_its_request() {
    let server = TestServer::connected(
        FakeBackend::new(),
        TestServer::settings(),
        Connections {
            cors_allowed_origins: vec![ALLOWED.to_owned()],
            ..Connections::default()
        },
    );
    let reply = server.ask("GET", "/v1/models?limit=1", &[("origin", ALLOWED)], "");
    assert_eq!(reply.status, 400);
    assert_eq!(reply.header("access-control-allow-origin"), Some(ALLOWED));
}
