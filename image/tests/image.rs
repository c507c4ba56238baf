//! Images from definition to layout, compared and checked.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use outrider_bundle::digest::sha256_hex;
use outrider_image::build::{BUNDLE_LABEL, Built, FILE_ANNOTATION, FILE_SHA256_ANNOTATION};
use outrider_image::definition::{Base, Oci};
use outrider_image::diff::diff;
use outrider_image::layer::Compression;
use outrider_image::layout::Layout;
use outrider_image::verify::{Expected, Verified, verify};
use outrider_image::{Error, layout};
use support::{Repository, WEIGHTS_PATH, weights};

/// Files of all layers with mode and content.
fn unpacked(built: &Built) -> BTreeMap<String, (u32, Vec<u8>)> {
    let image = built.layout.image(None).unwrap();
    let mut files = BTreeMap::new();
    for descriptor in image.manifest.layers() {
        let compression = Compression::of(descriptor.media_type()).unwrap();
        let blob = built.layout.blob(descriptor).unwrap();
        let mut archive = tar::Archive::new(compression.reader(blob).unwrap());
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
            if let Some(target) = entry.link_name_bytes() {
                content = target.into_owned();
            }
            files.insert(path, (entry.header().mode().unwrap(), content));
        }
    }
    files
}

fn check(repository: &Repository, built: &Built, packages: bool) -> Result<Verified, Error> {
    let image = built.layout.image(None)?;
    let packages_dir = repository.path("packages");
    let expected = Expected {
        definition: &repository.definition,
        lock: &repository.lock,
        packages_dir: packages.then_some(packages_dir.as_path()),
    };
    verify(&built.layout, &image, expected)
}

fn differences(first: &Built, second: &Built) -> Vec<String> {
    let images = [first, second].map(|built| built.layout.image(None).unwrap());
    let found = diff((&first.layout, &images[0]), (&second.layout, &images[1])).unwrap();
    found.iter().map(ToString::to_string).collect()
}

fn overwrite(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_image_has_the_files_of_its_definition_with_plain_modes() {
    let repository = Repository::new();
    let files = unpacked(&repository.build("image").unwrap());
    let text = |path: &str| {
        let (mode, content) = &files[path];
        (*mode, String::from_utf8_lossy(content).into_owned())
    };
    for (path, mode, content) in [
        ("lib/x86_64-linux-gnu/libc.so.6", 0o644, "libc"),
        (
            "lib64/ld-linux-x86-64.so.2",
            0o777,
            "/lib/x86_64-linux-gnu/libc.so.6",
        ),
        (
            "etc/ssl/certs/ca-certificates.crt",
            0o644,
            "certificate A\ncertificate B\n",
        ),
        ("usr/share/doc/ca-certificates/copyright", 0o644, "MPL"),
        ("opt/outrider/lib/lib.so", 0o644, "library"),
        ("opt/outrider/bundle/model.onnx", 0o444, "graph"),
        ("usr/bin/server", 0o755, "program"),
        ("etc/passwd", 0o644, "x:x:1:1\n"),
        ("run/outrider/", 0o755, ""),
    ] {
        assert_eq!(text(path), (mode, content.to_owned()), "{path}");
    }
    assert_eq!(files[WEIGHTS_PATH], (0o444, weights()));
    for path in ["usr/bin/ldd", "usr/share/doc/ca-certificates/changelog.gz"] {
        assert!(!files.contains_key(path), "{path} was to be left out");
    }
}

#[test]
fn an_image_says_how_it_is_run_and_which_bundle_it_holds() {
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let image = built.layout.image(None).unwrap();
    let config = image.config.config().clone().unwrap();
    assert_eq!(config.user().as_deref(), Some("10001:10001"));
    assert_eq!(
        config.entrypoint().as_deref(),
        Some(&["/usr/bin/server".to_owned()][..])
    );
    assert_eq!(
        config.env().as_deref(),
        Some(&["A=1".to_owned(), "B=2".to_owned()][..])
    );
    let labels = config.labels().clone().unwrap();
    assert_eq!(
        labels.get(BUNDLE_LABEL),
        repository.lock.bundle_digest.as_ref()
    );
    assert_eq!(labels["outrider.health.ready"], "8081/readyz");
    let names: Vec<&str> = built.layers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "base",
            "runtime",
            &format!("weights {WEIGHTS_PATH}"),
            "bundle",
            "server",
            "app"
        ]
    );
    let annotations = built.layers[2].1.annotations().clone().unwrap();
    assert_eq!(annotations[FILE_ANNOTATION], WEIGHTS_PATH);
    assert_eq!(annotations[FILE_SHA256_ANNOTATION], sha256_hex(&weights()));
}

#[test]
fn two_repositories_with_other_times_and_modes_give_the_same_digest() {
    let first = Repository::new();
    let second = Repository::new();
    for name in [
        "lib.so",
        "server",
        "bundle/model.onnx.data",
        "bundle/tokenizer.json",
    ] {
        let path = second.path(name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let file = fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
    }
    let (first, second) = (
        first.build("a").unwrap(),
        second.build("else/where").unwrap(),
    );
    assert_eq!(differences(&first, &second), [""; 0]);
    assert_eq!(first.manifest, second.manifest);
    assert_eq!(
        fs::read(first.layout.dir().join("index.json")).unwrap(),
        fs::read(second.layout.dir().join("index.json")).unwrap()
    );
}

#[test]
fn a_difference_is_explained_by_layer_file_and_attribute() {
    let mut repository = Repository::new();
    let first = repository.build("a").unwrap();
    fs::write(repository.path("server"), "PROGRAM").unwrap();
    let changed = repository.build("b").unwrap();
    let expected = format!(
        "layer 4, usr/bin/server: sha256: {} and {}",
        sha256_hex(b"program"),
        sha256_hex(b"PROGRAM")
    );
    assert_eq!(differences(&first, &changed)[0], expected);
    fs::write(repository.path("server"), "program").unwrap();
    let later = repository
        .build_with("c", |options| options.epoch_s = 60)
        .unwrap();
    assert_eq!(
        differences(&first, &later)[0],
        "layer 0, etc/: mtime: 0 and 60"
    );
    let gzip = repository
        .build_with("d", |options| options.compression = Compression::Gzip)
        .unwrap();
    let explained = &differences(&first, &gzip)[0];
    assert!(
        explained.starts_with("layer 0: compressed form of the same archive:"),
        "{explained}"
    );
    repository.definition.config.user = "7:7".to_owned();
    let user = repository.build("e").unwrap();
    assert_eq!(
        differences(&first, &user)[0],
        "config: config.User: \"10001:10001\" and \"7:7\""
    );
}

#[test]
fn a_stale_lock_is_refused_and_the_file_is_named() {
    for (name, in_image) in [
        ("lib.so", "opt/outrider/lib/lib.so"),
        ("server.yaml", "etc/server.yaml"),
        ("bundle/model.onnx.data", WEIGHTS_PATH),
        (
            "bundle/tokenizer.json",
            "opt/outrider/bundle/tokenizer.json",
        ),
    ] {
        let repository = Repository::new();
        overwrite(&repository.path(name), 0);
        let error = repository.build("image").unwrap_err();
        let Error::Stale {
            file,
            expected,
            actual,
            ..
        } = &error
        else {
            panic!("{name}: {error}");
        };
        assert_eq!(file, in_image);
        assert_ne!(expected, actual);
        assert!(
            !repository.path("image").exists(),
            "{name}: something was left"
        );
    }
}

#[test]
fn a_lock_that_names_other_things_than_the_definition_is_refused() {
    type Change = fn(&mut Repository);
    let cases: [(Change, &str); 6] = [
        (
            |it| drop(it.lock.packages.pop()),
            "libc6 is in the definition only",
        ),
        (
            |it| drop(it.definition.runtime.files.pop()),
            "opt/outrider/lib/lib.so is in the lock only",
        ),
        (
            |it| it.lock.files.retain(|file| file.path != "etc/server.yaml"),
            "etc/server.yaml is in the definition only",
        ),
        (
            |it| it.lock.files.retain(|file| file.path != WEIGHTS_PATH),
            "model.onnx.data is in the bundle only",
        ),
        (
            |it| it.lock.bundle_digest = Some("0".repeat(64)),
            "the bundle has digest",
        ),
        (
            |it| it.lock.packages[0].sha256 = "0".repeat(64),
            "ca-certificates_1%3a20250419_all.deb has",
        ),
    ];
    for (change, expected) in cases {
        let mut repository = Repository::new();
        change(&mut repository);
        let message = repository.build("image").unwrap_err().chain();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_layer_that_would_be_too_large_is_split_or_refused() {
    let repository = Repository::new();
    let limit = 4 << 20;
    let whole = repository.build("a").unwrap();
    let split = repository
        .build_with("b", |options| options.max_layer_bytes = Some(limit))
        .unwrap();
    assert_eq!(whole.manifest, split.manifest);
    let error = repository
        .build_with("c", |options| options.max_layer_bytes = Some(1 << 20))
        .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains(WEIGHTS_PATH) && message.contains("1048576"),
        "{message}"
    );
    let mut repository = Repository::new();
    repository.definition.bundle = None;
    repository.lock.bundle_digest = None;
    repository
        .lock
        .files
        .retain(|file| !file.path.starts_with("opt/outrider/bundle/"));
    let split = repository
        .build_with("d", |options| options.max_layer_bytes = Some(5 * 1024))
        .unwrap();
    let base = split
        .layers
        .iter()
        .filter(|(name, _)| name == "base")
        .count();
    assert!(base > 1, "the base has {base} layer");
    assert_eq!(
        check(&repository, &split, true).unwrap().layers,
        split.layers.len()
    );
}

#[test]
fn an_image_of_weights_shares_the_layers_of_the_whole_one() {
    let repository = Repository::new();
    let whole = repository.build("a").unwrap();
    let weights = repository
        .build_with("b", |options| options.weights_only = true)
        .unwrap();
    assert_eq!(weights.layers, whole.layers[2..4]);
    assert_eq!(check(&repository, &weights, false).unwrap().files, 4);
}

#[test]
fn an_image_on_disk_is_a_base_by_its_digest() {
    let mut repository = Repository::new();
    let below = repository.build("below").unwrap();
    repository.lock.packages.clear();
    let mut oci = Oci {
        layout: "below".into(),
        digest: below.manifest.digest().to_string(),
    };
    repository.definition.base = Base::Oci(oci.clone());
    let above = repository.build("above").unwrap();
    assert_eq!(
        above.layers[..6].iter().map(|it| &it.1).collect::<Vec<_>>(),
        below.layers.iter().map(|it| &it.1).collect::<Vec<_>>()
    );
    let verified = check(&repository, &above, false).unwrap();
    assert_eq!(verified.layers, 11);
    oci.digest = format!("sha256:{}", "0".repeat(64));
    repository.definition.base = Base::Oci(oci);
    let message = repository.build("other").unwrap_err().chain();
    assert!(
        message.contains("sha256:0000") && message.contains("below"),
        "{message}"
    );
}

#[test]
fn an_intact_image_is_verified_and_what_was_not_checked_is_counted() {
    let repository = Repository::new();
    for compression in [Compression::Zstd, Compression::Gzip, Compression::None] {
        let built = repository
            .build_with("image", |options| options.compression = compression)
            .unwrap();
        let verified = check(&repository, &built, true).unwrap();
        assert_eq!((verified.layers, verified.base_files_unchecked), (6, 0));
        let verified = check(&repository, &built, false).unwrap();
        assert_eq!((verified.files, verified.base_files_unchecked), (7, 5));
    }
}

#[test]
fn every_kind_of_damage_is_found_and_named() {
    type Damage = fn(&mut Repository, &Built);
    fn blob(built: &Built, layer: usize) -> std::path::PathBuf {
        built.layout.blob_path(&built.layers[layer].1).unwrap()
    }
    let cases: [(Damage, &str); 7] = [
        (
            |_, it| overwrite(&blob(it, 2), 5000),
            "the layer of opt/outrider/bundle/model.onnx.data",
        ),
        (|_, it| overwrite(&blob(it, 0), 30), "is damaged: expected"),
        (
            |_, it| fs::remove_file(blob(it, 2)).unwrap(),
            "the layer of opt/outrider/bundle/model.onnx.data",
        ),
        (
            |it, _| {
                it.lock
                    .files
                    .iter_mut()
                    .for_each(|file| file.sha256 = "0".repeat(64))
            },
            "tokenizer.json: has 2 bytes and sha256",
        ),
        (
            |it, _| it.definition.config.user = "1:1".to_owned(),
            "user is 10001:10001, expected 1:1",
        ),
        (
            |it, _| it.lock.bundle_digest = Some("1".repeat(64)),
            "outrider.bundle.digest is",
        ),
        (
            |it, _| it.definition.app.files[2].text = Some("y".to_owned()),
            "etc/passwd: has 8 bytes",
        ),
    ];
    for (damage, expected) in cases {
        let mut repository = Repository::new();
        let built = repository.build("image").unwrap();
        damage(&mut repository, &built);
        let message = check(&repository, &built, true).unwrap_err().chain();
        assert!(message.contains(expected), "{expected} is not in {message}");
    }
}

#[test]
fn a_manifest_that_was_changed_is_not_read() {
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    overwrite(&built.layout.blob_path(&built.manifest).unwrap(), 20);
    let message = built.layout.image(None).unwrap_err().chain();
    assert!(message.contains("is damaged"), "{message}");
    assert!(Layout::open(built.layout.dir()).is_ok());
    let _ = layout::canonical_json(&1);
}

#[test]
fn a_document_about_an_image_changes_nothing_about_it() {
    use outrider_image::referrer::{Referrer, attach};
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let image = built.layout.image(None).unwrap();
    let referrer = Referrer {
        artifact_type: "application/vnd.cyclonedx+json".to_owned(),
        bytes: b"{\"bomFormat\":\"CycloneDX\"}".to_vec(),
        annotations: BTreeMap::new(),
    };
    let descriptor = attach(&built.layout, &image, &referrer).unwrap();
    attach(&built.layout, &image, &referrer).unwrap();
    let manifest: oci_spec::image::ImageManifest = built.layout.json(&descriptor).unwrap();
    assert_eq!(
        manifest.subject().as_ref().unwrap().digest(),
        built.manifest.digest()
    );
    assert_eq!(built.layout.index().unwrap().manifests().len(), 2);
    let image = built.layout.image(None).unwrap();
    assert_eq!(image.descriptor.digest(), built.manifest.digest());
}
