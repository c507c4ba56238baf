//! What the server will take of memory, item by item, against what is free.
//!
//! Sizes come from the graphs' own tensors, never from a formula over configuration numbers: a cache of unknown shape is unknown, and never said to fit.
//! Items that no graph gives are estimates, which were set by measuring a server; they are marked as such.

use std::collections::BTreeMap;

use super::{Finding, bundle, bytes_text};
use crate::facts::bundle::GraphFacts;
use crate::facts::config::{ExecutionProvider, Settings};
use crate::facts::{Facts, Reading};

/// What is kept free beyond what the items say.
const MARGIN: f64 = 0.15;

/// The same on a device, where context and workspaces are estimates.
const DEVICE_MARGIN: f64 = 0.20;

/// Fewest cache rows of a slot beyond its context, as the server has them.
const HEADROOM_TOKENS: u64 = 32;

const MIB: u64 = 1 << 20;

/// Program, threads and tables of a process without a model.
const PROCESS_BYTES: u64 = 32 * MIB;

/// Resident bytes for each byte of a tokenizer's file: its tables of tokens and merges.
const TOKENIZER_RATIO: u64 = 12;

/// What a CPU session has beside the values that the rows of a pass give it.
const CPU_WORKSPACE_BYTES: u64 = 12 * MIB;

/// A CUDA context.
const CONTEXT_BYTES: u64 = 500 * MIB;

/// Workspaces of cuBLAS and what else a CUDA session has beside values of rows; its arena grows in powers of two.
const CUDA_WORKSPACE_BYTES: u64 = 256 * MIB;

/// Step in which a context that fits is looked for.
const CONTEXT_STEP_TOKENS: u64 = 64;

/// The dimension that counts rows of logits in a target graph.
const LOGIT_ROWS: &str = "n";

/// The dimension that counts rows of blocks in a draft graph; its other one counts rows of the context, which passes of the target give it.
const BLOCK_ROWS: &str = "block";

/// Address space that a process may reserve beyond what it has in RAM: stacks of threads, regions of allocators, libraries.
const RESERVED_BYTES: u64 = 4 << 30;

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let Some(settings) = &facts.config.settings else {
        return vec![super::needs_settings("memory.ram", "what it needs")];
    };
    if facts.bundle.manifest.known().is_none() {
        return vec![Finding::unknown(
            "memory.ram",
            "there is no bundle whose needs could be told",
            "correct what bundle.manifest says first",
        )];
    }
    let shape = match Shape::of(facts, settings) {
        Ok(shape) => shape,
        Err(reason) => {
            return vec![Finding::unknown(
                "memory.ram",
                format!("the needs of the model are not known: {reason}"),
                "make the bundle again with `cargo xtask export`",
            )];
        }
    };
    let mut findings = vec![
        kv_share(facts, settings, &shape),
        ram(facts, &shape),
        process_limits(facts, &shape),
    ];
    findings.push(match facts.config.execution_provider {
        ExecutionProvider::Cpu => {
            Finding::skip("memory.device", "serving.runtime.execution_provider is cpu")
        }
        ExecutionProvider::Cuda => device(facts, &shape),
    });
    findings
}

/// One part of what is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is for.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Whether it is an estimate.
    pub is_estimate: bool,
}

impl Item {
    fn exact(name: &'static str, bytes: u64) -> Self {
        Self {
            name,
            bytes,
            is_estimate: false,
        }
    }

    fn estimate(name: &'static str, bytes: u64) -> Self {
        Self {
            name,
            bytes,
            is_estimate: true,
        }
    }
}

/// The sum of items.
pub fn total(items: &[Item]) -> u64 {
    sum(items.iter().map(|item| item.bytes))
}

/// The sum of sizes that somebody else wrote down: too large to count is as large as can be.
fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// A product of such sizes.
fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// What a server of a configuration and a bundle is like, in the numbers that decide its memory.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Completions that run at the same time.
    pub max_concurrency: u64,
    /// Tokens of one slot.
    pub context_tokens: u64,
    prefix_cache_slots: u64,
    prefill_chunk_tokens: u64,
    target: Part,
    draft: Option<DraftPart>,
    tap_columns: u64,
    logits_columns: u64,
    tokenizer_bytes: u64,
    library_bytes: u64,
}

#[derive(Clone, Debug)]
struct Part {
    weight_bytes: u64,
    file_bytes: u64,
    row_bytes: u64,
    live_row_bytes: BTreeMap<String, u64>,
}

#[derive(Clone, Debug)]
struct DraftPart {
    part: Part,
    /// Tokens of a block as the graph has it, and as it is configured.
    block_size: [u64; 2],
    context_tokens: u64,
}

impl Shape {
    /// The shape that the facts describe.
    ///
    /// # Errors
    ///
    /// Something of it is not known.
    pub fn of(facts: &Facts, settings: &Settings) -> Result<Self, String> {
        let bundle = &facts.bundle;
        let manifest = match &bundle.manifest {
            Reading::Known(manifest) => manifest,
            Reading::Unknown(reason) => return Err(reason.clone()),
        };
        let file_bytes = |graph: &str| {
            let files = manifest.files.iter();
            let of_graph = files.filter(|(name, _)| name.starts_with(graph));
            sum(of_graph.map(|(_, file)| file.size_bytes))
        };
        let part = |graph: &Reading<GraphFacts>, path: &str| match graph {
            Reading::Unknown(reason) => Err(reason.clone()),
            Reading::Known(graph) => Ok(Part {
                weight_bytes: graph.initializer_bytes,
                file_bytes: file_bytes(path),
                row_bytes: row_bytes(graph)?,
                live_row_bytes: graph.live_row_bytes.clone(),
            }),
        };
        let target_graph = bundle.target.known();
        let draft = match (&manifest.draft, &bundle.draft) {
            (Some(draft), Some(graph)) if bundle::will_draft(facts) => Some(DraftPart {
                part: part(graph, &draft.graph)?,
                block_size: [
                    draft.block_size as u64,
                    settings
                        .speculative
                        .draft_block_size
                        .unwrap_or(draft.block_size) as u64,
                ],
                context_tokens: draft.context_tokens as u64,
            }),
            _ => None,
        };
        let tokenizer = manifest.files.get(&manifest.text.tokenizer);
        Ok(Self {
            max_concurrency: settings.max_concurrency as u64,
            context_tokens: settings
                .context_tokens
                .unwrap_or(manifest.target.context_tokens) as u64,
            prefix_cache_slots: settings.prefix_cache_slots as u64,
            prefill_chunk_tokens: settings.prefill_chunk_tokens as u64,
            target: part(&bundle.target, &manifest.target.graph)?,
            draft,
            tap_columns: target_graph.map_or(0, |graph| graph.tap_columns),
            logits_columns: target_graph.map_or(0, |graph| graph.logits_columns),
            tokenizer_bytes: tokenizer.map_or(0, |file| file.size_bytes),
            library_bytes: facts
                .runtime
                .library
                .known()
                .map_or(0, |library| library.size_bytes),
        })
    }

    fn slots(&self) -> u64 {
        self.max_concurrency.saturating_add(self.prefix_cache_slots)
    }

    /// Rows of one sequence in a step: a whole block, at an even width.
    fn step_rows(&self) -> u64 {
        let block = self.draft.as_ref().map_or(1, |draft| draft.block_size[1]);
        even(block.max(2))
    }

    fn target_kv_bytes(&self) -> u64 {
        let headroom = self.step_rows().max(HEADROOM_TOKENS);
        let rows = self.context_tokens.saturating_add(headroom);
        product([self.slots(), rows, self.target.row_bytes])
    }

    fn draft_kv_bytes(&self) -> u64 {
        self.draft.as_ref().map_or(0, |draft| {
            // The last block may reach past the context.
            let rows = self.context_tokens.saturating_add(draft.block_size[0]);
            let rows = rows.min(draft.context_tokens);
            product([self.slots(), rows, draft.part.row_bytes])
        })
    }

    /// Keys and values of target and draft.
    pub fn kv_bytes(&self) -> u64 {
        self.target_kv_bytes().saturating_add(self.draft_kv_bytes())
    }

    /// What a server on the CPU has in memory when every slot is full.
    pub fn ram_items(&self) -> Vec<Item> {
        let mut items = self.model_items(1);
        items.push(Item::estimate(
            "workspace",
            self.workspace_bytes(CPU_WORKSPACE_BYTES),
        ));
        items.push(Item::estimate("process", self.process_bytes()));
        items.push(Item::estimate(
            "tokenizer",
            product([TOKENIZER_RATIO, self.tokenizer_bytes]),
        ));
        items
    }

    /// Rows of a step in which every slot has a whole block.
    fn decoded_rows(&self) -> u64 {
        product([self.max_concurrency, self.step_rows()])
    }

    /// Rows of the widest pass: such a step, or a chunk of a prompt.
    fn widest_rows(&self) -> u64 {
        let chunk = self.prefill_chunk_tokens.min(self.context_tokens);
        self.decoded_rows().max(even(chunk))
    }

    /// What sessions have beside weights, caches and outputs: the values between the nodes of their widest passes, and `session_bytes` each.
    fn workspace_bytes(&self, session_bytes: u64) -> u64 {
        let parts = [
            Some(&self.target),
            self.draft.as_ref().map(|draft| &draft.part),
        ];
        sum(parts.into_iter().flatten().map(|part| {
            let values = part.live_row_bytes.iter().map(|(dimension, &bytes)| {
                let rows = match dimension.as_str() {
                    LOGIT_ROWS | BLOCK_ROWS => self.decoded_rows(),
                    _ => self.widest_rows(),
                };
                product([rows, bytes])
            });
            session_bytes.saturating_add(sum(values))
        }))
    }

    fn process_bytes(&self) -> u64 {
        self.library_bytes.saturating_add(PROCESS_BYTES)
    }

    /// What a start has in memory for a moment: the bytes of a graph's files, the weights as they were read, and the weights as operators pack them.
    fn load_peak_bytes(&self) -> u64 {
        let while_loaded = |part: &Part| {
            let weights = product([2, part.weight_bytes]);
            weights.saturating_add(part.file_bytes)
        };
        let target = while_loaded(&self.target);
        let draft = self.draft.as_ref().map_or(0, |draft| {
            while_loaded(&draft.part).saturating_add(self.target.weight_bytes)
        });
        target.max(draft).saturating_add(self.process_bytes())
    }

    /// What a server takes of a device.
    fn device_items(&self) -> Vec<Item> {
        // Caches are inputs and outputs of each pass, and both are on the device while it runs.
        let mut items = self.model_items(2);
        items.push(Item::estimate(
            "workspace",
            self.workspace_bytes(CUDA_WORKSPACE_BYTES),
        ));
        items.push(Item::estimate("context", CONTEXT_BYTES));
        items
    }

    fn model_items(&self, kv_copies: u64) -> Vec<Item> {
        let (rows, tap_rows) = (self.decoded_rows(), self.widest_rows());
        let mut items = vec![
            Item::exact("target weights", self.target.weight_bytes),
            Item::exact(
                "target keys and values",
                product([kv_copies, self.target_kv_bytes()]),
            ),
        ];
        if let Some(draft) = &self.draft {
            items.push(Item::exact("draft weights", draft.part.weight_bytes));
            items.push(Item::exact(
                "draft keys and values",
                product([kv_copies, self.draft_kv_bytes()]),
            ));
            items.push(Item::exact(
                "taps",
                product([tap_rows, self.tap_columns, 4]),
            ));
        }
        items.push(Item::exact(
            "logits",
            product([rows, self.logits_columns, 4]),
        ));
        items
    }

    /// The largest changes of one number that `fits`: a `max_concurrency`, and a context.
    fn alternatives(&self, fits: impl Fn(&Self) -> bool) -> Vec<String> {
        let concurrency = largest(self.max_concurrency, |max_concurrency| {
            fits(&Self {
                max_concurrency,
                ..self.clone()
            })
        });
        let steps = self.context_tokens.div_ceil(CONTEXT_STEP_TOKENS);
        let context = largest(steps, |step| {
            fits(&Self {
                context_tokens: step * CONTEXT_STEP_TOKENS,
                ..self.clone()
            })
        });
        let context = context.map(|step| step * CONTEXT_STEP_TOKENS);
        let text = |name: &str, value: Option<u64>| {
            value.map(|value| format!("serving.runtime.{name} {value} would fit"))
        };
        [
            text("max_concurrency", concurrency),
            text("context_tokens", context),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// `rows`, and one more where they are odd: a step is never of an odd width.
fn even(rows: u64) -> u64 {
    rows.checked_next_multiple_of(2).unwrap_or(u64::MAX)
}

/// The largest number from 1 to less than `limit` that `fits`, where each that is smaller than one that fits does too.
fn largest(limit: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut fitting, mut failing) = (0, limit.max(1));
    while failing - fitting > 1 {
        let middle = fitting + (failing - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            failing = middle;
        }
    }
    (fitting > 0).then_some(fitting)
}

/// Bytes of a row of all caches of a graph.
fn row_bytes(graph: &GraphFacts) -> Result<u64, String> {
    if graph.caches.is_empty() {
        return Err("the graph has no caches".to_owned());
    }
    let mut of_cache = graph.caches.iter().map(|cache| {
        let unknown = || format!("the graph does not fix the shape of {}", cache.name);
        cache.row_bytes.ok_or_else(unknown)
    });
    of_cache.try_fold(0, |sum: u64, bytes| Ok(sum.saturating_add(bytes?)))
}

/// The server's own rule: keys and values may take a share of the free memory.
fn kv_share(facts: &Facts, settings: &Settings, shape: &Shape) -> Finding {
    let id = "memory.kv_share";
    let free_bytes = match &facts.host.memory.available_bytes {
        Reading::Known(free_bytes) => *free_bytes,
        Reading::Unknown(reason) => return no_free_memory(id, reason),
    };
    let allowed_bytes = (free_bytes as f64 * settings.kv_cache_ratio) as u64;
    let needed_bytes = shape.kv_bytes();
    let evidence = format!(
        "keys and values of {} slots of {} tokens need {}; serving.runtime.kv_cache_ratio {} of {} free allows {}",
        shape.slots(),
        shape.context_tokens,
        bytes_text(needed_bytes),
        settings.kv_cache_ratio,
        bytes_text(free_bytes),
        bytes_text(allowed_bytes)
    );
    if needed_bytes <= allowed_bytes {
        return Finding::pass(id, evidence);
    }
    let fits = shape.alternatives(|other| other.kv_bytes() <= allowed_bytes);
    let remedy = remedy(
        fits,
        "lower serving.runtime.max_concurrency, serving.runtime.prefix_cache_slots or serving.runtime.context_tokens, or raise serving.runtime.kv_cache_ratio",
    );
    // The draft takes what the target leaves, and is left out where that is too little.
    if shape.target_kv_bytes() <= allowed_bytes && !settings.speculative.required {
        return Finding::warn(
            id,
            format!(
                "{evidence}, which is enough for the {} of the target alone: the server answers, but drafts nothing",
                bytes_text(shape.target_kv_bytes())
            ),
            remedy,
        );
    }
    Finding::fail(
        id,
        format!("{evidence}, so the server refuses to start"),
        remedy,
    )
}

/// Whether the limits of one process leave room for what the server has in memory.
fn process_limits(facts: &Facts, shape: &Shape) -> Finding {
    let id = "memory.process_limits";
    let on_device = facts.config.execution_provider == ExecutionProvider::Cuda;
    let items = ram_items(shape, on_device);
    let exact = items.iter().filter(|item| !item.is_estimate);
    let least_bytes = sum(exact.map(|item| item.bytes));
    let needed_bytes = total(&items).max(shape.load_peak_bytes());
    let limits = &facts.host.limits;
    let mut worst = Finding::pass(id, "unlimited");
    for (name, unit, limit) in [
        (
            "address space (RLIMIT_AS)",
            "LimitAS",
            limits.address_space_bytes,
        ),
        ("data (RLIMIT_DATA)", "LimitDATA", limits.data_bytes),
    ] {
        let Some(limit) = limit else { continue };
        let evidence = format!(
            "a process may have {} of {name}; {} are needed in RAM",
            bytes_text(limit),
            bytes_text(needed_bytes)
        );
        let remedy = format!(
            "take the limit away ({unit}=infinity in a systemd unit, `ulimit` in a shell); limits of a cgroup hold memory as it is used"
        );
        let finding = if limit < least_bytes {
            Finding::fail(id, evidence, remedy)
        } else if on_device
            || limit
                < needed_bytes
                    .saturating_mul(2)
                    .saturating_add(RESERVED_BYTES)
        {
            Finding::warn(
                id,
                format!("{evidence}, and stacks and allocators reserve more than they use"),
                remedy,
            )
        } else {
            Finding::pass(id, evidence)
        };
        if finding.outcome >= worst.outcome {
            worst = finding;
        }
    }
    worst
}

/// What is in RAM when every slot is full.
fn ram_items(shape: &Shape, on_device: bool) -> Vec<Item> {
    let mut items = shape.ram_items();
    if on_device {
        // Weights are on the device once they are loaded.
        items.retain(|item| !item.name.ends_with("weights") && item.name != "workspace");
    }
    items
}

fn ram(facts: &Facts, shape: &Shape) -> Finding {
    let id = "memory.ram";
    let free_bytes = match &facts.host.memory.available_bytes {
        Reading::Known(free_bytes) => *free_bytes,
        Reading::Unknown(reason) => return no_free_memory(id, reason),
    };
    let on_device = facts.config.execution_provider == ExecutionProvider::Cuda;
    let items = |shape: &Shape| ram_items(shape, on_device);
    let needs = |shape: &Shape| total(&items(shape)).max(shape.load_peak_bytes());
    let mut list = items(shape);
    let steady_bytes = total(&list);
    let peak_bytes = shape.load_peak_bytes();
    if peak_bytes > steady_bytes {
        list.push(Item::exact(
            "weights while they are loaded",
            peak_bytes - steady_bytes,
        ));
    }
    judge(
        id,
        "in RAM",
        &list,
        free_bytes,
        MARGIN,
        shape,
        &needs,
        "give the machine or the container more memory",
    )
}

fn device(facts: &Facts, shape: &Shape) -> Finding {
    let id = "memory.device";
    match free_device_bytes(facts) {
        Ok(free_bytes) => judge(
            id,
            "on the device",
            &shape.device_items(),
            free_bytes,
            DEVICE_MARGIN,
            shape,
            &|shape| total(&shape.device_items()),
            "end other processes on the device, or take a larger one",
        ),
        Err(reason) => Finding::unknown(
            id,
            format!(
                "{} are needed, and what is free is not known: {reason}",
                bytes_text(total(&shape.device_items()))
            ),
            "correct what the checks of gpu say first",
        ),
    }
}

/// What is free on the configured device.
fn free_device_bytes(facts: &Facts) -> Result<u64, String> {
    match super::gpu::free_bytes(&facts.gpu, facts.config.device_id) {
        Reading::Known(bytes) => Ok(bytes),
        Reading::Unknown(reason) => Err(reason),
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "one table row, for RAM and for a device"
)]
fn judge(
    id: &'static str,
    place: &str,
    items: &[Item],
    free_bytes: u64,
    margin: f64,
    shape: &Shape,
    needs: &dyn Fn(&Shape) -> u64,
    otherwise: &str,
) -> Finding {
    let needed_bytes = total(items);
    let with_margin = |bytes: u64| (bytes as f64 * (1.0 + margin)) as u64;
    let mut lines = vec![format!(
        "{} are needed {place} and {} more kept free; {} are free",
        bytes_text(needed_bytes),
        bytes_text(with_margin(needed_bytes).saturating_sub(needed_bytes)),
        bytes_text(free_bytes)
    )];
    lines.extend(items.iter().map(|item| {
        let mark = if item.is_estimate { ", estimated" } else { "" };
        format!("{:>11}  {}{mark}", bytes_text(item.bytes), item.name)
    }));
    let evidence = lines.join("\n");
    if with_margin(needed_bytes) <= free_bytes {
        return Finding::pass(id, evidence);
    }
    let fits = shape.alternatives(|other| with_margin(needs(other)) <= free_bytes);
    let remedy = remedy(fits, otherwise);
    if needed_bytes <= free_bytes {
        Finding::warn(id, evidence, remedy)
    } else {
        Finding::fail(id, evidence, remedy)
    }
}

fn remedy(fits: Vec<String>, otherwise: &str) -> String {
    if fits.is_empty() {
        format!("no max_concurrency and no context of this model fits: {otherwise}")
    } else {
        format!("{}; or {otherwise}", fits.join("; "))
    }
}

fn no_free_memory(id: &'static str, reason: &str) -> Finding {
    Finding::unknown(
        id,
        format!("what is free is not known: {reason}"),
        "run this where /proc/meminfo can be read",
    )
}
