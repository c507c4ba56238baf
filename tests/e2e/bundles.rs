//! Damaged bundles: nothing is served from them, and the message says which file and both digests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use outrider_bundle::Manifest;
use outrider_bundle::digest::hash_file;
use outrider_bundle::manifest::{FileEntry, Precision};
use outrider_bundle::onnx::ModelProto;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use prost::Message;
use xtask::reference;
use xtask::server_process::{ServerCommand, free_addresses};

/// `EX_DATAERR` of `sysexits.h`: the input data is wrong.
const EXIT_BUNDLE: i32 = 65;
const DEADLINE: Duration = Duration::from_secs(120);

/// What is done to a file.
pub type Damage = fn(&Path) -> anyhow::Result<()>;

pub fn a_missing_truncated_or_changed_file_stops_the_start_and_is_named(
    _: &Servers,
) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let manifest = Manifest::load(&bundle)?;
    for (name, entry) in &manifest.files {
        let damages: [(&str, Damage); 3] = [
            ("missing", remove),
            ("truncated", truncate),
            ("one byte flipped", flip),
        ];
        for (damage, apply) in damages {
            let copy = linked_copy(&bundle)?;
            let file = copy.path().join(name);
            apply(&file)?;
            // A damaged draft would stop nothing else, see `drafting`.
            let log = refused(copy.path(), &[("serving.speculative.required", "true")])?;
            assert!(
                log.contains(name.as_str()),
                "{name}, {damage}: the file is not named: {log}"
            );
            if damage == "one byte flipped" {
                let (_, found) = hash_file(&file)?;
                assert!(
                    log.contains(&entry.sha256),
                    "{name}, {damage}: the manifest's digest is not named: {log}"
                );
                assert!(
                    log.contains(&found),
                    "{name}, {damage}: the file's digest is not named: {log}"
                );
            }
        }
    }
    Ok(())
}

pub fn a_graph_that_lacks_an_input_stops_the_start_and_names_it(_: &Servers) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let mut manifest = Manifest::load(&bundle)?;
    let copy = linked_copy(&bundle)?;
    let graph_file = copy.path().join(&manifest.target.graph);
    // Our own exporter writes no field that this form of the message lacks, so reading and writing back keeps the graph.
    let mut model = ModelProto::decode(fs::read(&graph_file)?.as_slice())?;
    let graph = model.graph.as_mut().context("the model has no graph")?;
    graph.input.retain(|input| input.name != "write_indices");
    fs::remove_file(&graph_file)?;
    fs::write(&graph_file, model.encode_to_vec())?;
    let (size_bytes, sha256) = hash_file(&graph_file)?;
    manifest.files.insert(
        manifest.target.graph.clone(),
        FileEntry { size_bytes, sha256 },
    );
    fs::remove_file(copy.path().join("bundle.json"))?;
    manifest.write(copy.path())?;

    let log = refused(copy.path(), &[])?;
    assert!(
        log.contains("write_indices"),
        "the input is not named: {log}"
    );
    Ok(())
}

/// The server's own operators compute on the processor, which must not stand in for a device that was asked for.
pub fn a_device_that_its_graphs_do_not_run_on_stops_the_start(_: &Servers) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let settings = [("serving.runtime.execution_provider", "cuda")];
    let log = refused(&bundle, &settings)?;
    for named in ["serving.runtime.execution_provider", "--attention portable"] {
        assert!(log.contains(named), "{named} is not named: {log}");
    }
    Ok(())
}

/// The log of a server that refuses the bundle with the exit code for it.
pub fn refused(bundle: &Path, settings: &[(&str, &str)]) -> anyhow::Result<String> {
    let library = fixtures::onnxruntime(&fixtures::workspace()?)?;
    let (listen, admin_listen) = free_addresses()?;
    let command = ServerCommand::new(fixtures::server_binary()?, bundle, &library)?;
    let command = settings
        .iter()
        .fold(command, |command, (key, value)| command.set(key, value));
    let mut server = command.start(listen, admin_listen)?;
    let status = server.wait(DEADLINE)?;
    let log = server.log();
    assert_eq!(status.code(), Some(EXIT_BUNDLE), "{log}");
    Ok(log)
}

/// A directory whose files are those of the bundle, without copying them.
pub fn linked_copy(bundle: &Path) -> anyhow::Result<tempfile::TempDir> {
    let copy = fixtures::scratch_dir()?;
    for entry in fs::read_dir(bundle)? {
        let entry = entry?;
        fs::hard_link(entry.path(), copy.path().join(entry.file_name()))?;
    }
    Ok(copy)
}

/// Damage by removal.
pub fn remove(file: &Path) -> anyhow::Result<()> {
    Ok(fs::remove_file(file)?)
}

/// Damage by the loss of the last byte.
pub fn truncate(file: &Path) -> anyhow::Result<()> {
    rewrite(file, |bytes| bytes.truncate(bytes.len() - 1))
}

/// Damage by one flipped bit.
pub fn flip(file: &Path) -> anyhow::Result<()> {
    rewrite(file, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    })
}

/// Changes a copy, never the linked original.
fn rewrite(file: &Path, change: impl FnOnce(&mut Vec<u8>)) -> anyhow::Result<()> {
    let mut bytes = fs::read(file)?;
    change(&mut bytes);
    fs::remove_file(file)?;
    Ok(fs::write(file, bytes)?)
}
