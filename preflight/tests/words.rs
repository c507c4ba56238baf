//! What preflight says of a fault and what the server says when it refuses to start because of it.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use outrider_preflight::checks;
use outrider_preflight::collect::{self, Options};
use outrider_server::config::{Config, Sources};
use outrider_server::launch::Launch;
use outrider_server::lifecycle::Startup;
use outrider_server::loader;
use outrider_server::service::LoadContext;

/// A configuration of nothing that is there, with `settings` above it.
fn sources(dir: &Path, settings: &[(&str, String)]) -> Sources {
    let base = [
        ("serving.bundle", dir.join("bundle").display().to_string()),
        (
            "serving.runtime.onnxruntime_library",
            dir.join("libonnxruntime.so").display().to_string(),
        ),
        ("serving.listen", "127.0.0.1:0".to_owned()),
        ("serving.admin_listen", "127.0.0.1:0".to_owned()),
    ];
    let all = base.iter().chain(settings);
    Sources {
        flags: all
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect(),
        ..Sources::default()
    }
}

/// The words in which a start ends.
fn refusal(sources: &Sources) -> String {
    let config = match Config::load(sources) {
        Ok(config) => config,
        Err(error) => return error.to_string(),
    };
    match Launch::new(config.clone(), sources.clone(), None) {
        Err(error) => error.to_string(),
        Ok(launch) => {
            drop(launch);
            loader::load(LoadContext {
                config: Arc::new(config),
                startup: Arc::new(Startup::default()),
                provide: Box::new(|_| unreachable!("nothing can be served")),
            })
            .unwrap_err()
        }
    }
}

#[test]
fn a_start_is_refused_in_the_words_of_preflight() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    std::fs::write(dir.join("keys"), "no key\n").unwrap();
    std::fs::write(dir.join("file"), "").unwrap();
    let path = |name: &str| dir.join(name).display().to_string();
    let cases: [(&str, Vec<(&str, String)>); 9] = [
        (
            "config.faults",
            vec![("serving.runtime.kv_cache_ratio", "2".to_owned())],
        ),
        (
            "config.files",
            vec![("serving.auth.api_keys_path", path("keys"))],
        ),
        (
            "config.files",
            vec![
                ("serving.tls.certificate_path", path("none.pem")),
                ("serving.tls.private_key_path", path("none.key")),
            ],
        ),
        ("host.listen", vec![("serving.listen", taken.clone())]),
        ("host.admin_listen", vec![("serving.admin_listen", taken)]),
        (
            "host.admin_listen",
            vec![("serving.admin_listen", format!("unix:{}", path("file")))],
        ),
        (
            "host.audit",
            vec![("serving.audit.path", path("none/audit.jsonl"))],
        ),
        ("runtime.library", Vec::new()),
        (
            "bundle.manifest",
            vec![("serving.runtime.onnxruntime_library", path("file"))],
        ),
    ];
    for (id, settings) in cases {
        let sources = sources(dir, &settings);
        let facts = collect::collect(&Options {
            sources: sources.clone(),
            quick: true,
            // Nothing is asked of what children would read.
            program: "/nonexistent".into(),
            ..Options::default()
        });
        let findings = checks::run(&facts);
        let finding = findings.iter().find(|finding| finding.id == id).unwrap();
        assert!(finding.remedy.is_some(), "{id}: {finding:?}");
        let refusal = refusal(&sources);
        for line in finding.evidence.lines() {
            // Of a port preflight says who has it as well.
            let line = line.split("; process ").next().unwrap();
            let line = line.trim_start_matches(&format!("{}: ", path("bundle")));
            assert!(
                refusal.contains(line),
                "{id}: {line:?} is not in {refusal:?}"
            );
        }
    }
}
