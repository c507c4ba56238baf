//! Source `pypi`: the real pip, pointed at a directory instead of an index.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use outrider_bundle::digest::sha256_hex;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::{Setup, content};

/// Makes a wheel that pip accepts, with one data file.
fn make_wheel(dir: &Path, tags: &str) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    let path = dir.join(format!("tiny_model-1.0-{tags}.whl"));
    let mut wheel = ZipWriter::new(File::create(&path).unwrap());
    let metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n";
    let tags = format!("Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n");
    for (name, bytes) in [
        ("tiny_model/weights.bin", content()),
        ("tiny_model-1.0.dist-info/METADATA", metadata.into()),
        ("tiny_model-1.0.dist-info/WHEEL", tags.into()),
        ("tiny_model-1.0.dist-info/RECORD", Vec::new()),
    ] {
        wheel
            .start_file(name, SimpleFileOptions::default())
            .unwrap();
        wheel.write_all(&bytes).unwrap();
    }
    wheel.finish().unwrap();
    path
}

/// A setup whose pip finds only the wheels of one directory.
fn setup(tags: &str) -> (Setup, String) {
    let mut setup = Setup::new();
    let dir = setup.root.path().join("wheels");
    let wheel = make_wheel(&dir, tags);
    let variables = [
        ("PIP_NO_INDEX", "1".into()),
        ("PIP_FIND_LINKS", dir.into_os_string()),
        ("PIP_CONFIG_FILE", "/dev/null".into()),
    ];
    setup.settings.pip.variables = variables.map(|(name, value)| (name.into(), value)).to_vec();
    (setup, sha256_hex(&fs::read(wheel).unwrap()))
}

fn source(wheel_sha256: &str) -> String {
    format!(
        "pypi = {{ package = \"tiny-model\", version = \"1.0\", wheel_sha256 = \"{wheel_sha256}\" }}"
    )
}

#[test]
fn a_member_of_a_wheel_arrives() {
    let (setup, digest) = setup("py3-none-any");
    let lock = setup.lock(&source(&digest), Some("tiny_model/weights.bin"), &content());
    setup.fetch(&lock).unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(setup.left(), ["model.bin"]);
    fs::remove_dir_all(setup.root.path().join("wheels")).unwrap();
    assert_eq!(setup.fetch(&lock).unwrap().fetched, 0);
}

#[test]
fn a_wheel_for_another_machine_and_python_arrives() {
    let (setup, digest) = setup("cp39-cp39-manylinux_2_28_s390x");
    let tags = "python = \"3.9\", abi = \"cp39\", platform = \"manylinux_2_28_s390x\" }";
    let source = source(&digest).replace(" }", &format!(", {tags}"));
    setup
        .fetch(&setup.lock(&source, Some("tiny_model/weights.bin"), &content()))
        .unwrap();
    assert_eq!(setup.stored(), content());
}

#[test]
fn a_wheel_with_another_digest_is_refused_with_both() {
    let (setup, digest) = setup("py3-none-any");
    let locked = sha256_hex(b"another wheel");
    let error =
        setup.error(&setup.lock(&source(&locked), Some("tiny_model/weights.bin"), &content()));
    for part in ["pip cannot download tiny-model 1.0", &digest, &locked] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn a_wheel_that_is_nowhere_is_named() {
    let (setup, digest) = setup("py3-none-any");
    let source = source(&digest).replace("\"1.0\"", "\"2.0\"");
    let error = setup.error(&setup.lock(&source, Some("tiny_model/weights.bin"), &content()));
    assert!(
        error.contains("pip cannot download tiny-model 2.0"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn a_missing_member_is_named_and_nothing_stays() {
    let (setup, digest) = setup("py3-none-any");
    let error = setup.error(&setup.lock(&source(&digest), Some("tiny_model/gone.bin"), &content()));
    assert!(
        error
            .ends_with("cannot unpack tiny-model 1.0: the wheel has no member tiny_model/gone.bin"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn a_member_with_other_bytes_is_refused_with_both_digests() {
    let (setup, digest) = setup("py3-none-any");
    let mut locked = content();
    locked[5] ^= 1;
    let error = setup.error(&setup.lock(&source(&digest), Some("tiny_model/weights.bin"), &locked));
    assert!(
        error.contains(&sha256_hex(&content())) && error.contains(&sha256_hex(&locked)),
        "{error}"
    );
    let error = setup.error(&setup.lock(
        &source(&digest),
        Some("tiny_model/weights.bin"),
        &locked[1..],
    ));
    assert!(
        error.contains("is larger than the 1199999 bytes the lock says"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn a_python_that_is_not_there_or_has_no_pip_is_named() {
    let (mut setup, digest) = setup("py3-none-any");
    let lock = setup.lock(&source(&digest), Some("tiny_model/weights.bin"), &content());
    setup.settings.pip.python = "no-such-python".into();
    let error = setup.error(&lock);
    assert!(
        error.contains("cannot run no-such-python, whose pip fetches tiny-model"),
        "{error}"
    );

    let python = setup.root.path().join("python");
    fs::write(
        &python,
        "#!/bin/sh\necho \"$0: No module named pip\" >&2\nexit 1\n",
    )
    .unwrap();
    fs::set_permissions(&python, Permissions::from_mode(0o755)).unwrap();
    setup.settings.pip.python = python.into();
    let error = setup.error(&lock);
    assert!(
        error.contains("has no pip, which fetches tiny-model; install it"),
        "{error}"
    );
    assert_eq!(setup.left(), [""; 0]);
}
