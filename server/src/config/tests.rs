//! Every fault a configuration can have, as a person reads it, and the order of the layers.

use std::path::PathBuf;

use super::*;

const LIBRARY: &str = "OUTRIDER__SERVING__RUNTIME__ONNXRUNTIME_LIBRARY";

struct Case {
    file: Option<&'static str>,
    environment: Vec<(&'static str, &'static str)>,
    flags: Vec<(&'static str, &'static str)>,
}

impl Case {
    fn file(text: &'static str) -> Self {
        Self {
            file: Some(text),
            environment: Vec::new(),
            flags: Vec::new(),
        }
    }

    fn load(&self) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = self.file.map(|text| {
            let path = dir.path().join("server.yaml");
            std::fs::write(&path, text).unwrap();
            path
        });
        let pairs = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
                .collect()
        };
        let sources = Sources {
            file,
            environment: pairs(&self.environment),
            flags: pairs(&self.flags),
        };
        let directory = format!("{}/", dir.path().display());
        Config::load(&sources).map_err(|error| error.to_string().replace(&directory, ""))
    }

    fn fault(&self) -> String {
        match self.load() {
            Ok(_) => panic!("this was taken: {:?}", self.file),
            Err(fault) => fault,
        }
    }
}

/// The least that a configuration needs.
fn minimal() -> Case {
    Case {
        file: None,
        environment: vec![(LIBRARY, "ort.so")],
        flags: vec![("serving.bundle", "model")],
    }
}

#[test]
fn defaults_hold_where_no_layer_says_otherwise() {
    let config = minimal().load().unwrap();
    insta::assert_snapshot!(config.to_yaml());
}

#[test]
fn the_effective_configuration_is_a_configuration_file_again() {
    let first = minimal().load().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("effective.yaml");
    std::fs::write(&file, first.to_yaml()).unwrap();
    let again = Config::load(&Sources {
        file: Some(file),
        ..Sources::default()
    });
    assert_eq!(again.unwrap().to_yaml(), first.to_yaml());
}

#[test]
fn a_flag_beats_the_environment_and_the_environment_beats_the_file() {
    let mut case = minimal();
    case.file = Some(
        "serving:\n  runtime:\n    max_concurrency: 2\n    queue_capacity: 3\n    prefill_chunk_tokens: 4\n  model_name: from-file\n",
    );
    case.environment
        .push(("OUTRIDER__SERVING__RUNTIME__QUEUE_CAPACITY", "30"));
    case.environment
        .push(("OUTRIDER__SERVING__RUNTIME__PREFILL_CHUNK_TOKENS", "40"));
    case.environment
        .push(("OUTRIDER__SERVING__MODEL_NAME", "1.0"));
    case.flags
        .push(("serving.runtime.prefill_chunk_tokens", "400"));
    case.flags
        .push(("serving.runtime.max_completions_per_request", "5"));
    let config = case.load().unwrap();
    assert_eq!(config.runtime.max_concurrency, 2);
    assert_eq!(config.runtime.queue_capacity, 30);
    assert_eq!(config.runtime.prefill_chunk_tokens, 400);
    // Text stays text, even where it looks like a number.
    assert_eq!(config.model_name.as_deref(), Some("1.0"));

    let origins: Vec<String> = config
        .overrides()
        .map(|(path, value, origin)| format!("{path} = {value} ({origin})"))
        .map(|line| line.split("file ").next().unwrap_or_default().to_owned())
        .collect();
    insta::assert_snapshot!(origins.join("\n"));
}

#[test]
fn beyond_loopback_a_listener_needs_its_keys_or_leave_to_do_without() {
    for (listener, file) in [
        ("listen", "api_keys_path"),
        ("admin_listen", "admin_tokens_path"),
    ] {
        let (listener, file) = (
            format!("serving.{listener}"),
            format!("serving.auth.{file}"),
        );
        let load = |flag: Option<(&str, &str)>| {
            let mut case = minimal();
            let listener: &'static str = listener.clone().leak();
            case.flags.push((listener, "0.0.0.0:9000"));
            if let Some((key, value)) = flag {
                case.flags
                    .push((key.to_owned().leak(), value.to_owned().leak()));
            }
            case.load()
        };
        assert!(load(None).is_err());
        assert!(load(Some((&file, "keys"))).is_ok());
        assert!(load(Some(("serving.auth.allow_unauthenticated", "true"))).is_ok());
    }
    let mut local = minimal();
    local
        .flags
        .push(("serving.listen", "[::ffff:127.0.0.1]:9000"));
    assert!(local.load().is_ok());
}

#[test]
fn logs_need_files_of_their_own_and_sockets_short_paths() {
    let load = |flags: &[(&'static str, &'static str)]| {
        let mut case = minimal();
        case.flags.extend_from_slice(flags);
        case.load().map(|_| ()).map_err(|error| error.to_string())
    };
    let (log, audit) = ("serving.logging.path", "serving.audit.path");
    assert!(load(&[(log, "/var/log/a"), (audit, "/var/log/b")]).is_ok());
    let error = load(&[(log, "/var/log/a"), (audit, "/var/log/./a")]).unwrap_err();
    assert!(error.contains("the two logs need their own"), "{error}");
    for log in [log, audit] {
        let keys = ("serving.auth.api_keys_path", "/etc/outrider/keys");
        let error = load(&[keys, (log, "/etc/outrider/./keys")]).unwrap_err();
        assert!(error.contains(log), "{error}");
        assert!(error.contains("a file that the server reads"), "{error}");
    }
    let socket = |length: usize| &*format!("unix:/{}", "s".repeat(length - 1)).leak();
    let listen = "serving.admin_listen";
    assert!(load(&[(listen, socket(107))]).is_ok());
    let error = load(&[(listen, socket(108))]).unwrap_err();
    assert!(error.contains("longer than the system allows"), "{error}");
}

#[test]
fn origins_are_taken_as_browsers_send_them() {
    let mut case = minimal();
    case.flags.push((
        "serving.http.cors_allowed_origins",
        "https://chat.example.com, http://localhost:3000,http://[::1]:8080,chrome-extension://abc",
    ));
    assert_eq!(
        case.load().unwrap().http.cors_allowed_origins,
        [
            "https://chat.example.com",
            "http://localhost:3000",
            "http://[::1]:8080",
            "chrome-extension://abc"
        ]
    );
    assert!(
        minimal()
            .load()
            .unwrap()
            .http
            .cors_allowed_origins
            .is_empty()
    );
}

#[test]
fn changes_are_told_by_key_whatever_layer_they_come_from() {
    let mut case = minimal();
    let before = case.load().unwrap();
    case.flags.push(("serving.runtime.queue_capacity", "64"));
    case.flags.push(("serving.logging.level", "debug"));
    case.flags.push(("serving.listen", "127.0.0.1:9999"));
    let changed: Vec<(&str, bool)> = before
        .changes_to(&case.load().unwrap())
        .into_iter()
        .map(|key| (key.path, key.changes_while_running()))
        .collect();
    // The queue is as long as it was.
    assert_eq!(
        changed,
        [("serving.listen", false), ("serving.logging.level", true)]
    );
}

#[test]
fn keys_that_change_while_running_are_keys() {
    let count = KEYS
        .iter()
        .filter(|key| key.changes_while_running())
        .count();
    assert_eq!(count, keys::CHANGE_WHILE_RUNNING.len());
}

#[test]
fn a_later_flag_for_the_same_key_wins() {
    let mut case = minimal();
    case.flags.push(("serving.runtime.max_concurrency", "2"));
    case.flags.push(("serving.runtime.max_concurrency", "3"));
    assert_eq!(case.load().unwrap().runtime.max_concurrency, 3);
}

#[test]
fn target_model_path_is_another_name_for_bundle() {
    let mut case = minimal();
    case.flags = vec![("serving.target_model_path", "elsewhere")];
    assert_eq!(case.load().unwrap().bundle, PathBuf::from("elsewhere"));
}

#[test]
fn target_and_draft_may_both_be_named_when_they_are_one_bundle() {
    for draft in ["elsewhere", "elsewhere/", "./elsewhere"] {
        let mut case = minimal();
        case.flags = vec![
            ("serving.target_model_path", "elsewhere"),
            ("serving.draft_model_path", draft),
        ];
        assert_eq!(case.load().unwrap().bundle, PathBuf::from("elsewhere"));
    }
}

#[test]
fn target_and_draft_are_one_bundle_when_their_paths_lead_to_one_directory() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir_all(place("bundle/graph")).unwrap();
    std::fs::create_dir(place("other")).unwrap();
    std::os::unix::fs::symlink("bundle", place("link")).unwrap();
    for (draft, is_same) in [
        ("link", true),
        ("other/../bundle", true),
        ("link/graph/..", true),
        ("other", false),
        ("link/graph", false),
        ("none", false),
    ] {
        let flags = [
            ("serving.target_model_path", place("bundle")),
            ("serving.draft_model_path", place(draft)),
            ("serving.runtime.onnxruntime_library", "library".to_owned()),
        ];
        let loaded = Config::load(&Sources {
            flags: flags.map(|(key, path)| (key.to_owned(), path)).to_vec(),
            ..Sources::default()
        });
        assert_eq!(loaded.is_ok(), is_same, "{draft}: {loaded:?}");
    }
}

#[test]
fn a_draft_can_be_required_and_start_switched_off() {
    let mut case = minimal();
    case.file = Some("serving:\n  speculative: {required: true, enabled: false}\n");
    let speculative = case.load().unwrap().speculative;
    assert!(speculative.required && !speculative.enabled);
}

#[test]
fn null_and_an_empty_file_mean_the_default() {
    let mut case = minimal();
    for text in [
        "",
        "serving:\n",
        "serving:\n  runtime:\n  listen: null\n  logging: {level: ~}\n",
    ] {
        case.file = Some(text);
        let config = case.load().unwrap();
        assert_eq!(config.listen.port(), 8080, "{text:?}");
        assert_eq!(config.logging.level, tracing::Level::INFO, "{text:?}");
    }
}

#[test]
fn every_fault_of_every_layer_is_reported_at_once() {
    let case = Case {
        file: Some(
            "serving:\n  listen: localhost\n  speculativ: {enabled: true}\n  runtime:\n    max_concurency: 4\n    max_concurrency: 0\n    \
             kv_cache_ratio: 1.5\n  logging: verbose\n",
        ),
        environment: vec![
            ("OUTRIDER__SERVING__RUNTIME__QUEUE_CAPACITY", "many"),
            (
                "OUTRIDER__SERVING__API_KEY",
                "a-secret-that-must-not-be-shown",
            ),
            ("OUTRIDER_UNRELATED", "not ours"),
            ("OUTRIDER_SERVING_RUNTIME_QUEUE_CAPACITY", "a-secret"),
            ("OUTRIDER_SERVING__LISTEN", "a-secret"),
            ("OUTRIDER_SERVING_API_KEY", "a-secret"),
        ],
        flags: vec![
            ("serving.shutdown_grace_ms", "-1"),
            ("serving.speculative.enabled", "maybe"),
        ],
    };
    let faults = case.fault();
    assert!(!faults.contains("secret"), "{faults}");
    insta::assert_snapshot!(faults);
}

#[test]
fn what_is_secret_in_a_url_is_not_in_the_log() {
    let mut case = minimal();
    case.flags.push((
        "serving.telemetry.otlp_endpoint",
        "http://user:secret@collector/v1/traces?token=secret",
    ));
    let config = case.load().unwrap();
    let overrides: Vec<_> = config.overrides().map(|(_, value, _)| value).collect();
    for logged in [config.to_json(), overrides.join(" ")] {
        assert!(
            logged.contains("http://…@collector/v1/traces?…"),
            "{logged}"
        );
        assert!(!logged.contains("secret"), "{logged}");
    }
    assert!(config.otlp_endpoint.unwrap().contains("secret"));
}

#[test]
fn a_password_in_a_url_that_is_wrong_is_not_shown() {
    for (line, shown) in [
        (
            "telemetry: {otlp_endpoint: \"ftp://user:secret@collector/x\"}",
            "is \"ftp://…@collector/x\"",
        ),
        (
            "telemetry: {otlp_endpoint: \"user:secret@collector:4318\"}",
            "is \"…@collector:4318\"",
        ),
        (
            "telemetry: {otlp_endpoint: \"http://user:se@cret@\"}",
            "is \"http://…@\"",
        ),
        (
            "telemetry: {otlp_endpoint: \"ftp://collector/x?token=secret\"}",
            "is \"ftp://collector/x?…\"",
        ),
    ] {
        let fault = fault_of(line);
        assert!(fault.contains(shown), "{fault}");
        assert!(
            !fault.contains("cret") && !fault.contains("user"),
            "{fault}"
        );
    }
}

#[test]
fn logs_are_not_written_into_the_bundle_which_may_hold_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    std::os::unix::fs::symlink(&bundle, dir.path().join("link")).unwrap();
    let load = |key: &str, file: &str| {
        let flags = [
            ("serving.bundle", bundle.clone()),
            ("serving.runtime.onnxruntime_library", "library".into()),
            (key, dir.path().join(file)),
        ];
        let sources = Sources {
            flags: flags
                .iter()
                .map(|(key, path)| ((*key).to_owned(), path.display().to_string()))
                .collect(),
            ..Sources::default()
        };
        Config::load(&sources).map_err(|error| error.to_string())
    };
    for key in ["serving.logging.path", "serving.audit.path"] {
        for inside in ["bundle/x.log", "bundle/./none/x.log", "link/x.log"] {
            let fault = load(key, inside).unwrap_err();
            assert!(fault.contains("is inside the bundle"), "{inside}: {fault}");
        }
        for outside in ["x.log", "bundle.log", "bundle/../x.log"] {
            assert!(load(key, outside).is_ok(), "{outside}");
        }
    }
}

/// One line of a file under `serving:`, set beside the least that is needed.
fn fault_of(line: &'static str) -> String {
    let text = format!("serving:\n  {}\n", line.replace('\n', "\n  "));
    let mut case = minimal();
    case.file = Some(text.leak());
    let fault = case.fault();
    let mut lines = fault.lines();
    let head = lines.next().unwrap_or_default();
    let rest: Vec<&str> = lines.map(str::trim).collect();
    if rest.is_empty() {
        head.to_owned()
    } else {
        rest.join("\n")
    }
}

#[test]
fn each_wrong_value_is_named_with_what_is_allowed() {
    let lines = [
        "listen: 8080",
        "listen: \"127.0.0.1\"",
        "listen: \"::1:8080:\"",
        "admin_listen: \"127.0.0.1:8080\"",
        "admin_listen: \"unix:admin.sock\"",
        "http: {cors_allowed_origins: \"*\"}",
        "http: {cors_allowed_origins: \"https://a.example,https://b.example/\"}",
        "http: {cors_allowed_origins: \"https://A.example\"}",
        "http: {cors_allowed_origins: \"a.example\"}",
        "http: {cors_allowed_origins: \"https://a.example:port\"}",
        "http: {cors_allowed_origins: \"https://user@a.example\"}",
        "http: {max_connections: 0}",
        "http: {header_timeout_ms: 0}",
        "tls: {certificate_path: certificate.pem}",
        "tls: {private_key_path: key.pem}",
        "runtime: {stall_limit_ms: 30000}",
        "listen: \"0.0.0.0:8080\"",
        "listen: \"[::]:8080\"\nauth: {admin_tokens_path: tokens}",
        "admin_listen: \"192.0.2.1:8081\"\nauth: {api_keys_path: keys}",
        "model_name: \"\"",
        "model_name: 7",
        "model_name: [a, b]",
        "target_model_path: model",
        "draft_model_path: draft",
        "draft_model_path: \"\"",
        "shutdown_grace_ms: 3600001",
        "shutdown_grace_ms: 1.5",
        "shutdown_grace_ms: \"30000\"",
        "speculative: {enabled: \"yes\"}",
        "speculative: {enabled: 1}",
        "speculative: {required: 1}",
        "speculative: {draft_block_size: 1}",
        "speculative: {draft_block_size: 65}",
        "speculative: {candidate_topk: 0}",
        "speculative: {candidate_topk: 65}",
        "speculative: {acceptance_strategy: typical}",
        "runtime: {execution_provider: tensorrt}",
        "runtime: {max_concurrency: 1025}",
        "runtime: {context_tokens: 1}",
        "runtime: {kv_cache_ratio: 0}",
        "runtime: {kv_cache_ratio: .nan}",
        "runtime: {prefill_chunk_tokens: 1}",
        "runtime: {intra_op_threads: 0}",
        "runtime: {queue_capacity: 0}",
        "runtime: {max_completions_per_request: 0}",
        "runtime: {queue_capacity: 4}",
        "runtime: {max_completions_per_request: 100}",
        "runtime: {request_body_limit_bytes: 10}",
        "runtime: {heartbeat_limit_ms: 1}",
        "runtime: fast",
        "logging: {level: loud}",
        "logging: {format: yaml}",
        "logging: {path: 1}",
        "telemetry: {otlp_endpoint: \"127.0.0.1:4318\"}",
        "telemetry: {otlp_endpoint: \"ftp://collector\"}",
        "telemetry: {otlp_endpoint: \"http://\"}",
        "loging: {level: info}",
        "max_concurrency: 4",
        "\"runtime.max_concurrency\": 4",
        "something_else: 4",
    ];
    let report: Vec<String> = lines
        .iter()
        .map(|line| format!("{line}\n    {}", fault_of(line)))
        .collect();
    insta::assert_snapshot!(report.join("\n"));
}

#[test]
fn a_file_that_is_no_mapping_or_no_yaml_is_named() {
    let texts = [
        "- a\n- b\n",
        "just text",
        "serving: [",
        "serving:\n  listen: 1\n  listen: 2\n",
    ];
    let report: Vec<String> = texts
        .iter()
        .map(|text| format!("{text:?}\n    {}", Case::file(text).fault()))
        .collect();
    insta::assert_snapshot!(report.join("\n"));
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let sources = Sources {
        file: Some("nowhere/server.yaml".into()),
        ..Sources::default()
    };
    insta::assert_snapshot!(Config::load(&sources).unwrap_err());
}

#[test]
fn the_reference_file_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/server.yaml");
    let checked_in = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        checked_in == reference(),
        "configs/server.yaml differs; write it again with: outrider-server --reference-config > configs/server.yaml"
    );
}

#[test]
fn the_reference_file_holds_every_key_and_only_defaults() {
    let mut case = minimal();
    case.file = Some(reference().leak());
    let from_reference = case.load().unwrap();
    assert_eq!(
        from_reference.to_yaml(),
        minimal().load().unwrap().to_yaml()
    );

    // With every commented-out key switched on, each must be known; only the values are missing.
    let everything: String = reference()
        .lines()
        .map(|line| {
            match line
                .trim_start()
                .strip_prefix("# ")
                .filter(|rest| rest.ends_with(':') && !rest.contains(' '))
            {
                Some(key) => format!("{}{key}\n", &line[..line.len() - line.trim_start().len()]),
                None => format!("{line}\n"),
            }
        })
        .collect();
    let yaml: serde_yaml::Value = serde_yaml::from_str(&everything).unwrap();
    for key in KEYS {
        let mut value = Some(&yaml);
        for part in key.path.split('.') {
            value = value.and_then(|value| value.get(part));
        }
        assert!(value.is_some(), "{} is not in the reference file", key.path);
    }
}

#[test]
fn every_default_is_an_allowed_value() {
    for key in KEYS {
        if let keys::Default::Value(text) = key.default {
            assert!(read_text(key.kind, text).is_some(), "{} = {text}", key.path);
        }
    }
}

#[test]
fn what_must_be_set_is_asked_for() {
    let nothing = Case {
        file: None,
        environment: Vec::new(),
        flags: Vec::new(),
    };
    insta::assert_snapshot!(nothing.fault());
}
