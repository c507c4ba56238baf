//! The Outrider server: a target model behind an OpenAI-compatible interface, with block-parallel drafting that never changes a token.
//!
//! Layers, outermost first; each knows only the ones below it:
//! [`http`] (OpenAI shapes) → [`engine`] (requests, slots, steps) → [`draft`] (proposals) → [`model`] (sessions and KV memory) → [`ops`] (custom operators).
//! [`noise`] is what the engine's choice of a token and the draft head's have in common.
//! [`text`] turns strings into token ids and back and depends on none of them.

pub mod audit;
pub mod auth;
pub mod config;
pub mod draft;
pub mod engine;
pub mod http;
pub mod launch;
pub mod lifecycle;
pub mod listen;
pub mod loader;
pub mod logging;
pub mod machine;
pub mod metrics;
pub mod model;
pub mod noise;
pub mod ops;
pub mod refusals;
pub mod reload;
pub mod service;
pub mod small_file;
pub mod systemd;
pub mod telemetry;
pub mod text;
pub mod tls;
mod watch;
