use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use outrider_rollout::gateway::Gateway as _;
use outrider_rollout::gateway::haproxy::Haproxy;

use crate::world::{Callers, Process, Version, free_address, shipped};

fn start(directory: &Path, address: SocketAddr, stable: &Version, canary: &Version) -> Process {
    let port = |version: &Version| version.address.port().to_string();
    Process::start(
        Command::new("haproxy")
            .args(["-db", "-f"])
            .arg(shipped("haproxy/outrider.cfg"))
            .env("OUTRIDER_GATEWAY", address.to_string())
            .env("OUTRIDER_STABLE", stable.address.to_string())
            .env("OUTRIDER_STABLE_ADMIN_PORT", port(stable))
            .env("OUTRIDER_CANARY", canary.address.to_string())
            .env("OUTRIDER_CANARY_ADMIN_PORT", port(canary))
            .env("OUTRIDER_SPLIT_MAP", directory.join("split.map"))
            .env("OUTRIDER_GATEWAY_SOCKET", directory.join("haproxy.sock"))
            .env("OUTRIDER_GATEWAY_METRICS", free_address().to_string()),
    )
}

#[test]
fn haproxy_moves_no_caller_back_keeps_the_share_over_a_restart_and_streams_over_a_rollback() {
    let directory = tempfile::tempdir().unwrap();
    let (stable, canary) = (Version::start("stable"), Version::start("canary"));
    fs::copy(
        shipped("haproxy/split.map"),
        directory.path().join("split.map"),
    )
    .unwrap();
    let address = free_address();
    let process = start(directory.path(), address, &stable, &canary);
    let gateway = Haproxy {
        socket: directory.path().join("haproxy.sock"),
        map: directory.path().join("split.map"),
    };
    let callers = Callers::of(address);
    callers.wait();
    callers.see_that_nobody_moves_back(&gateway);
    callers.see_that_a_stream_outlives_a_rollback(&gateway, &canary);

    // What is only in the file or only in the process is no share.
    fs::write(&gateway.map, "canary 7\n").unwrap();
    assert_eq!(gateway.percent().unwrap(), None);
    let before = fs::read(&gateway.map).unwrap();
    assert!(gateway.describe(25).contains("canary 25"));
    assert_eq!(
        fs::read(&gateway.map).unwrap(),
        before,
        "a dry run changed the map"
    );

    gateway.set(25).unwrap();
    let served: Vec<_> = (0..100).map(|caller| callers.ask(caller, None)).collect();
    drop(process);
    assert!(
        gateway.set(50).is_err(),
        "nothing runs that could confirm it"
    );
    assert_eq!(
        fs::read_to_string(&gateway.map).unwrap().lines().last(),
        Some("canary 25")
    );
    let _process = start(directory.path(), address, &stable, &canary);
    callers.wait();
    assert_eq!(gateway.percent().unwrap(), Some(25));
    let again: Vec<_> = (0..100).map(|caller| callers.ask(caller, None)).collect();
    assert_eq!(again, served);
}
