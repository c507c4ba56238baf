//! Asking the servers of tests for completions; the answers are those of [`xtask::answer`].

use outrider_verify::wire::Api;
use serde_json::Value;

pub use xtask::answer::{Answer, Drafted};

use crate::servers::Server;

/// A request of `server`'s model with `fields`, token ids and, if streamed, usage included.
pub fn request(server: &Server, fields: &Value) -> Value {
    xtask::answer::request(server.model(), fields)
}

/// Asks for one choice as a whole.
pub fn whole(server: &Server, api: Api, fields: &Value) -> anyhow::Result<Answer> {
    xtask::answer::whole(server.client(), server.model(), api, fields)
}

/// Asks for one choice as a stream. `on_event` is called after each event with the number of events so far.
pub fn streamed(
    server: &Server,
    api: Api,
    fields: &Value,
    on_event: impl FnMut(usize),
) -> anyhow::Result<(Answer, Vec<String>)> {
    xtask::answer::streamed(server.client(), server.model(), api, fields, on_event)
}
