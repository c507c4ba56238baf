//! Bills of materials, provenance and signatures: made, attached, pushed, pulled and checked.

mod support;

use std::fs;
use std::time::Duration;

use outrider_image::Error;
use outrider_image::build::Built;
use outrider_image::evidence::{sign, verify};
use outrider_image::layout::{Image, Layout};
use outrider_image::provenance::{self, Source};
use outrider_image::referrer::{self, Referrer};
use outrider_image::registry::{
    Client, PushOptions, Retry, pull, pull_referrers, push, push_referrers,
};
use outrider_image::signature::{BUNDLE_MEDIA_TYPE, PublicKey};
use outrider_image::verify::Expected;
use outrider_image::{sbom, signature};
use serde_json::Value;
use support::registry::StandIn;
use support::{Repository, add_evidence, key, source, vouched};

fn check(repository: &Repository, layout: &Layout, key: &PublicKey) -> Result<(), Error> {
    let image = layout.image(None).unwrap();
    let expected = Expected {
        definition: &repository.definition,
        lock: &repository.lock,
        packages_dir: None,
    };
    verify(layout, &image, expected, key).map(|_| ())
}

fn attached(layout: &Layout, artifact_type: &str) -> Vec<Vec<u8>> {
    let image = layout.image(None).unwrap();
    referrer::list(layout, &image)
        .unwrap()
        .into_iter()
        .filter(|(_, manifest)| {
            manifest.artifact_type().as_ref().unwrap().to_string() == artifact_type
        })
        .map(|(_, manifest)| referrer::document(layout, &manifest).unwrap())
        .collect()
}

fn image(built: &Built) -> Image {
    built.layout.image(None).unwrap()
}

#[test]
fn the_same_build_in_another_place_has_the_same_evidence() {
    let [one, other] = [(); 2].map(|()| {
        let repository = Repository::new();
        let built = repository.build("image").unwrap();
        add_evidence(&repository, &built, &source());
        let documents = [sbom::MEDIA_TYPE, signature::STATEMENT_TYPE];
        documents.map(|kind| attached(&built.layout, kind).remove(0))
    });
    assert!(one == other);
}

#[test]
fn the_evidence_says_what_it_says() {
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let unlicensed = add_evidence(&repository, &built, &source());
    assert_eq!(unlicensed, ["ca-certificates", "libc6", "odd", "tiny"]);
    for (name, kind) in [
        ("sbom", sbom::MEDIA_TYPE),
        ("provenance", signature::STATEMENT_TYPE),
    ] {
        let document = attached(&built.layout, kind).remove(0);
        let document: Value = serde_json::from_slice(&document).unwrap();
        insta::assert_snapshot!(name, serde_json::to_string_pretty(&document).unwrap());
    }
}

#[test]
fn an_image_of_weights_alone_says_nothing_of_what_it_lacks() {
    let repository = Repository::new();
    let packages_dir = repository.path("packages");
    let output = repository.path("image");
    let mut options = repository.options(&packages_dir, &output);
    options.weights_only = true;
    let built = outrider_image::build::build(&options).unwrap();
    let digest = built.manifest.digest().to_string();
    let sbom = sbom::make(&sbom::Inputs {
        options: &options,
        digest: &digest,
        crates: &[],
        items: &[],
    });
    let sbom = String::from_utf8(sbom.unwrap().bytes).unwrap();
    assert!(sbom.contains("model.onnx.data"), "{sbom}");
    for absent in ["libc6", "usr/bin/server", "etc/server.yaml"] {
        assert!(!sbom.contains(absent), "{absent} is in {sbom}");
    }
}

#[test]
fn only_the_key_that_signed_vouches_for_an_image() {
    let repository = Repository::new();
    let (built, own) = vouched(&repository);
    check(&repository, &built.layout, &own.public()).unwrap();
    let other = key(&repository, "other");
    let error = check(&repository, &built.layout, &other.public()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(&other.public().hint()), "{message}");
    assert!(message.contains(&own.public().hint()), "{message}");
    // A second signer doesn't stand in the way of the first.
    sign(&built.layout, &image(&built), &other).unwrap();
    for key in [own, other] {
        check(&repository, &built.layout, &key.public()).unwrap();
    }
}

#[test]
fn an_image_without_evidence_cannot_be_signed() {
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let key = key(&repository, "key");
    let error = sign(&built.layout, &image(&built), &key).unwrap_err();
    assert!(error.to_string().contains("is attached 0 times"), "{error}");
    let error = check(&repository, &built.layout, &key.public()).unwrap_err();
    let message = error.to_string();
    for wanted in [
        provenance::PREDICATE_TYPE,
        sbom::PREDICATE_TYPE,
        "cosign/sign/v1",
    ] {
        assert!(message.contains(wanted), "{message}");
    }
}

/// Attaches a bundle of a statement that a test made up.
fn attach_statement(built: &Built, key: &signature::PrivateKey, statement: &str) {
    let referrer = Referrer {
        artifact_type: BUNDLE_MEDIA_TYPE.to_owned(),
        bytes: key.sign(statement.as_bytes()),
        annotations: Default::default(),
    };
    referrer::attach(&built.layout, &image(built), &referrer).unwrap();
}

#[test]
fn a_statement_about_another_image_vouches_for_none() {
    let repository = Repository::new();
    let (built, key) = vouched(&repository);
    let statement = attached(&built.layout, signature::STATEMENT_TYPE).remove(0);
    let statement = String::from_utf8(statement).unwrap();
    let digest = built.manifest.digest().to_string();
    let own = digest.trim_start_matches("sha256:");
    attach_statement(&built, &key, &statement.replace(own, &"0".repeat(64)));
    let error = check(&repository, &built.layout, &key.public()).unwrap_err();
    assert!(
        error.to_string().contains("is about another image"),
        "{error}"
    );
}

#[test]
fn provenance_that_the_image_or_the_lock_contradicts_is_refused() {
    let repository = Repository::new();
    for (path, expected) in [
        ("opt/outrider/lib/lib.so", "opt/outrider/lib/lib.so"),
        ("usr/bin/server", "usr/bin/server"),
        ("libc6", "libc6"),
        ("bundle", "\"bundle\""),
    ] {
        let built = repository.build("image").unwrap();
        add_evidence(&repository, &built, &source());
        let key = key(&repository, &format!("key-{}", path.replace('/', "-")));
        sign(&built.layout, &image(&built), &key).unwrap();
        check(&repository, &built.layout, &key.public()).unwrap();
        let statement = attached(&built.layout, signature::STATEMENT_TYPE).remove(0);
        let mut statement: Value = serde_json::from_slice(&statement).unwrap();
        let inputs = &mut statement["predicate"]["buildDefinition"]["resolvedDependencies"];
        let inputs = inputs.as_array_mut().unwrap();
        let input = inputs.iter_mut().find(|it| it["name"] == path).unwrap();
        input["digest"]["sha256"] = "0".repeat(64).into();
        // One that tells the truth doesn't make up for one that lies.
        attach_statement(&built, &key, &statement.to_string());
        let error = check(&repository, &built.layout, &key.public()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("the provenance has no input"), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_byte_flipped_in_what_is_attached_is_refused() {
    let repository = Repository::new();
    let (built, key) = vouched(&repository);
    for (_, manifest) in referrer::list(&built.layout, &image(&built)).unwrap() {
        if manifest.artifact_type().as_ref().unwrap().to_string() != BUNDLE_MEDIA_TYPE {
            continue;
        }
        let path = built.layout.blob_path(&manifest.layers()[0]).unwrap();
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        fs::write(&path, damaged).unwrap();
        let error = check(&repository, &built.layout, &key.public()).unwrap_err();
        assert!(matches!(error, Error::Digest { .. }), "{error}");
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn provenance_says_that_the_sources_had_changes_of_their_own() {
    let repository = Repository::new();
    let built = repository.build("image").unwrap();
    let source = Source {
        is_modified: true,
        ..source()
    };
    add_evidence(&repository, &built, &source);
    let statement = attached(&built.layout, signature::STATEMENT_TYPE).remove(0);
    let statement = String::from_utf8(statement).unwrap();
    assert!(statement.contains(r#"{"modified":true}"#), "{statement}");
}

#[test]
fn evidence_comes_back_from_a_registry() {
    for lists_referrers in [false, true] {
        let stand_in = StandIn::start();
        {
            let mut state = stand_in.state.lock().unwrap();
            state.lists_referrers = lists_referrers;
            state.loses_index = true;
        }
        let address = std::env::var("OUTRIDER_REGISTRY").unwrap_or(stand_in.address.clone());
        let repository = Repository::new();
        let (built, key) = vouched(&repository);
        let digest = built.manifest.digest().to_string();
        let name = format!("{address}/vouched-{lists_referrers}@{digest}");
        let retry = Retry {
            attempts: 3,
            first_wait: Duration::from_millis(1),
        };
        let client = Client::new(&name.parse().unwrap(), None, false, retry);
        let options = PushOptions::default();
        let own = image(&built);
        push(&client, &built.layout, &own, &options, &mut |_, _, _| {}).unwrap();
        for _ in 0..2 {
            push_referrers(&client, &built.layout, &own, &options, &mut |_, _, _| {}).unwrap();
        }
        let pulled = pull(&client, &repository.path("pulled")).unwrap();
        let error = check(&repository, &pulled, &key.public()).unwrap_err();
        assert!(matches!(error, Error::Evidence(_)), "{error}");
        let count = pull_referrers(&client, &pulled, &pulled.image(None).unwrap()).unwrap();
        assert_eq!(count, 5, "lists_referrers = {lists_referrers}");
        check(&repository, &pulled, &key.public()).unwrap();
        let state = stand_in.state.lock().unwrap();
        let tag = format!("vouched-{lists_referrers}/sha256-{}", &digest[7..]);
        if std::env::var_os("OUTRIDER_REGISTRY").is_none() {
            assert_eq!(state.manifests.contains_key(&tag), !lists_referrers);
        }
    }
}
