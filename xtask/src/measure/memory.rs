//! Resident memory of a server after load and 50 requests, against what it must hold: the weights of target and draft once, and both KV slabs.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use outrider_bundle::Manifest;
use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::wire::Api;
use serde_json::json;

use crate::machine;
use crate::server_process::ServerCommand;

const REQUESTS: usize = 50;
/// Slots of the measured server; as many requests run at a time, so that every slot is used.
const SLOTS: usize = 8;
/// Slots beside them that keep beginnings of prompts.
const PREFIX_CACHE_SLOTS: usize = 2;
/// Kept small, so that the slab can't hide what the rest takes.
const CONTEXT_TOKENS: usize = 512;
const START_DEADLINE: Duration = Duration::from_secs(180);
/// Most resident memory for each byte of weights and slab.
pub const MEMORY_RATIO_LIMIT: f64 = 1.25;

/// Repetitions of the sentence that fill a slot of [`CONTEXT_TOKENS`] but for the answer.
const FULL_REPETITIONS: usize = 92;

/// How long the prompts of a measurement are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompts {
    /// From a few tokens to half a slot.
    Mixed,
    /// Nearly a whole slot each, every one with a beginning of its own, so that all slots are full in the end.
    Full,
}

impl Prompts {
    fn of_request(self, number: usize) -> String {
        match self {
            Self::Mixed => "The ship came in. ".repeat(1 + number),
            Self::Full => format!(
                "{number}: {}",
                "The ship came in. ".repeat(FULL_REPETITIONS)
            ),
        }
    }
}

/// The settings of a measured server, by their keys.
pub fn settings() -> [(&'static str, usize); 3] {
    [
        ("serving.runtime.context_tokens", CONTEXT_TOKENS),
        ("serving.runtime.max_concurrency", SLOTS),
        ("serving.runtime.prefix_cache_slots", PREFIX_CACHE_SLOTS),
    ]
}

/// What a server holds, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Requests served before measuring.
    pub requests: usize,
    /// Resident size of the process.
    pub resident_bytes: u64,
    /// Largest resident size so far, the start included.
    pub peak_bytes: u64,
    /// Weights of target and draft, as they are in the bundle's files.
    pub weights_bytes: u64,
    /// KV slabs of target and draft, as slots, context and models give them.
    pub kv_slab_bytes: u64,
}

impl Memory {
    /// Resident bytes for each byte that must be held.
    pub fn ratio(&self) -> f64 {
        self.resident_bytes as f64 / (self.weights_bytes + self.kv_slab_bytes) as f64
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(
            f,
            "after {} requests on {SLOTS} slots of {CONTEXT_TOKENS} tokens and {PREFIX_CACHE_SLOTS} of the prefix cache, in MiB",
            self.requests
        )?;
        writeln!(f, "  weights   {:8.1}", mib(self.weights_bytes))?;
        writeln!(f, "  KV slab   {:8.1}", mib(self.kv_slab_bytes))?;
        writeln!(f, "  resident  {:8.1}", mib(self.resident_bytes))?;
        writeln!(f, "  peak      {:8.1}", mib(self.peak_bytes))?;
        write!(
            f,
            "resident / (weights + KV slab) = {:.3}; in fp32 at most {MEMORY_RATIO_LIMIT}",
            self.ratio()
        )
    }
}

/// Starts the server, sends the requests and reads the kernel's figures of the process.
pub fn measure_memory(command: &ServerCommand, prompts: Prompts) -> anyhow::Result<Memory> {
    let bundle = command
        .settings
        .iter()
        .rfind(|(key, _)| key == "serving.bundle")
        .context("the command serves no bundle")?;
    let manifest = Manifest::load(bundle.1.as_ref())?;
    let command = settings()
        .iter()
        .fold(command.clone(), |command, (key, value)| {
            command.set(key, value)
        });
    let server = command.start_ready(START_DEADLINE)?;
    send_requests(&server.endpoint(), &manifest.name, prompts)?;
    Ok(Memory {
        requests: REQUESTS,
        resident_bytes: machine::resident_bytes(server.id())?,
        peak_bytes: machine::peak_resident_bytes(server.id())?,
        weights_bytes: weights_bytes(&manifest),
        kv_slab_bytes: kv_slab_bytes(&manifest)?,
    })
}

/// As many requests at a time as there are slots.
fn send_requests(endpoint: &str, model: &str, prompts: Prompts) -> anyhow::Result<()> {
    let next = AtomicUsize::new(0);
    let send = || -> anyhow::Result<()> {
        let client = Client::new(endpoint, ClientOptions::default())?;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= REQUESTS {
                return Ok(());
            }
            let prompt = prompts.of_request(number);
            let api = if number.is_multiple_of(2) {
                Api::Completions
            } else {
                Api::Chat
            };
            let mut request = api.request(model, &prompt);
            request.insert("max_tokens".to_owned(), json!(8));
            request.insert("seed".to_owned(), json!(number));
            let response = client.post(api.path(), &request.into())?;
            if response.status != 200 {
                bail!(
                    "request {number} was answered {} {}",
                    response.status,
                    response.text()
                );
            }
        }
    };
    thread::scope(|scope| {
        let senders: Vec<_> = (0..SLOTS).map(|_| scope.spawn(send)).collect();
        senders
            .into_iter()
            .try_for_each(|sender| sender.join().expect("a sender does not panic"))
    })
}

/// Every file of the bundle that is not text for people or tokenizers: graphs and their data.
fn weights_bytes(manifest: &Manifest) -> u64 {
    let draft = manifest.draft.as_ref().map(|draft| draft.graph.as_str());
    let graphs = [Some(manifest.target.graph.as_str()), draft];
    let of_a_graph = |path: &str| {
        graphs
            .iter()
            .flatten()
            .any(|graph| path.starts_with(*graph))
    };
    let files = manifest.files.iter();
    files
        .filter(|(path, _)| of_a_graph(path))
        .map(|(_, file)| file.size_bytes)
        .sum()
}

fn kv_slab_bytes(manifest: &Manifest) -> anyhow::Result<u64> {
    let slab = |layers: usize, row_size: usize, kv_dtype: &str, rows: usize| {
        let element_bytes = match kv_dtype {
            "float32" => 4,
            "float16" | "bfloat16" => 2,
            other => bail!("unknown KV element type {other}"),
        };
        let slots = SLOTS + PREFIX_CACHE_SLOTS;
        Ok((layers * 2 * row_size * element_bytes * rows * slots) as u64)
    };
    let target = &manifest.target;
    let row_size = target.kv_heads * target.head_dim;
    let of_target = slab(target.layers, row_size, &target.kv_dtype, CONTEXT_TOKENS)?;
    let Some(draft) = &manifest.draft else {
        return Ok(of_target);
    };
    let row_size = draft.kv_heads * draft.head_dim;
    // The last block may reach past the context.
    let rows = CONTEXT_TOKENS + draft.block_size;
    Ok(of_target + slab(draft.layers, row_size, &draft.kv_dtype, rows)?)
}
