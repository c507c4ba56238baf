//! `cargo xtask image` as an operator runs it, on the reference pair: the same image from two clones, signed, checked, and refused when something is changed.
//!
//! The base is a package made here and the server is that of the tests, so that neither a mirror nor a release build is needed.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, UNIX_EPOCH};

use outrider_bundle::digest::sha256_hex;
use outrider_bundle::manifest::Precision;
use outrider_image::debian::file_name;
use outrider_image::definition::Definition;
use outrider_image::lock::{Lock, Package};
use tempfile::TempDir;
use xtask::reference;
use xtask::workspace::Workspace;

/// Where the largest file of the bundle goes in the image.
const WEIGHTS: &str = "opt/outrider/bundle/model.onnx.data";

/// What differs between the machines of two people.
struct Surroundings {
    umask: &'static str,
    mode: u32,
    modified_s: u64,
    variables: [(&'static str, &'static str); 4],
}

const HERE: Surroundings = Surroundings {
    umask: "022",
    mode: 0o644,
    modified_s: 1_700_000_000,
    variables: [
        ("LC_ALL", "C"),
        ("TZ", "UTC"),
        ("USER", "root"),
        ("LOGNAME", "root"),
    ],
};

const THERE: Surroundings = Surroundings {
    umask: "077",
    mode: 0o600,
    modified_s: 1_000_000_000,
    variables: [
        ("LC_ALL", "tr_TR.UTF-8"),
        ("TZ", "Pacific/Auckland"),
        ("USER", "somebody"),
        ("LOGNAME", "else"),
    ],
};

/// A clone of this repository with the inputs of an image.
struct Checkout {
    root: PathBuf,
    surroundings: Surroundings,
}

impl Checkout {
    fn make(root: PathBuf, surroundings: Surroundings) -> Self {
        let workspace = Workspace::find().unwrap();
        let cloned = Command::new("git")
            .args(["clone", "--quiet", "--shared"])
            .args([workspace.root(), &root])
            .output()
            .unwrap();
        assert!(cloned.status.success(), "{cloned:?}");
        let checkout = Self { root, surroundings };
        let bundle = reference::find(&workspace, Precision::Int8).unwrap();
        checkout.bring(&bundle, "bundles/pair");
        let library = reference::onnxruntime(&workspace).unwrap();
        let item = library.parent().unwrap();
        let name = item.file_name().unwrap().to_str().unwrap();
        checkout.bring(item, &format!("store/{name}"));
        let package = checkout.write_package();
        checkout.write_definition(package);
        checkout
    }

    fn home(&self, name: &str) -> PathBuf {
        self.root.join(".outrider").join(name)
    }

    /// Copies a directory, with the modes and times of the surroundings.
    fn bring(&self, from: &Path, name: &str) {
        let to = self.home(name);
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let below = format!("{name}/{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                self.bring(&entry.path(), &below);
                continue;
            }
            let copy = self.home(&below);
            fs::copy(entry.path(), &copy).unwrap();
            fs::set_permissions(&copy, Permissions::from_mode(self.surroundings.mode)).unwrap();
            let modified = UNIX_EPOCH + Duration::from_secs(self.surroundings.modified_s);
            File::open(&copy).unwrap().set_modified(modified).unwrap();
        }
    }

    fn write_package(&self) -> Package {
        let mut archive = tar::Builder::new(Vec::new());
        for (path, content) in [
            ("./usr/share/ca-certificates/mozilla/A.crt", "certificate"),
            ("./usr/share/doc/ca-certificates/copyright", "MPL"),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            archive
                .append_data(&mut header, path, content.as_bytes())
                .unwrap();
        }
        let data = archive.into_inner().unwrap();
        let mut deb = ar::Builder::new(Vec::new());
        let header = ar::Header::new(b"data.tar".to_vec(), data.len() as u64);
        deb.append(&header, data.as_slice()).unwrap();
        let deb = deb.into_inner().unwrap();
        let package = Package {
            name: "ca-certificates".to_owned(),
            version: "1".to_owned(),
            architecture: "all".to_owned(),
            size_bytes: deb.len() as u64,
            sha256: sha256_hex(&deb),
        };
        let dir = self.home("packages");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(file_name(&package)), deb).unwrap();
        package
    }

    /// The definition of the image for processors, with the pair of this repository and the one package.
    fn write_definition(&self, package: Package) {
        let path = self.root.join("images/cpu.toml");
        let mut text = fs::read_to_string(&path).unwrap();
        let (head, rest) = text.split_once("packages = [").unwrap();
        let (_, rest) = rest.split_once(']').unwrap();
        text = format!("{head}packages = [\"ca-certificates\"]{rest}");
        let bundle = ".outrider/bundles/smollm2-135m-instruct-int8";
        assert!(text.contains(bundle));
        text = text.replace(bundle, ".outrider/bundles/pair");
        fs::write(self.root.join("images/pair.toml"), &text).unwrap();
        let definition = Definition::parse(&text).unwrap();
        let lock = Lock::make(&definition, &self.root, vec![package]).unwrap();
        lock.write(&self.lock()).unwrap();
    }

    fn lock(&self) -> PathBuf {
        self.root.join("images/pair.lock.toml")
    }

    fn image(&self, arguments: &[&str]) -> Output {
        let umask = format!("umask {}; exec \"$@\"", self.surroundings.umask);
        Command::new("sh")
            .args(["-c", &umask, "sh", env!("CARGO_BIN_EXE_xtask"), "image"])
            .args(arguments)
            .current_dir(&self.root)
            .env("CARGO_MANIFEST_DIR", self.root.join("xtask"))
            .env_remove("OUTRIDER_HOME")
            .env_remove("SOURCE_DATE_EPOCH")
            .envs(self.surroundings.variables)
            .output()
            .unwrap()
    }

    /// Standard output of a run that must be a success.
    fn done(&self, arguments: &[&str]) -> String {
        let output = self.image(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a run says that must fail.
    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.image(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn server() -> String {
    let server = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("outrider-server");
    assert!(
        server.is_file(),
        "{} does not exist, run `cargo build --workspace --bins`",
        server.display()
    );
    server.to_str().unwrap().to_owned()
}

fn build<'a>(server: &'a str, output: &'a str) -> [&'a str; 6] {
    ["build", "pair", "--server", server, "--output", output]
}

fn scratch() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn two_clones_in_other_surroundings_give_the_same_image() {
    let scratch = scratch();
    let server = server();
    let [here, there] = [("here", HERE), ("a/b/there", THERE)].map(|(name, surroundings)| {
        let clone = Checkout::make(scratch.path().join(name), surroundings);
        let said = clone.done(&build(&server, "layout"));
        let digest = said.split_whitespace().next().unwrap().to_owned();
        assert!(digest.starts_with("sha256:"), "{said}");
        (clone, digest)
    });
    assert_eq!(here.1, there.1);
    // Bill of materials and provenance are the same as well.
    let index =
        |clone: &Checkout| fs::read_to_string(clone.root.join("layout/index.json")).unwrap();
    assert_eq!(index(&here.0), index(&there.0));
    let other = there.0.root.join("layout");
    let said = here.0.done(&["diff", "layout", other.to_str().unwrap()]);
    assert!(said.contains(&here.1), "{said}");
}

#[test]
fn an_image_is_signed_and_checked_and_what_was_changed_is_named() {
    let scratch = scratch();
    let server = server();
    let clone = Checkout::make(scratch.path().join("clone"), HERE);
    clone.done(&["keygen", "own"]);
    clone.done(&["keygen", "other"]);
    clone.done(&[&build(&server, "layout")[..], &["--key", "own.key"]].concat());
    let verify = ["verify", "layout", "--definition", "pair", "--key"];
    let said = clone.done(&[&verify[..], &["own.pub"]].concat());
    assert!(said.contains("ok"), "{said}");
    let said = clone.refused(&[&verify[..], &["other.pub"]].concat());
    assert!(said.contains("there is no statement"), "{said}");

    // A layer of weights with one byte changed.
    let blobs = clone.root.join("layout/blobs/sha256");
    let mut weights: Vec<PathBuf> = fs::read_dir(&blobs)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    weights.sort_by_key(|path| fs::metadata(path).unwrap().len());
    flip(weights.last().unwrap());
    let said = clone.refused(&[&verify[..], &["own.pub"]].concat());
    assert!(
        said.contains(WEIGHTS) && said.contains("is damaged"),
        "{said}"
    );

    // The file that it was made of.
    let source = WEIGHTS.replace("opt/outrider/bundle", "bundles/pair");
    let source = clone.home(&source);
    flip(&source);
    let said = clone.refused(&build(&server, "again"));
    assert!(said.contains(WEIGHTS) && said.contains("stale"), "{said}");
    assert!(!clone.root.join("again").exists());
    flip(&source);

    // The lock.
    let lock = fs::read_to_string(clone.lock()).unwrap();
    let digest = lock.split(WEIGHTS).nth(1).unwrap();
    let digest = digest.split("sha256 = \"").nth(1).unwrap();
    let edited = lock.replace(&digest[..64], &"0".repeat(64));
    fs::write(clone.lock(), edited).unwrap();
    let said = clone.refused(&build(&server, "again"));
    assert!(said.contains(WEIGHTS) && said.contains("stale"), "{said}");
}

/// Changes a byte in the middle of a file; twice is not at all.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}
