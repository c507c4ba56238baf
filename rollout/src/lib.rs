//! Brings a new version of a service from no traffic to all of it in steps, and back by itself when something is wrong.
//!
//! [`machine`] decides and touches nothing; [`runner`] carries decisions out through a [`runner::World`]; [`real`] is the one that is real.
//! The crate links neither the server nor ONNX Runtime: it moves any service that [`metric`]'s figures are measured of.

pub mod argo;
pub mod cli;
pub mod clock;
pub mod gates;
pub mod gateway;
pub mod machine;
pub mod metric;
pub mod plan;
pub mod prometheus;
pub mod real;
pub mod runner;
pub mod store;
