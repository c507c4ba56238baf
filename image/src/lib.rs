//! OCI images without a daemon: the same inputs give the same bytes on any machine, and every input has a digest in a lock.
//!
//! - [`definition`] and [`lock`] say what goes into an image, as data.
//! - [`tree`], [`layer`] and [`layout`] turn files into layers and layers into an OCI image layout; [`debian`] and [`base`] bring what lies below the server.
//! - [`build`] puts them together, [`verify`] holds a layout to a lock, [`diff`] says why two layouts aren't equal.
//! - [`registry`] pushes layouts and pulls them.
//!
//! Nothing here reads the clock, the host name, the user, the locale or the order of a directory.
//! What belongs to an image without being part of it (bill of materials, provenance, signature) points to the manifest by `subject`: see [`referrer`].

pub mod base;
pub mod build;
pub mod debian;
pub mod definition;
pub mod diff;
mod error;
pub mod layer;
pub mod layout;
pub mod lock;
pub mod referrer;
pub mod registry;
pub mod tree;
pub mod verify;

pub use error::Error;
