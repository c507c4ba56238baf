//! The readers of a bundle: `bundle.json` and the graphs.

use std::io::Cursor;
use std::sync::LazyLock;

use outrider_bundle::Manifest;
use outrider_bundle::contract::draft::check_draft;
use outrider_bundle::contract::{check_external_files, check_target};
use outrider_bundle::facts::GraphFacts;

/// The manifest that graphs are held against.
static MANIFEST: LazyLock<Manifest> = LazyLock::new(|| {
    let path = crate::fixtures::data("fuzz-cases/bundle-manifest/pair.json");
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Manifest::parse(&bytes).expect("the seed is a manifest")
});

/// An `.onnx` file: its facts, and both contracts held against it.
pub fn onnx(input: &[u8]) -> bool {
    let manifest = &*MANIFEST;
    let Ok(facts) = GraphFacts::from_stream(Cursor::new(input)) else {
        return false;
    };
    let target = &manifest.target;
    let is_target = check_target(target, &facts).is_ok()
        && check_external_files(&target.graph, &facts, &manifest.files).is_ok();
    let is_draft = manifest.draft.as_ref().is_some_and(|draft| {
        check_draft(draft, target, &facts).is_ok()
            && check_external_files(&draft.graph, &facts, &manifest.files).is_ok()
    });
    is_target || is_draft
}

/// A `bundle.json`: what is read can be written, and read again as the same.
pub fn manifest(input: &[u8]) -> bool {
    let Ok(manifest) = Manifest::parse(input) else {
        return false;
    };
    let canonical = manifest.canonical_json();
    let again = Manifest::parse(&canonical).expect("a manifest's canonical form is a manifest");
    assert_eq!(again, manifest);
    assert_eq!(again.digest(), manifest.digest());
    true
}
