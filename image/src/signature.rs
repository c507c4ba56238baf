//! Signatures with a P-256 key: DSSE envelopes in Sigstore bundles of version 0.3.
//!
//! Keys are PEM files, PKCS#8 and SubjectPublicKeyInfo, that other programs read and write as well.
//! There is no transparency log and no certificate: whoever verifies has the public key from elsewhere.
//! A bundle of another key is another signer's and says nothing; see [`BundleError::OtherKey`].

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use outrider_bundle::digest::sync_parent;
use pem::Pem;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::layout::canonical_json;

/// Media type of a bundle, and artifact type of the manifest that attaches one.
pub const BUNDLE_MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// Payload type of an in-toto statement in an envelope.
pub const STATEMENT_TYPE: &str = "application/vnd.in-toto+json";

const PRIVATE_TAG: &str = "PRIVATE KEY";
const PUBLIC_TAG: &str = "PUBLIC KEY";

/// What precedes the point of a P-256 key in its SubjectPublicKeyInfo (RFC 5480): the algorithm, the curve, and the head of a bit string of 65 bytes.
const SPKI_HEAD: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// Bytes of an uncompressed point: a 4 and both coordinates.
const POINT_BYTES: usize = 65;

/// A key that signs.
#[derive(Debug)]
pub struct PrivateKey {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

/// A key that verifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    spki: Vec<u8>,
}

/// Why a bundle says nothing.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The text is no bundle.
    #[error("is no Sigstore bundle with an envelope")]
    Form(#[source] serde_json::Error),
    /// The bundle is of another version.
    #[error("has the media type {0:?}, this build reads {BUNDLE_MEDIA_TYPE:?}")]
    MediaType(String),
    /// Somebody else's signature.
    #[error("is signed with the key {signer}, not with {expected}")]
    OtherKey {
        /// Hint of the key that signed, or what there is instead.
        signer: String,
        /// Hint of the key that was asked for.
        expected: String,
    },
    /// The payload isn't a statement.
    #[error("has a payload of the type {0:?}, expected {STATEMENT_TYPE:?}")]
    PayloadType(String),
    /// Something that should be Base64 isn't.
    #[error("has a {0} that is no Base64")]
    Base64(&'static str),
    /// The envelope has none or several signatures.
    #[error("has {0} signatures, a bundle has one")]
    Signatures(usize),
    /// The key didn't sign these bytes.
    #[error("has a signature that the key {0} did not make of this payload")]
    Signature(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Envelope,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    public_key: Option<KeyHint>,
}

#[derive(Serialize, Deserialize)]
struct KeyHint {
    #[serde(default)]
    hint: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Serialize, Deserialize)]
struct Signature {
    sig: String,
    #[serde(default)]
    keyid: String,
}

/// Makes a key; the private file is for its owner alone. A file that is there is never replaced.
pub fn generate(private: &Path, public: &Path) -> Result<PublicKey, Error> {
    for path in [private, public] {
        if path.exists() {
            return Err(Error::key(path, "exists, and a key is not replaced"));
        }
    }
    let random = SystemRandom::new();
    let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random)
        .map_err(|_| Error::key(private, "the system has no random bytes"))?;
    let key = PrivateKey::from_pkcs8(document.as_ref()).map_err(|why| Error::key(private, why))?;
    let pem = Pem::new(PRIVATE_TAG, document.as_ref());
    write_new(private, &pem::encode(&pem), 0o600)?;
    write_new(public, &key.public().to_pem(), 0o644)?;
    Ok(key.public())
}

impl PrivateKey {
    /// Reads a PEM file with an unencrypted PKCS#8 key.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let der = load_pem(path, PRIVATE_TAG)?;
        Self::from_pkcs8(&der).map_err(|why| Error::key(path, why))
    }

    fn from_pkcs8(der: &[u8]) -> Result<Self, String> {
        let random = SystemRandom::new();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der, &random)
            .map_err(|why| format!("must be a P-256 key with its public part ({why})"))?;
        Ok(Self { pair, random })
    }

    /// The key that verifies what this one signs.
    pub fn public(&self) -> PublicKey {
        PublicKey {
            spki: [&SPKI_HEAD, self.pair.public_key().as_ref()].concat(),
        }
    }

    /// Signs an in-toto statement; returns the bundle. Two signatures of the same bytes aren't the same.
    pub fn sign(&self, statement: &[u8]) -> Vec<u8> {
        let signed = pre_authentication(STATEMENT_TYPE, statement);
        let signature = self
            .pair
            .sign(&self.random, &signed)
            .expect("the system had random bytes when the key was made or read");
        canonical_json(&Bundle {
            media_type: BUNDLE_MEDIA_TYPE.to_owned(),
            verification_material: Material {
                public_key: Some(KeyHint {
                    hint: self.public().hint(),
                }),
            },
            dsse_envelope: Envelope {
                payload: STANDARD.encode(statement),
                payload_type: STATEMENT_TYPE.to_owned(),
                signatures: vec![Signature {
                    sig: STANDARD.encode(signature),
                    keyid: String::new(),
                }],
            },
        })
    }
}

impl PublicKey {
    /// Reads a PEM file with a SubjectPublicKeyInfo.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let spki = load_pem(path, PUBLIC_TAG)?;
        if !spki.starts_with(&SPKI_HEAD) || spki.len() != SPKI_HEAD.len() + POINT_BYTES {
            return Err(Error::key(
                path,
                "must be a P-256 key, its point uncompressed",
            ));
        }
        Ok(Self { spki })
    }

    /// The key as PEM.
    pub fn to_pem(&self) -> String {
        pem::encode(&Pem::new(PUBLIC_TAG, self.spki.as_slice()))
    }

    /// What bundles call the key: Base64 of the SHA-256 of its SubjectPublicKeyInfo.
    pub fn hint(&self) -> String {
        STANDARD.encode(digest(&SHA256, &self.spki))
    }

    /// The statement that a bundle holds, when this key signed it.
    pub fn verify(&self, bundle: &[u8]) -> Result<Vec<u8>, BundleError> {
        let bundle: Bundle = serde_json::from_slice(bundle).map_err(BundleError::Form)?;
        if bundle.media_type != BUNDLE_MEDIA_TYPE {
            return Err(BundleError::MediaType(bundle.media_type));
        }
        let expected = self.hint();
        let signer = bundle.verification_material.public_key;
        match signer.map(|key| key.hint) {
            Some(hint) if hint == expected => {}
            signer => {
                let signer = signer.unwrap_or_else(|| "of a certificate".to_owned());
                return Err(BundleError::OtherKey { signer, expected });
            }
        }
        let envelope = bundle.dsse_envelope;
        if envelope.payload_type != STATEMENT_TYPE {
            return Err(BundleError::PayloadType(envelope.payload_type));
        }
        let [signature] = envelope.signatures.as_slice() else {
            return Err(BundleError::Signatures(envelope.signatures.len()));
        };
        let decode =
            |text: &str, what| STANDARD.decode(text).map_err(|_| BundleError::Base64(what));
        let payload = decode(&envelope.payload, "payload")?;
        let signature = decode(&signature.sig, "signature")?;
        let signed = pre_authentication(STATEMENT_TYPE, &payload);
        let point = &self.spki[SPKI_HEAD.len()..];
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point)
            .verify(&signed, &signature)
            .map_err(|_| BundleError::Signature(expected))?;
        Ok(payload)
    }
}

/// What is signed of an envelope: the pre-authentication encoding of DSSE 1.0.
fn pre_authentication(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!(
        "DSSEv1 {} {payload_type} {} ",
        payload_type.len(),
        payload.len()
    );
    [head.as_bytes(), payload].concat()
}

fn load_pem(path: &Path, tag: &str) -> Result<Vec<u8>, Error> {
    let text = fs::read(path).map_err(|source| Error::read(path, source))?;
    let pem =
        pem::parse(text).map_err(|why| Error::key(path, format!("is no PEM file ({why})")))?;
    if pem.tag() != tag {
        let problem = format!("holds a {:?}, expected an unencrypted {tag:?}", pem.tag());
        return Err(Error::key(path, problem));
    }
    Ok(pem.into_contents())
}

/// Writes a file that must not be there yet, whole or not at all.
fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let written = (|| {
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        // Such a file is its owner's alone from the beginning.
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file()
            .set_permissions(Permissions::from_mode(mode))?;
        file.as_file().sync_all()?;
        file.persist_noclobber(path).map_err(|error| error.error)?;
        sync_parent(path)
    })();
    written.map_err(|source| Error::write(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(dir: &Path, name: &str) -> PrivateKey {
        let path = dir.join(name);
        generate(&path, &path.with_extension("pub")).unwrap();
        PrivateKey::load(&path).unwrap()
    }

    #[test]
    fn what_is_signed_is_what_the_specification_has() {
        let expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world";
        assert_eq!(
            pre_authentication("http://example.com/HelloWorld", b"hello world"),
            expected
        );
    }

    #[test]
    fn only_the_bytes_that_were_signed_and_the_key_that_signed_them_will_do() {
        let dir = tempfile::tempdir().unwrap();
        let (own, other) = (key(dir.path(), "own"), key(dir.path(), "other"));
        let bundle = String::from_utf8(own.sign(b"{}")).unwrap();
        let public = PublicKey::load(&dir.path().join("own.pub")).unwrap();
        assert_eq!(public, own.public());
        assert_eq!(public.verify(bundle.as_bytes()).unwrap(), b"{}");
        let error = other.public().verify(bundle.as_bytes()).unwrap_err();
        assert!(matches!(error, BundleError::OtherKey { .. }), "{error}");
        let payload = STANDARD.encode(b"{}");
        let hint = public.hint();
        for (from, to, expected) in [
            (&*payload, &*STANDARD.encode(b"[]"), "did not make"),
            (&payload, "*", "payload that is no Base64"),
            ("bundle.v0.3", "bundle.v0.2", "bundle.v0.2"),
            ("vnd.in-toto", "vnd.out-toto", "out-toto"),
            ("\"sig\"", "\"gis\"", "is no Sigstore bundle"),
            ("\"publicKey\"", "\"certificate\"", "of a certificate"),
        ] {
            assert!(bundle.contains(from), "{from} is not in {bundle}");
            let changed = bundle.replacen(from, to, 1);
            let error = public.verify(changed.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
        // A forger who names the key hasn't got it.
        let forged = String::from_utf8(other.sign(b"{}")).unwrap();
        let forged = forged.replace(&other.public().hint(), &hint);
        let error = public.verify(forged.as_bytes()).unwrap_err();
        assert!(matches!(error, BundleError::Signature(_)), "{error}");
    }

    #[test]
    fn a_private_key_is_its_owners_alone_and_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = (dir.path().join("key"), dir.path().join("key.pub"));
        generate(&private, &public).unwrap();
        let mode = fs::metadata(&private).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let before = fs::read(&private).unwrap();
        generate(&private, &dir.path().join("other.pub")).unwrap_err();
        assert_eq!(fs::read(&private).unwrap(), before);
        for (path, expected) in [(&public, "holds a \"PUBLIC KEY\""), (&private, "holds a")] {
            let error = match path == &public {
                true => PrivateKey::load(path).unwrap_err(),
                false => PublicKey::load(path).unwrap_err(),
            };
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
