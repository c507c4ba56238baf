//! OCI images without a daemon: the same inputs give the same bytes on any machine, and every input has a digest in a lock.
//!
//! - [`definition`] and [`lock`] say what goes into an image, as data.
//! - [`tree`], [`layer`] and [`layout`] turn files into layers and layers into an OCI image layout; [`debian`] and [`base`] bring what lies below the server.
//! - [`build`] puts them together, [`verify`] holds a layout to a lock, [`diff`] says why two layouts aren't equal.
//! - [`registry`] pushes layouts and pulls them.
//!
//! Nothing here reads the clock, the host name, the user, the locale or the order of a directory.
//! What belongs to an image without being part of it points to the manifest by `subject` (see [`referrer`]): the bill of materials ([`sbom`]), where it comes from
//! ([`provenance`]), and who vouches for it ([`signature`]); [`evidence`] attaches, signs and checks all three.

pub mod base;
pub mod build;
pub mod crates;
pub mod debian;
pub mod definition;
pub mod diff;
mod error;
pub mod evidence;
pub mod layer;
pub mod layout;
pub mod lock;
pub mod provenance;
pub mod referrer;
pub mod registry;
pub mod sbom;
pub mod signature;
pub mod tree;
pub mod verify;

pub use error::Error;
