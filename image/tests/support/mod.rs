//! A small repository with a definition, a bundle and packages, made anew for each test.

// Each test file uses another part of it.
#![allow(dead_code)]

pub mod registry;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use outrider_bundle::Manifest;
use outrider_bundle::digest::sha256_hex;
use outrider_bundle::manifest::{
    Attention, FileEntry, GenerationDefaults, Precision, TargetFacts, TextFacts,
};
use outrider_image::Error;
use outrider_image::build::{Built, Options, build};
use outrider_image::crates::Crate;
use outrider_image::definition::Definition;
use outrider_image::evidence::{self, Origin};
use outrider_image::layer::Compression;
use outrider_image::lock::{Lock, Package};
use outrider_image::provenance::Source;
use outrider_image::signature::{PrivateKey, generate};
use tempfile::TempDir;

/// Bytes of the weights, above the size from which a file has a layer of its own.
pub const WEIGHTS_BYTES: usize = (1 << 20) + 17;

pub const WEIGHTS_PATH: &str = "opt/outrider/bundle/model.onnx.data";

const DEFINITION: &str = r#"
schema_version = 1
name = "tiny"
architecture = "amd64"

[base.debian]
packages = ["ca-certificates", "libc6"]
exclude = ["usr/share/doc", "usr/bin"]
certificate_file = "etc/ssl/certs/ca-certificates.crt"

[runtime]
files = [{ from = "lib.so", to = "opt/outrider/lib/lib.so" }]

[bundle]
from = "bundle"
to = "opt/outrider/bundle"

[app]
directories = ["run/outrider"]
files = [
    { from = "server", to = "usr/bin/server", executable = true, built = true },
    { from = "server.yaml", to = "etc/server.yaml" },
    { text = "x:x:1:1\n", to = "etc/passwd" },
]

[config]
user = "10001:10001"
entrypoint = ["/usr/bin/server"]
cmd = ["--config", "/etc/server.yaml"]
env = { A = "1", B = "2" }
working_dir = "/"
stop_signal = "SIGTERM"
ports = ["8080/tcp"]
labels = { title = "tiny" }
health = { port = 8081, live = "/livez", ready = "/readyz" }
"#;

pub struct Repository {
    pub dir: TempDir,
    pub definition: Definition,
    pub lock: Lock,
}

impl Repository {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::write(root.join("lib.so"), "library").unwrap();
        fs::write(root.join("server"), "program").unwrap();
        fs::write(root.join("server.yaml"), "serving:\n").unwrap();
        write_bundle(&root.join("bundle"));
        let packages = write_packages(&root.join("packages"));
        let definition = Definition::parse(DEFINITION).unwrap();
        let lock = Lock::make(&definition, root, packages).unwrap();
        Self {
            dir,
            definition,
            lock,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn build(&self, output: &str) -> Result<Built, Error> {
        self.build_with(output, |_| {})
    }

    pub fn build_with(
        &self,
        output: &str,
        change: impl FnOnce(&mut Options<'_>),
    ) -> Result<Built, Error> {
        let packages_dir = self.path("packages");
        let output = self.path(output);
        let mut options = self.options(&packages_dir, &output);
        change(&mut options);
        build(&options)
    }

    pub fn options<'a>(&'a self, packages_dir: &'a Path, output: &'a Path) -> Options<'a> {
        Options {
            definition: &self.definition,
            lock: &self.lock,
            root: self.dir.path(),
            packages_dir,
            output,
            epoch_s: 0,
            compression: Compression::Zstd,
            max_layer_bytes: None,
            store_weights: true,
            weights_only: false,
            labels: BTreeMap::new(),
        }
    }
}

pub fn weights() -> Vec<u8> {
    (0..WEIGHTS_BYTES)
        .map(|index| (index * index % 251) as u8)
        .collect()
}

fn write_bundle(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let files = BTreeMap::from([
        ("model.onnx", b"graph".to_vec()),
        ("model.onnx.data", weights()),
        ("tokenizer.json", b"{}".to_vec()),
    ]);
    let mut entries = BTreeMap::new();
    for (name, bytes) in files {
        fs::write(dir.join(name), &bytes).unwrap();
        let entry = FileEntry {
            size_bytes: bytes.len() as u64,
            sha256: sha256_hex(&bytes),
        };
        entries.insert(name.to_owned(), entry);
    }
    let manifest = Manifest {
        schema_version: 1,
        name: "tiny".to_owned(),
        files: entries,
        target: TargetFacts {
            graph: "model.onnx".to_owned(),
            architecture: "llama".to_owned(),
            precision: Precision::Fp32,
            attention: Attention::Native,
            layers: 2,
            hidden_size: 16,
            kv_heads: 1,
            head_dim: 8,
            vocab_size: 32,
            context_tokens: 64,
            kv_dtype: "float32".to_owned(),
            taps: Vec::new(),
        },
        draft: None,
        text: TextFacts {
            tokenizer: "tokenizer.json".to_owned(),
            chat_template: None,
            bos_token: None,
            eos_token: None,
            add_bos: false,
        },
        generation: GenerationDefaults {
            eos_token_ids: vec![2],
            ..GenerationDefaults::default()
        },
        tools: BTreeMap::new(),
        sources: Vec::new(),
    };
    manifest.write(dir).unwrap();
}

/// A package of one release of the archive: xz in one, zstd in the other, as Debian and its derivatives have them.
fn write_packages(dir: &Path) -> Vec<Package> {
    fs::create_dir(dir).unwrap();
    let certificates = [
        ("usr/share/ca-certificates/mozilla/B.crt", "certificate B"),
        ("usr/share/ca-certificates/mozilla/A.crt", "certificate A\n"),
        ("usr/share/doc/ca-certificates/copyright", "MPL"),
        ("usr/share/doc/ca-certificates/changelog.gz", "long"),
    ];
    let library = [
        ("lib/x86_64-linux-gnu/libc.so.6", "libc"),
        ("usr/bin/ldd", "#!/bin/bash"),
    ];
    let zst = zstd::encode_all(archive(&certificates, None).as_slice(), 3).unwrap();
    let link = (
        "lib64/ld-linux-x86-64.so.2",
        "/lib/x86_64-linux-gnu/libc.so.6",
    );
    let gz = {
        use std::io::Write;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
        encoder.write_all(&archive(&library, Some(link))).unwrap();
        encoder.finish().unwrap()
    };
    [
        ("ca-certificates", "1:20250419", "all", "data.tar.zst", zst),
        ("libc6", "2.36-9+deb12u14", "amd64", "data.tar.gz", gz),
    ]
    .map(|(name, version, architecture, member, data)| {
        let mut bytes = Vec::new();
        let mut builder = ar::Builder::new(&mut bytes);
        for (member, data) in [("debian-binary", b"2.0\n".as_slice()), (member, &data)] {
            let header = ar::Header::new(member.as_bytes().to_vec(), data.len() as u64);
            builder.append(&header, data).unwrap();
        }
        let package = Package {
            name: name.to_owned(),
            version: version.to_owned(),
            architecture: architecture.to_owned(),
            size_bytes: bytes.len() as u64,
            sha256: sha256_hex(&bytes),
        };
        fs::write(dir.join(outrider_image::debian::file_name(&package)), bytes).unwrap();
        package
    })
    .to_vec()
}

fn archive(files: &[(&str, &str)], link: Option<(&str, &str)>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(if path.contains("bin/") { 0o4755 } else { 0o600 });
        header.set_mtime(123_456_789);
        builder
            .append_data(&mut header, format!("./{path}"), content.as_bytes())
            .unwrap();
    }
    if let Some((path, target)) = link {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        header.set_mtime(1);
        builder.append_link(&mut header, path, target).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Evidence for the repository, of sources and crates that are made up.
pub fn add_evidence(repository: &Repository, built: &Built, source: &Source) -> Vec<String> {
    let packages_dir = repository.path("packages");
    let output = repository.path("image");
    let options = repository.options(&packages_dir, &output);
    let linked = |name: &str, licence: Option<&str>| Crate {
        name: name.to_owned(),
        version: "1.0.0+x".to_owned(),
        licence: licence.map(str::to_owned),
        sha256: Some(sha256_hex(name.as_bytes())),
    };
    let crates = [
        linked("half", Some("MIT OR Apache-2.0")),
        linked("odd", None),
    ];
    let library = sha256_hex(b"library");
    let fetched = format!(
        "schema_version = 1\n[[item]]\nname = \"runtime\"\nversion = \"1.2\"\nlicence = \"MIT\"\n\
         source.path = {{ path = \".\" }}\n[[item.files]]\nname = \"lib.so\"\nsize_bytes = 7\n\
         sha256 = \"{library}\"\n"
    );
    let items = outrider_bundle::lock::Lock::parse(&fetched).unwrap().items;
    let origin = Origin {
        documents: &["server.yaml"],
        source,
        crates: &crates,
        items: &items,
        tools: &BTreeMap::from([("rustc".to_owned(), "rustc 1.0.0".to_owned())]),
        builder_id: outrider_image::provenance::BUILDER_ID,
    };
    evidence::add(&options, built, &origin).unwrap()
}

/// A key of its own, in the directory of the repository.
pub fn key(repository: &Repository, name: &str) -> PrivateKey {
    let path = repository.path(name);
    generate(&path, &path.with_extension("pub")).unwrap();
    PrivateKey::load(&path).unwrap()
}

/// An image with evidence, signed with a key of its own.
pub fn vouched(repository: &Repository) -> (Built, PrivateKey) {
    let built = repository.build("image").unwrap();
    add_evidence(repository, &built, &source());
    let key = key(repository, "key");
    let image = built.layout.image(None).unwrap();
    evidence::sign(&built.layout, &image, &key).unwrap();
    (built, key)
}

pub fn source() -> Source {
    Source {
        uri: "https://example.com/outrider".to_owned(),
        commit: "c".repeat(40),
        is_modified: false,
    }
}
