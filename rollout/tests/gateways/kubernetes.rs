use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use outrider_rollout::gateway::Gateway as _;
use outrider_rollout::gateway::kubernetes::Route;
use outrider_rollout::plan::Kubernetes;
use serde_json::Value;

use crate::world::shipped;

/// Stands for a cluster: it keeps one route in a file, and lets the real kubectl change it. It knows nothing but what the driver should say.
const CLUSTER: &str = r#"#!/bin/sh
set -eu
cd "$(dirname "$0")"
test "$1 $2" = "--namespace outrider"
test "$4 $5" = "httproute outrider"
verb=$3
shift 5
case $verb in
get)
    test "$*" = "--output json"
    cat route.json
    ;;
patch)
    kubectl patch --local --filename route.json "$@" > patched.json
    mv patched.json route.json
    cat route.json
    ;;
esac
"#;

#[test]
fn the_weights_of_a_route_change_in_one_patch_that_is_refused_when_services_changed_places() {
    let directory = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(shipped("kubernetes/canary/route.yaml")).unwrap();
    let shipped: Value = serde_yaml::from_str(&text).unwrap();
    let file = directory.path().join("route.json");
    let write = |route: &Value| fs::write(&file, route.to_string()).unwrap();
    write(&shipped);
    let cluster = directory.path().join("cluster");
    fs::write(&cluster, CLUSTER).unwrap();
    fs::set_permissions(&cluster, fs::Permissions::from_mode(0o755)).unwrap();
    let mut route = Route {
        settings: Kubernetes {
            address: "http://gateway".to_owned(),
            kubectl: vec![cluster.to_str().unwrap().to_owned()],
            namespace: "outrider".to_owned(),
            route: "outrider".to_owned(),
            stable_service: "outrider".to_owned(),
            canary_service: "outrider-canary".to_owned(),
        },
    };
    assert_eq!(route.percent().unwrap(), Some(0));
    assert!(route.describe(5).contains("5 for outrider-canary"));
    assert_eq!(
        route.percent().unwrap(),
        Some(0),
        "a dry run changed the route"
    );
    for percent in [1, 50, 100, 0, 25] {
        route.set(percent).unwrap();
        assert_eq!(route.percent().unwrap(), Some(percent));
    }
    // Nothing but the weights of the rule that has both services.
    let mut now: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    for (service, weight) in [(0, 75), (1, 25)] {
        let pointer = format!("/spec/rules/1/backendRefs/{service}/weight");
        assert_eq!(now.pointer(&pointer).unwrap(), weight);
        *now.pointer_mut(&pointer).unwrap() = shipped.pointer(&pointer).unwrap().clone();
    }
    assert_eq!(now, shipped);

    // The services change places between the driver's look and its patch.
    let backends = "/spec/rules/1/backendRefs";
    let mut swapped = shipped.clone();
    swapped
        .pointer_mut(backends)
        .unwrap()
        .as_array_mut()
        .unwrap()
        .reverse();
    fs::write(directory.path().join("swapped.json"), swapped.to_string()).unwrap();
    write(&shipped);
    fs::write(
        &cluster,
        CLUSTER.replace("patch)\n", "patch)\n    cp swapped.json route.json\n"),
    )
    .unwrap();
    let error = format!("{:#}", route.set(50).unwrap_err());
    assert!(error.contains("test"), "{error}");
    assert_eq!(
        serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).unwrap(),
        swapped
    );

    route.settings.canary_service = "other".to_owned();
    let error = route.percent().unwrap_err().to_string();
    assert!(
        error.contains("no rule has both outrider and other"),
        "{error}"
    );
}
