//! Checks a machine, a bundle and a configuration before a server starts on them.
//!
//! Facts come first ([`collect`]): they are read, never changed, and each source that can block has a time limit.
//! [`checks`] are pure functions of them, so that facts that were recorded on one machine can be judged on another.
//! [`report`] shows what was found.
//!
//! What could not be read is [`facts::Reading::Unknown`], and a check of it is unknown too: it is never a pass.

pub mod checks;
pub mod collect;
pub mod facts;
pub mod report;
