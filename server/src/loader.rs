//! From a configuration to a model that takes requests: bundle, text, target, probe, engine.
//!
//! This is the only place that knows every layer. It decides nothing about a request; it refuses a bundle or a machine that cannot serve it.

mod draft;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use outrider_bundle::verify::BundleError;
use outrider_bundle::{Manifest, VerifiedBundle};
use serde_json::{Map, Value};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::config::{Config, ExecutionProvider};
use crate::draft::Drafter;
use crate::engine::{
    self, Clock, EngineHandle, EngineLimits, EngineOptions, EngineStatus, Event, Loaded,
    ModelLimits, Request, SpeculationError, SubmitError, TextSink,
};
use crate::http::backend::{Backend, DraftCard, ModelCard};
use crate::lifecycle::{Latch, Startup};
use crate::machine;
use crate::model::{
    self, DraftOptions, LosslessClass, ModelError, OnnxDraft, OnnxTarget, SessionOptions, Target,
    TargetOptions, TargetShape, runtime,
};
use crate::service::LoadContext;
use crate::text::{ChatError, ChatMessage, EncodeError, Text, TextStream};
use draft::Absence;
pub use draft::check_settings;

/// Loads the configured bundle, provides it, and returns when the engine has ended; the error says why, when nobody asked it to.
pub fn load(context: LoadContext) -> Result<(), String> {
    let LoadContext {
        config,
        startup,
        provide,
    } = context;
    // A malformed table of free memory would be a fault of the machine; the error names the file.
    let free_bytes = machine::free_memory_bytes()
        .map_err(|error| format!("cannot tell how much memory is free: {error}"))?;
    precheck(&config)?;
    let bundle = VerifiedBundle::open_target(&config.bundle).map_err(|error| chain(&error))?;
    let manifest = bundle.manifest();
    if config.speculative.required {
        // What is known by now need not wait for the target.
        draft::facts(&bundle).map_err(|absence| required(&absence).to_string())?;
    }
    startup.pass(Latch::WeightsVerified);
    let context_tokens = config
        .runtime
        .context_tokens
        .unwrap_or(manifest.target.context_tokens);
    let text = Arc::new(read_text(&bundle)?.with_context(context_tokens));
    let mut card = ModelCard {
        name: config
            .model_name
            .clone()
            .unwrap_or_else(|| manifest.name.clone()),
        bundle_digest: bundle.digest().to_owned(),
        generation: manifest.generation.clone(),
        draft: Err(Absence::NotInBundle.for_callers()),
    };
    let limits = ModelLimits {
        context_tokens,
        vocab_size: manifest.target.vocab_size,
    };
    tracing::info!(
        model = card.name,
        bundle_digest = card.bundle_digest,
        architecture = manifest.target.architecture,
        context_tokens = limits.context_tokens,
        "bundle verified"
    );

    let options = EngineOptions {
        limits: engine_limits(&config),
        clock: Clock::default(),
        prefix_cache: config.runtime.prefix_cache,
        speculate: config.speculative.enabled,
        draft_block_size: config.speculative.draft_block_size,
        adaptive_width: config.speculative.adaptive_width,
    };
    let (handle_sender, handle) = mpsc::channel::<EngineHandle>();
    let (engine, thread) = {
        let text = text.clone();
        engine::start(options, move || {
            let (loaded, draft) = load_models(&bundle, &config, &startup, free_bytes, &text)?;
            card.draft = draft;
            if let Ok(engine) = handle.recv() {
                provide(Arc::new(EngineBackend {
                    card,
                    limits,
                    engine,
                    text,
                }));
            }
            Ok(loaded)
        })
        .map_err(|error| format!("cannot start the engine thread: {error}"))?
    };
    // The engine thread is waiting for its own handle, so it is there to receive it unless loading failed.
    let _ = handle_sender.send(engine.clone());
    if thread.join().is_err() {
        return Err("the engine thread panicked".to_owned());
    }
    Err(engine.status().detail)
}

/// What can be told before anything is hashed or loaded, so that a start which must fail does so at once.
fn precheck(config: &Config) -> Result<(), String> {
    runtime::locate(&config.runtime.onnxruntime_library).map_err(|error| chain(&error))?;
    let dir = &config.bundle;
    let manifest = Manifest::load(dir).map_err(|source| {
        chain(&BundleError::Manifest {
            dir: dir.clone(),
            source,
        })
    })?;
    // Graphs are read once their bytes are known to be those of the manifest: a digest says more than what is odd about a graph.
    let draft_fault = match manifest.compare_sizes(dir) {
        Ok(()) => None,
        Err(_) => VerifiedBundle::inspect(dir).map_err(|error| chain(&error))?,
    };
    model::check_context(
        config.runtime.context_tokens,
        manifest.target.context_tokens,
    )?;
    let speculative = &config.speculative;
    if let Some(draft) = &manifest.draft {
        check_settings(
            speculative.draft_block_size,
            speculative.candidate_topk,
            draft,
        )
        .map_err(|faults| faults.join("; "))?;
    }
    if speculative.required {
        draft::presence(&manifest, draft_fault.as_ref())
            .map_err(|absence| required(&absence).to_string())?;
    }
    Ok(())
}

/// The limits that a configuration sets for the engine.
pub fn engine_limits(config: &Config) -> EngineLimits {
    let runtime = &config.runtime;
    EngineLimits {
        queue_capacity: runtime.queue_capacity,
        queue_timeout: runtime.queue_timeout,
        request_deadline: runtime.request_deadline,
        prefill_chunk_tokens: runtime.prefill_chunk_tokens,
    }
}

fn read_text(bundle: &VerifiedBundle) -> Result<Text, String> {
    text_of(bundle.manifest(), |file| {
        bundle.read(file).map_err(|error| chain(&error))
    })
}

/// The text side of the model that `manifest` describes, from the files that `read` gives.
///
/// # Errors
///
/// A file can't be read, or the tokenizer or the template can't be served.
pub fn text_of(
    manifest: &Manifest,
    read: impl Fn(&str) -> Result<Vec<u8>, String>,
) -> Result<Text, String> {
    let facts = &manifest.text;
    let tokenizer = read(&facts.tokenizer)?;
    let template = match &facts.chat_template {
        None => None,
        Some(file) => Some(
            String::from_utf8(read(file)?)
                .map_err(|_| format!("the chat template {file} is not UTF-8"))?,
        ),
    };
    Text::new(
        &tokenizer,
        template.as_deref(),
        facts,
        manifest.target.vocab_size,
    )
    .map_err(|error| chain(&error))
}

/// Target, probe and draft, ready for the engine, and what interfaces show of the draft.
fn load_models(
    bundle: &VerifiedBundle,
    config: &Config,
    startup: &Startup,
    free_bytes: u64,
    text: &Arc<Text>,
) -> Result<(Loaded, Result<DraftCard, String>), ModelError> {
    let runtime = &config.runtime;
    let kv_limit_bytes = (free_bytes as f64 * runtime.kv_cache_ratio) as u64;
    let mut target = OnnxTarget::load(
        bundle,
        &TargetOptions {
            session: session_options(config),
            slots: runtime.max_concurrency,
            parking_slots: if runtime.prefix_cache {
                runtime.prefix_cache_slots
            } else {
                0
            },
            block_size: draft::block_size(&config.speculative, bundle.manifest().draft.as_ref()),
            context_tokens: runtime.context_tokens,
            kv_limit_bytes,
        },
    )?;
    startup.pass(Latch::SessionsBuilt);
    let probe = model::probe::probe(&mut target)?;
    target.settle();
    startup.pass(Latch::ProbePassed);
    tracing::info!(
        lossless_class = probe.class.as_str(),
        noise = probe.noise,
        min_width = probe.rule.min_width,
        even_widths = probe.rule.even,
        passes = probe.passes,
        kv_bytes = target.kv_bytes(),
        "model loaded"
    );

    let left_bytes = kv_limit_bytes.saturating_sub(target.kv_bytes());
    let (draft, card) = match load_draft(bundle, config, probe.class, target.shape(), left_bytes) {
        Ok((drafter, card)) => (engine::Draft::Loaded(drafter), Ok(card)),
        Err(absence) if config.speculative.required => return Err(required(&absence)),
        Err(absence) => {
            match absence {
                Absence::NotInBundle => tracing::info!("the bundle has no draft"),
                _ => tracing::warn!(reason = %absence, "serving without a draft"),
            }
            let card = Err(absence.for_callers());
            (engine::Draft::Unavailable(absence.to_string()), card)
        }
    };
    // The probe has run the target in the widths of steps, alone and in batches, and the draft has had a pass of its own.
    startup.pass(Latch::Warm);
    let text = Arc::clone(text);
    let loaded = Loaded {
        target: Box::new(target),
        probe,
        draft,
        text: Box::new(move |stop| Box::new(Sink(text.stream(stop)))),
        eos_token_ids: bundle.manifest().generation.eos_token_ids.clone(),
    };
    Ok((loaded, card))
}

/// The draft of the bundle, after a first pass, with at most `kv_limit_bytes` for its KV memory.
fn load_draft(
    bundle: &VerifiedBundle,
    config: &Config,
    class: LosslessClass,
    target: &TargetShape,
    kv_limit_bytes: u64,
) -> Result<(Box<dyn Drafter>, DraftCard), Absence> {
    let facts = draft::facts(bundle)?;
    draft::check_class(&config.speculative, class)?;
    let options = DraftOptions {
        session: session_options(config),
        slots: target.slots,
        parking_slots: target.parking_slots,
        context_tokens: target.context_tokens,
        candidate_topk: config.speculative.candidate_topk,
        kv_limit_bytes,
    };
    let mut drafter =
        OnnxDraft::load(bundle, &options).map_err(|error| Absence::Refused(chain(&error)))?;
    drafter
        .warm_up()
        .map_err(|error| Absence::Refused(chain(&error)))?;
    let card = draft::card(&config.speculative, facts);
    tracing::info!(
        architecture = card.architecture,
        block_size = card.block_size,
        candidate_topk = card.candidate_topk,
        context_tokens = drafter.shape().context_tokens,
        kv_bytes = drafter.kv_bytes(),
        "draft loaded"
    );
    Ok((Box::new(drafter), card))
}

fn session_options(config: &Config) -> SessionOptions {
    let runtime = &config.runtime;
    SessionOptions {
        library: runtime.onnxruntime_library.clone(),
        execution_provider: match runtime.execution_provider {
            ExecutionProvider::Cpu => model::ExecutionProvider::Cpu,
            ExecutionProvider::Cuda => model::ExecutionProvider::Cuda { device: 0 },
        },
        intra_op_threads: runtime.intra_op_threads.map_or(0, usize::from),
    }
}

fn required(absence: &Absence) -> ModelError {
    ModelError::DraftRequired(absence.to_string())
}

/// The text side of one sequence.
struct Sink(TextStream);

impl TextSink for Sink {
    fn push(&mut self, id: u32) -> (String, bool) {
        let pushed = self.0.push(id);
        (pushed.text, pushed.stopped)
    }

    fn finish(&mut self) -> String {
        self.0.finish()
    }
}

/// The engine and the text side of one model.
struct EngineBackend {
    card: ModelCard,
    limits: ModelLimits,
    engine: EngineHandle,
    text: Arc<Text>,
}

impl Backend for EngineBackend {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn limits(&self) -> ModelLimits {
        self.limits
    }

    fn status(&self) -> EngineStatus {
        self.engine.status()
    }

    fn heartbeat_age(&self) -> Option<Duration> {
        self.engine.heartbeat_age()
    }

    fn speculation(&self) -> bool {
        self.engine.speculation_enabled()
    }

    fn set_speculation(&self, enabled: bool) -> Result<(), SpeculationError> {
        self.engine.set_speculation(enabled)
    }

    fn set_limits(&self, limits: EngineLimits) {
        self.engine.set_limits(limits);
    }

    fn submit(
        &self,
        requests: &mut dyn Iterator<Item = Request>,
    ) -> Result<Vec<UnboundedReceiver<Event>>, (usize, SubmitError)> {
        self.engine.submit_all(requests)
    }

    fn stop(&self) {
        self.engine.stop();
    }

    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        self.text.encode_prompt(text)
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError> {
        self.text.encode_chat(messages, kwargs)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.text.token_bytes(id)
    }
}

/// An error and its causes as one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
