#!/usr/bin/env bash
# What an image must hold, shown with the tools that will run it: two release builds in two clones, podman, a registry, skopeo, and others' verifiers.
#
#   images/acceptance.sh DIR [STATION...]
#
# DIR is made for clones, layouts and logs, and takes about 8 GB; the stations are clones, run, damage, registry and evidence, in this order.
# It needs root, Debian's podman, runc, skopeo, docker-registry, util-linux, jq and curl, and for `evidence` npm and python3 with venv.
# The inputs are those of this workspace: `cargo xtask image` has run in it, and everything is committed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:?the first argument is a directory}"
dir=$(cd "$1" && pwd)
shift
stations=("$@")
[ ${#stations[@]} -gt 0 ] || stations=(clones run damage registry evidence)

say() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}
# xtask CLONE ARGUMENTS...: the task of a clone.
xtask() {
    local clone=$1
    shift
    (cd "$clone" && CARGO_MANIFEST_DIR="$clone/xtask" "$root/target/debug/xtask" image "$@")
}
# refused WHAT PATTERN COMMAND...: the command must fail and name what is wrong.
refused() {
    local what=$1 pattern=$2
    shift 2
    if "$@" > "$dir/refused.log" 2>&1; then fail "$what was not refused"; fi
    grep -m1 -e "$pattern" "$dir/refused.log" || { cat "$dir/refused.log"; fail "$what: nothing names $pattern"; }
}
# Podman makes a name of the path, so nothing in it may begin with a dot.
layout=$dir/layout
registry=127.0.0.1:5055
weights=opt/outrider/bundle/model.onnx.data
digest_of() { jq -r '.manifests[] | select(.artifactType == null) | .digest' "$1/index.json"; }
# The blob of the layer that holds the target's weights.
weights_blob() {
    local manifest=$1/blobs/sha256/$(digest_of "$1" | cut -d: -f2)
    jq -r --arg path "$weights" '.layers[] | select(.annotations["outrider.file.path"] == $path) | .digest' "$manifest" | cut -d: -f2
}

clones() {
    say "two clones, in other folders, with other umask, times, modes, locale, time zone and user"
    for clone in one deep/er/two; do
        # What was compiled in an earlier run is kept.
        if [ -d "$dir/$clone/.git" ]; then
            git -C "$dir/$clone" fetch --quiet origin HEAD
            git -C "$dir/$clone" reset --quiet --hard FETCH_HEAD
        else
            git clone --quiet "$root" "$dir/$clone"
        fi
        rm -rf "${dir:?}/$clone/.outrider"
        mkdir "$dir/$clone/.outrider"
        (cd "$root/.outrider" && cp -r --parents store bundles/smollm2-135m-instruct-int8* packages "$dir/$clone/.outrider/")
    done
    chmod -R u=rwX,go= "$dir/deep/er/two/.outrider"
    find "$dir/deep/er/two/.outrider" -exec touch -d 2001-02-03 {} +
    (umask 022 && LC_ALL=C TZ=UTC xtask "$dir/one" build --output "$layout") | tee "$dir/one.txt"
    (
        umask 077
        export LC_ALL=tr_TR.UTF-8 TZ=Asia/Kolkata USER=somebody LOGNAME=somebody
        export -f xtask
        export root dir
        unshare --user --map-user=10042 --map-group=10042 bash -c 'id -u && xtask "$dir/deep/er/two" build --output "$dir/two-layout"'
    ) | tee "$dir/two.txt"
    [ "$(digest_of "$layout")" = "$(digest_of "$dir/two-layout")" ] || {
        xtask "$dir/one" diff "$layout" "$dir/two-layout" || true
        fail "the digests differ"
    }
    cmp "$layout/index.json" "$dir/two-layout/index.json" && echo "indexes are equal: $(digest_of "$layout")"
}

containers() {
    printf '%s\n' '[containers]' 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]' 'netns = "host"' \
        '[engine]' 'runtime = "runc"' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' > "$dir/containers.conf"
    CONTAINERS_CONF=$dir/containers.conf podman --root "$dir/podman" --runroot "$dir/podman-run" --storage-driver overlay "$@"
}
# serve IMAGE USER: runs the image without a network, asks it, and stops it.
serve() {
    local image=$1 user=$2 began=$SECONDS id pid
    id=$(containers run --detach --network none --read-only --user "$user:$user" --cap-drop all --security-opt no-new-privileges \
        --env OUTRIDER__SERVING__AUTH__ALLOW_UNAUTHENTICATED=true "$image")
    pid=$(containers inspect --format '{{.State.Pid}}' "$id")
    until nsenter --net --target "$pid" curl --silent --fail http://127.0.0.1:8081/readyz > /dev/null; do
        kill -0 "$pid" 2> /dev/null || { containers logs "$id"; fail "the container of user $user ended"; }
        [ $((SECONDS - began)) -lt 300 ] || fail "the container of user $user is not ready"
        sleep 1
    done
    echo "user $(awk '/^Uid/ {print $2}' "/proc/$pid/status"), capabilities $(awk '/^CapEff/ {print $2}' "/proc/$pid/status"), ready after $((SECONDS - began)) s"
    nsenter --net --target "$pid" curl --silent --show-error --fail-with-body http://127.0.0.1:8080/v1/chat/completions --header 'content-type: application/json' \
        --data '{"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 24, "messages": [{"role": "user", "content": "Name three colours."}]}' |
        tee "$dir/answer-$user.json" | jq -c '[.model, .choices[0].message.content, .usage.completion_tokens]'
    nsenter --net --target "$pid" curl --silent http://127.0.0.1:8080/v1/models > "$dir/models-$user.json"
    local bundle
    bundle=$(containers inspect --format '{{index .Config.Labels "outrider.bundle.digest"}}' "$id")
    grep -q "$bundle" "$dir/models-$user.json" || fail "/v1/models does not have the bundle digest of the label, $bundle"
    containers stop --time 60 "$id" > /dev/null
    echo "stopped with exit code $(containers inspect --format '{{.State.ExitCode}}' "$id")"
    containers rm "$id" > /dev/null
}
run() {
    say "podman: no network, read-only root, no capabilities, two users"
    image=$(containers pull --quiet "oci:$layout:outrider-cpu")
    serve "$image" 10001
    serve "$image" 54321
}

damage() {
    say "a changed byte, an edited lock and a missing layer are refused"
    local clone=$dir/one copy=$dir/damaged blob
    refuse_build() { refused "$1" "$2" xtask "$clone" build --server "$clone/target/x86_64-unknown-linux-gnu/release/outrider-server" --output "$dir/never"; }
    flip() { printf "$(printf '\\x%02x' $((0x$(xxd -s 5000000 -l 1 -p "$1") ^ 1)))" | dd of="$1" bs=1 seek=5000000 conv=notrunc status=none; }
    flip "$clone/.outrider/bundles/smollm2-135m-instruct-int8/model.onnx.data"
    refuse_build "a changed byte of the bundle" "$weights"
    flip "$clone/.outrider/bundles/smollm2-135m-instruct-int8/model.onnx.data"
    cp "$clone/images/cpu.lock.toml" "$dir/lock"
    sed -i "\\|$weights|,+2s|sha256 = \"....|sha256 = \"0000|" "$clone/images/cpu.lock.toml"
    refuse_build "an edited lock" "$weights"
    cp "$dir/lock" "$clone/images/cpu.lock.toml"
    rm -rf "$copy" && cp -r "$layout" "$copy"
    blob=$copy/blobs/sha256/$(weights_blob "$copy")
    flip "$blob"
    refused "a changed byte of a layer" "$weights" xtask "$clone" verify "$copy" --unsigned
    # Podman reads no layer that it has.
    containers rmi --all --force > /dev/null
    refused "a changed byte of a layer" "sha256" containers pull --quiet "oci:$copy:outrider-cpu"
    rm "$blob"
    refused "a missing layer" "$weights" xtask "$clone" verify "$copy" --unsigned
    refused "a missing layer" "$weights" xtask "$clone" push "$registry/never:v1" --layout "$copy"
    # What reaches the disk of a node and changes there is seen by the server, which hashes what it loads.
    local image rootfs
    image=$(containers pull --quiet "oci:$layout:outrider-cpu")
    rootfs=$(containers image mount "$image")
    rm -rf "$dir/bundle" && cp -r "$rootfs/opt/outrider/bundle" "$dir/bundle"
    containers image unmount "$image" > /dev/null
    chmod u+w "$dir/bundle/model.onnx.data" && flip "$dir/bundle/model.onnx.data"
    refused "a changed byte at start" "model.onnx.data" containers run --rm --network none --read-only --user 10001:10001 --cap-drop all \
        --volume "$dir/bundle:/opt/outrider/bundle:ro" --env OUTRIDER__SERVING__AUTH__ALLOW_UNAUTHENTICATED=true "$image"
}

registry() {
    say "a registry on loopback: push, resume, a second version, skopeo, podman"
    rm -rf "$dir/registry"
    printf '%s\n' 'version: 0.1' 'log: {level: warn}' "storage: {cache: {blobdescriptor: inmemory}, filesystem: {rootdirectory: $dir/registry}, delete: {enabled: true}}" \
        "http: {addr: $registry}" > "$dir/registry.yml"
    docker-registry serve "$dir/registry.yml" > "$dir/registry.log" 2>&1 &
    registry_pid=$!
    trap 'kill $registry_pid' EXIT
    until curl --silent --fail "http://$registry/v2/" > /dev/null; do sleep 0.2; done
    local clone=$dir/one digest push_pid
    digest=$(digest_of "$layout")
    # Killed as soon as the registry has a part of the weights: when more has arrived than all that comes before them.
    xtask "$clone" push "$registry/app:v1" --layout "$layout" > "$dir/push.log" 2>&1 &
    push_pid=$!
    mkdir -p "$dir/registry"
    until [ "$(du -sb "$dir/registry" | cut -f1)" -gt 120000000 ]; do
        kill -0 "$push_pid" 2> /dev/null || fail "the push was too fast to be ended"
    done
    # The shell around it, and the program itself.
    pkill -KILL -P "$push_pid" || true
    kill -KILL "$push_pid" 2> /dev/null || true
    wait "$push_pid" 2> /dev/null || true
    echo "killed with $(du -sb "$dir/registry" | cut -f1) bytes in the registry"
    curl --silent --fail "http://$registry/v2/app/manifests/v1" > /dev/null && fail "there is a manifest of half an image"
    xtask "$clone" push "$registry/app:v1" --layout "$layout"
    xtask "$clone" push "$registry/app:v1" --layout "$layout"
    rm -rf "$dir/pulled"
    xtask "$clone" pull "$registry/app@$digest" --output "$dir/pulled"
    [ "$(digest_of "$dir/pulled")" = "$digest" ] || fail "another digest came back"
    diff -r "$layout/blobs" "$dir/pulled/blobs" && echo "all blobs came back"
    [ "$(skopeo inspect --tls-verify=false "docker://$registry/app:v1" --format '{{.Digest}}')" = "$digest" ] || fail "skopeo sees another digest"
    rm -rf "$dir/skopeo"
    skopeo copy --quiet --preserve-digests --src-tls-verify=false "docker://$registry/app:v1" "oci:$dir/skopeo:v1"
    [ "$(jq -r '.manifests[0].digest' "$dir/skopeo/index.json")" = "$digest" ] || fail "skopeo copied another digest"
    containers pull --quiet --tls-verify=false "$registry/app@$digest" > /dev/null
    echo "skopeo and podman have $digest"
    say "a version with another configuration"
    echo "# The second version." >> "$clone/images/server.yaml"
    cp "$clone/images/cpu.lock.toml" "$dir/lock"
    xtask "$clone" lock --keep-packages
    local server=$clone/target/x86_64-unknown-linux-gnu/release/outrider-server
    xtask "$clone" build --server "$server" --output "$dir/second" 2> /dev/null
    xtask "$clone" push "$registry/app:v2" --layout "$dir/second"
    say "straight into the registry, without a second copy of the weights"
    xtask "$clone" build --server "$server" --no-store "$registry/bare:v1" | tee "$dir/bare.txt"
    grep -q "@$(digest_of "$dir/second")" "$dir/bare.txt" || fail "--no-store gave another digest"
    say "another repository, by mounts"
    xtask "$clone" push "$registry/other/app:v2" --layout "$dir/second" --mount-from app
    say "the weights alone"
    xtask "$clone" build --weights-only --output "$dir/weights" 2> /dev/null
    xtask "$clone" push "$registry/app:weights" --layout "$dir/weights"
    cp "$dir/lock" "$clone/images/cpu.lock.toml"
    git -C "$clone" checkout --quiet images/server.yaml
    say "a changed byte in the registry"
    local stored=$dir/registry/docker/registry/v2/blobs/sha256 blob
    blob=$(weights_blob "$layout")
    printf x | dd of="$stored/${blob:0:2}/$blob/data" bs=1 seek=5000000 conv=notrunc status=none
    refused "a changed byte in the registry" "$weights" xtask "$clone" pull "$registry/app:v1" --output "$dir/never"
    rm "$stored/${blob:0:2}/$blob/data"
    refused "a layer that the registry lost" "$weights" xtask "$clone" pull "$registry/app:v1" --output "$dir/never"
    kill $registry_pid
    trap - EXIT
}

evidence() {
    say "signature and bill of materials, by verifiers of others"
    local clone=$dir/one signed=$dir/signed
    rm -rf "$signed" "$dir"/own.* "$dir"/other.*
    cp -r "$layout" "$signed"
    xtask "$clone" keygen "$dir/own"
    xtask "$clone" keygen "$dir/other"
    xtask "$clone" sign "$signed" --key "$dir/own.key"
    xtask "$clone" verify "$signed" --key "$dir/own.pub"
    refused "another key" "there is no statement" xtask "$clone" verify "$signed" --key "$dir/other.pub"
    mkdir -p "$dir/npm"
    (cd "$dir/npm" && npm install --silent --no-audit --no-fund @sigstore/verify@3.1.1 @sigstore/bundle@4.0.0 @sigstore/core@3.2.1)
    cp "$root/images/acceptance-sigstore.mjs" "$dir/npm/check.mjs"
    node "$dir/npm/check.mjs" "$signed" "$dir/own.pub" "$dir/other.pub"
    [ -x "$dir/venv/bin/python" ] || python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet 'cyclonedx-python-lib[json-validation]==11.12.0'
    "$dir/venv/bin/python" - "$signed" <<'PYTHON'
import json, pathlib, sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

blobs = pathlib.Path(sys.argv[1], "blobs/sha256")
texts = (path.read_bytes() for path in blobs.iterdir() if path.stat().st_size < 4 << 20)
[bill] = [text for text in texts if text.startswith(b'{"$schema":"http://cyclonedx.org')]
validator = JsonStrictValidator(SchemaVersion.V1_6)
fault = validator.validate_str(bill.decode())
assert fault is None, fault
document = json.loads(bill)
print(len(document["components"]), "components are valid CycloneDX 1.6")
document["surprise"] = 1
assert validator.validate_str(json.dumps(document)), "an unknown field was accepted"
PYTHON
}

for station in "${stations[@]}"; do
    began=$SECONDS
    "$station"
    echo "$station took $((SECONDS - began)) s"
done
