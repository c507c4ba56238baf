use std::fs;
use std::process::Command;

use outrider_rollout::gateway::Gateway as _;
use outrider_rollout::gateway::nginx::Nginx;

use crate::world::{Callers, Process, Version, free_address, shipped};

#[test]
fn nginx_moves_no_caller_back_refuses_a_broken_configuration_and_keeps_streams_over_a_rollback() {
    let directory = tempfile::tempdir().unwrap();
    let (stable, canary) = (Version::start("stable"), Version::start("canary"));
    let address = free_address();
    let mut text = fs::read_to_string(shipped("nginx/outrider.conf")).unwrap();
    for (from, to) in [
        ("127.0.0.1:8080", stable.address),
        ("127.0.0.1:8090", canary.address),
        ("127.0.0.1:8000", address),
    ] {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, &to.to_string());
    }
    let config = directory.path().join("outrider.conf");
    fs::write(&config, text).unwrap();
    let split = directory.path().join("split.conf");
    fs::copy(shipped("nginx/split.conf"), &split).unwrap();
    let _process = Process::start(
        Command::new("nginx")
            .args(["-g", "daemon off;", "-p"])
            .arg(directory.path())
            .arg("-c")
            .arg(&config),
    );
    let gateway = Nginx {
        program: "nginx".into(),
        prefix: directory.path().to_owned(),
        config: config.clone(),
        split: split.clone(),
        pid: directory.path().join("outrider-nginx.pid"),
        salt: "test".to_owned(),
    };
    let callers = Callers::of(address);
    callers.wait();
    let before = fs::read(&split).unwrap();
    assert!(gateway.describe(25).contains("25% canary;"));
    assert_eq!(
        fs::read(&split).unwrap(),
        before,
        "a dry run changed the split"
    );
    callers.see_that_nobody_moves_back(&gateway);
    callers.see_that_a_stream_outlives_a_rollback(&gateway, &canary);

    gateway.set(25).unwrap();
    let kept = fs::read(&split).unwrap();
    let whole = fs::read_to_string(&config).unwrap();
    fs::write(&config, whole.replace("keepalive 32;", "keepalive many;")).unwrap();
    let error = gateway.set(50).unwrap_err().to_string();
    assert!(error.contains("nginx -t"), "{error}");
    assert_eq!(fs::read(&split).unwrap(), kept);
    assert_eq!(gateway.percent().unwrap(), Some(25));
}
