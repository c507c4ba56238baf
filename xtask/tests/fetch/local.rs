//! Source `path`, and what the store does with what it holds.

use std::fs;
use std::process::Command;

use outrider_bundle::digest::sha256_hex;

use crate::{Setup, content};

fn local_lock(setup: &Setup) -> std::path::PathBuf {
    fs::create_dir_all(setup.root.path().join("mirror")).unwrap();
    fs::write(setup.root.path().join("mirror/source.bin"), content()).unwrap();
    setup.lock(
        "path = { path = \"mirror\" }",
        Some("source.bin"),
        &content(),
    )
}

#[test]
fn a_local_file_is_copied_and_not_linked() {
    let setup = Setup::new();
    let lock = local_lock(&setup);
    setup.fetch(&lock).unwrap();
    assert_eq!(setup.stored(), content());
    fs::write(
        setup.root.path().join("mirror/source.bin"),
        "changed in place",
    )
    .unwrap();
    assert_eq!(setup.stored(), content());
    assert_eq!(
        setup.fetch(&lock).unwrap().fetched,
        0,
        "the source isn't looked at any more"
    );
}

#[test]
fn a_path_may_be_the_file_itself() {
    let setup = Setup::new();
    local_lock(&setup);
    setup
        .fetch(&setup.lock("path = { path = \"mirror/source.bin\" }", None, &content()))
        .unwrap();
    assert_eq!(setup.stored(), content());
}

#[test]
fn a_damaged_file_in_the_store_is_noticed_and_fetched_again() {
    let setup = Setup::new();
    let lock = local_lock(&setup);
    setup.fetch(&lock).unwrap();
    let path = setup.settings.store.join("model/model.bin");
    for damage in [&b""[..], &content()[1..], &vec![0; content().len()]] {
        fs::write(&path, damage).unwrap();
        assert_eq!(setup.fetch(&lock).unwrap().fetched, 1);
        assert_eq!(setup.stored(), content());
    }
}

#[test]
fn only_what_is_missing_is_fetched() {
    let setup = Setup::new();
    fs::create_dir(setup.root.path().join("mirror")).unwrap();
    let lock = setup.lock_of(
        "path = { path = \"mirror\" }",
        &[("a", Some("a"), b"aa"), ("b", Some("b"), b"bbb")],
    );
    fs::write(setup.root.path().join("mirror/a"), "aa").unwrap();
    let error = setup.error(&lock);
    assert!(
        error.contains("cannot fetch model: cannot read") && error.contains("mirror/b"),
        "{error}"
    );
    assert_eq!(setup.left(), ["a"]);
    fs::write(setup.root.path().join("mirror/b"), "bbb").unwrap();
    let summary = setup.fetch(&lock).unwrap();
    assert_eq!(
        (summary.files, summary.fetched, summary.fetched_bytes),
        (2, 1, 3)
    );
}

#[test]
fn wrong_local_bytes_leave_nothing() {
    let setup = Setup::new();
    let lock = local_lock(&setup);
    let source = setup.root.path().join("mirror/source.bin");
    let mut wrong = content();
    wrong[0] ^= 1;
    fs::write(&source, &wrong).unwrap();
    let error = setup.error(&lock);
    assert!(
        error.contains(&sha256_hex(&wrong)) && error.contains(&sha256_hex(&content())),
        "{error}"
    );
    fs::write(&source, &wrong[1..]).unwrap();
    assert!(
        setup
            .error(&lock)
            .contains("has 1199999 bytes, the lock says 1200000")
    );
    fs::write(&source, [wrong.as_slice(), b"x"].concat()).unwrap();
    assert!(
        setup
            .error(&lock)
            .contains("is larger than the 1200000 bytes the lock says")
    );
    assert_eq!(setup.left(), [""; 0]);
}

#[test]
fn every_lock_is_read_before_anything_is_fetched() {
    let setup = Setup::new();
    let good = local_lock(&setup);
    let bad = setup.root.path().join("bad.toml");
    fs::write(
        &bad,
        "schema_version = 1\n[[item]]\nname = \"x\"\ncolour = \"red\"\n",
    )
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["fetch", "--lock"])
        .arg(&good)
        .arg("--lock")
        .arg(&bad)
        .arg("--store")
        .arg(&setup.settings.store)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr)
        .unwrap()
        .replace(bad.to_str().unwrap(), "bad.toml");
    insta::assert_snapshot!(text);
    assert!(!setup.settings.store.exists());
}

#[test]
fn the_home_variable_moves_the_store() {
    let setup = Setup::new();
    let lock = local_lock(&setup);
    let home = setup.root.path().join("home");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command
        .args(["fetch", "--lock"])
        .arg(&lock)
        .env("OUTRIDER_HOME", &home);
    assert!(command.output().unwrap().status.success());
    assert_eq!(
        fs::read(home.join("store/model/model.bin")).unwrap(),
        content()
    );
}
