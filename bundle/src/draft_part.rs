//! The draft's part of a bundle: the files that nothing but the draft uses, so that damage to them need not cost the target.
//!
//! A file that target or text use as well, such as weights that both graphs share, is not part of it.
//! Neither is a file that no graph names, as long as the draft graph can be asked.

use std::collections::BTreeSet;
use std::path::Path;

use crate::facts::{GraphError, GraphFacts};
use crate::manifest::Manifest;
use crate::verify::Fault;

/// Splits the faults of a directory into those that concern the target and those that concern the draft alone.
///
/// # Errors
///
/// The target graph can't be read, although it is the file that the manifest lists.
pub(crate) fn split(
    manifest: &Manifest,
    dir: &Path,
    faults: Vec<Fault>,
) -> Result<(Vec<Fault>, Vec<Fault>), GraphError> {
    let Some(draft) = &manifest.draft else {
        return Ok((faults, Vec::new()));
    };
    let is_intact = |graph: &str| !faults.iter().any(|fault| covers(fault, graph));
    // Without the target graph there is nothing to serve, and nobody to say which weights are the target's.
    if faults.is_empty() || !is_intact(&manifest.target.graph) {
        return Ok((faults, Vec::new()));
    }
    let mut used_otherwise = files_of_graph(dir, &manifest.target.graph)?;
    used_otherwise.insert(manifest.text.tokenizer.clone());
    used_otherwise.extend(manifest.text.chat_template.clone());

    let of_draft = is_intact(&draft.graph)
        .then(|| files_of_graph(dir, &draft.graph).ok())
        .flatten()
        .unwrap_or_else(|| manifest.files.keys().cloned().collect());
    let is_drafts_alone = |fault: &Fault| {
        // An unlisted file is nobody's: a graph could name it as the home of its weights.
        let mut damaged = manifest.files.keys().filter(|file| covers(fault, file));
        damaged.clone().next().is_some()
            && damaged.all(|file| of_draft.contains(file) && !used_otherwise.contains(file))
    };
    let (of_draft, of_target) = faults.into_iter().partition(is_drafts_alone);
    Ok((of_target, of_draft))
}

/// Whether a fault damages a listed file: it is about the file itself or about a directory above it.
pub(crate) fn covers(fault: &Fault, file: &str) -> bool {
    file.strip_prefix(fault.path())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A graph and the files that hold its weights.
fn files_of_graph(dir: &Path, graph: &str) -> Result<BTreeSet<String>, GraphError> {
    let facts = GraphFacts::read(&dir.join(graph))?;
    let mut files: BTreeSet<String> = facts.external_paths(graph).collect();
    files.insert(graph.to_owned());
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prost::Message;
    use tempfile::TempDir;

    use crate::VerifiedBundle;
    use crate::digest::sha256_hex;
    use crate::manifest::{FileEntry, Manifest};
    use crate::onnx::ModelProto;
    use crate::testing::{sample_draft_graph, sample_graph, sample_pair};

    /// A pair whose draft has weights of its own and shares others with the target, and a file that no graph uses.
    fn pair() -> TempDir {
        let dir = sample_pair();
        let mut draft = sample_draft_graph();
        let shared = sample_graph().graph.unwrap().initializer.remove(0);
        let mut own = shared.clone();
        own.name = "own".to_owned();
        own.external_data[0].value = "draft.onnx.data".to_owned();
        draft.graph.as_mut().unwrap().initializer = vec![shared, own];
        write_graph(&dir, &draft);
        let weights = fs::read(dir.path().join("model.onnx.data")).unwrap();
        write(&dir, "draft.onnx.data", &weights);
        write(&dir, "LICENSE", b"Apache-2.0");
        VerifiedBundle::open(dir.path()).unwrap();
        dir
    }

    /// Writes a file and lists it.
    fn write(dir: &TempDir, name: &str, bytes: &[u8]) {
        fs::write(dir.path().join(name), bytes).unwrap();
        let mut manifest = Manifest::load(dir.path()).unwrap();
        let entry = FileEntry {
            size_bytes: bytes.len() as u64,
            sha256: sha256_hex(bytes),
        };
        manifest.files.insert(name.to_owned(), entry);
        manifest.write(dir.path()).unwrap();
    }

    fn write_graph(dir: &TempDir, draft: &ModelProto) {
        write(dir, "draft.onnx", &draft.encode_to_vec());
    }

    fn flip(dir: &TempDir, name: &str) {
        let path = dir.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    fn remove(dir: &TempDir, name: &str) {
        fs::remove_file(dir.path().join(name)).unwrap();
    }

    /// The draft's faults, or those that refuse the bundle, by the names of their files.
    fn opened(dir: &TempDir) -> Result<Vec<String>, Vec<String>> {
        let files = |lines: Vec<String>| {
            let name = |line: String| line.split(": ").next().unwrap_or_default().to_owned();
            lines.into_iter().map(name).collect()
        };
        match VerifiedBundle::open_target(dir.path()) {
            Ok(bundle) => Ok(bundle
                .draft_fault()
                .map(|fault| files(fault.lines()))
                .unwrap_or_default()),
            Err(error) => Err(files(error.lines())),
        }
    }

    #[test]
    fn damage_to_the_drafts_own_files_is_the_drafts_and_any_other_refuses_the_bundle() {
        let check = |damaged: &[&str], expected: Result<&[&str], &[&str]>| {
            for damage in [flip, remove] {
                let dir = pair();
                for name in damaged {
                    damage(&dir, name);
                }
                let found = opened(&dir);
                let expected = expected
                    .map(|names| names.iter().map(|name| (*name).to_owned()).collect())
                    .map_err(|names| names.iter().map(|name| (*name).to_owned()).collect());
                assert_eq!(found, expected, "{damaged:?}");
                assert_eq!(
                    VerifiedBundle::open(dir.path()).is_err(),
                    !damaged.is_empty(),
                    "{damaged:?}: tools want every file"
                );
            }
        };
        check(&[], Ok(&[]));
        check(&["draft.onnx"], Ok(&["draft.onnx"]));
        check(&["draft.onnx.data"], Ok(&["draft.onnx.data"]));
        check(
            &["draft.onnx", "draft.onnx.data"],
            Ok(&["draft.onnx", "draft.onnx.data"]),
        );
        check(&["model.onnx"], Err(&["model.onnx"]));
        check(&["model.onnx.data"], Err(&["model.onnx.data"]));
        check(&["tokenizer.json"], Err(&["tokenizer.json"]));
        check(&["chat_template.jinja"], Err(&["chat_template.jinja"]));
        check(&["LICENSE"], Err(&["LICENSE"]));
        check(
            &["draft.onnx.data", "tokenizer.json"],
            Err(&["tokenizer.json", "draft.onnx.data"]),
        );
    }

    #[test]
    fn damaged_files_are_not_handed_out_and_the_digest_is_the_manifests() {
        let dir = pair();
        let digest = VerifiedBundle::open(dir.path())
            .unwrap()
            .digest()
            .to_owned();
        flip(&dir, "draft.onnx.data");
        let bundle = VerifiedBundle::open_target(dir.path()).unwrap();
        assert_eq!(bundle.digest(), digest);
        assert_eq!(bundle.path("draft.onnx.data"), None);
        assert!(bundle.read("draft.onnx.data").is_err());
        for name in ["draft.onnx", "model.onnx", "model.onnx.data"] {
            assert_eq!(bundle.path(name), Some(dir.path().join(name)));
        }
    }

    #[test]
    fn a_draft_graph_that_is_not_what_the_manifest_says_is_the_drafts_fault() {
        let dir = pair();
        let mut draft = sample_draft_graph();
        let graph = draft.graph.as_mut().unwrap();
        graph.input.retain(|input| input.name != "block_rows");
        write_graph(&dir, &draft);
        let bundle = VerifiedBundle::open_target(dir.path()).unwrap();
        let lines = bundle.draft_fault().unwrap().lines();
        assert!(lines[0].contains("`block_rows`"), "{lines:?}");

        write(&dir, "draft.onnx", b"no graph at all");
        assert!(
            VerifiedBundle::open_target(dir.path())
                .unwrap()
                .draft_fault()
                .is_some()
        );
        write_graph(&dir, &sample_draft_graph());
        write(&dir, "model.onnx", b"no graph at all");
        assert!(VerifiedBundle::open_target(dir.path()).is_err());
    }

    #[test]
    fn a_file_that_the_manifest_does_not_list_refuses_the_bundle_and_a_directory_is_what_is_in_it()
    {
        let dir = pair();
        fs::write(dir.path().join("draft.onnx.extra"), "x").unwrap();
        assert_eq!(opened(&dir), Err(vec!["draft.onnx.extra".to_owned()]));
        remove(&dir, "draft.onnx.extra");

        // The draft in a directory of its own, which is a link.
        let mut manifest = Manifest::load(dir.path()).unwrap();
        let entry = manifest.files.remove("draft.onnx").unwrap();
        manifest.files.insert("draft/draft.onnx".to_owned(), entry);
        manifest.draft.as_mut().unwrap().graph = "draft/draft.onnx".to_owned();
        manifest.write(dir.path()).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::rename(
            dir.path().join("draft.onnx"),
            elsewhere.path().join("draft.onnx"),
        )
        .unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("draft")).unwrap();
        assert_eq!(opened(&dir), Ok(vec!["draft".to_owned()]));
    }
}
