//! From a configuration to a model that takes requests: bundle, text, target, probe, engine.
//!
//! This is the only place that knows every layer. It decides nothing about a request; it refuses a bundle or a machine that cannot serve it.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outrider_bundle::VerifiedBundle;
use serde_json::{Map, Value};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::config::{Config, ExecutionProvider};
use crate::engine::{
    self, Drafting, EngineHandle, EngineOptions, EngineStatus, Event, Loaded, ModelLimits, Request,
    SpeculationError, SubmitError, TextSink,
};
use crate::http::backend::{Backend, ModelCard};
use crate::lifecycle::{Latch, Startup};
use crate::machine;
use crate::model::{self, OnnxTarget, SessionOptions, TargetOptions};
use crate::service::LoadContext;
use crate::text::{ChatError, ChatMessage, EncodeError, Text, TextStream};

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
    let bundle = VerifiedBundle::open(&config.bundle).map_err(|error| chain(&error))?;
    startup.pass(Latch::WeightsVerified);
    let manifest = bundle.manifest();
    let text = Arc::new(read_text(&bundle)?);
    let card = ModelCard {
        name: config
            .model_name
            .clone()
            .unwrap_or_else(|| manifest.name.clone()),
        bundle_digest: bundle.digest().to_owned(),
        generation: manifest.generation.clone(),
        draft: Err("the bundle has none".to_owned()),
    };
    let limits = ModelLimits {
        context_tokens: config
            .runtime
            .context_tokens
            .unwrap_or(manifest.target.context_tokens),
        vocab_size: manifest.target.vocab_size,
    };
    tracing::info!(
        model = card.name,
        bundle_digest = card.bundle_digest,
        architecture = manifest.target.architecture,
        context_tokens = limits.context_tokens,
        "bundle verified"
    );

    if config.speculative.required {
        return Err("serving.speculative.required is true, but the bundle has no draft".to_owned());
    }

    let options = EngineOptions {
        queue_capacity: config.runtime.queue_capacity,
        prefill_chunk_tokens: config.runtime.prefill_chunk_tokens,
        speculate: config.speculative.enabled,
        draft_block_size: config.speculative.draft_block_size,
    };
    let (handle_sender, handle) = mpsc::channel::<EngineHandle>();
    let (engine, thread) = {
        let text = text.clone();
        let speculate = config.speculative.enabled;
        engine::start(options, move || {
            let loaded = load_target(&bundle, &config, &startup, free_bytes, text.clone())?;
            if let Ok(engine) = handle.recv() {
                provide(Arc::new(EngineBackend {
                    card,
                    limits,
                    engine,
                    text,
                    switch: Mutex::new(speculate),
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

fn read_text(bundle: &VerifiedBundle) -> Result<Text, String> {
    let facts = &bundle.manifest().text;
    let tokenizer = bundle
        .read(&facts.tokenizer)
        .map_err(|error| chain(&error))?;
    let template = match &facts.chat_template {
        None => None,
        Some(file) => {
            let bytes = bundle.read(file).map_err(|error| chain(&error))?;
            Some(
                String::from_utf8(bytes)
                    .map_err(|_| format!("the chat template {file} is not UTF-8"))?,
            )
        }
    };
    Text::new(
        &tokenizer,
        template.as_deref(),
        facts,
        bundle.manifest().target.vocab_size,
    )
    .map_err(|error| chain(&error))
}

fn load_target(
    bundle: &VerifiedBundle,
    config: &Config,
    startup: &Startup,
    free_bytes: u64,
    text: Arc<Text>,
) -> Result<Loaded, model::ModelError> {
    let runtime = &config.runtime;
    let mut target = OnnxTarget::load(
        bundle,
        &TargetOptions {
            session: SessionOptions {
                library: runtime.onnxruntime_library.clone(),
                execution_provider: match runtime.execution_provider {
                    ExecutionProvider::Cpu => model::ExecutionProvider::Cpu,
                    ExecutionProvider::Cuda => model::ExecutionProvider::Cuda { device: 0 },
                },
                intra_op_threads: runtime.intra_op_threads.map_or(0, usize::from),
            },
            slots: runtime.max_concurrency,
            context_tokens: runtime.context_tokens,
            kv_limit_bytes: (free_bytes as f64 * runtime.kv_cache_ratio) as u64,
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
    // The probe has run every width and batch that steps use.
    startup.pass(Latch::Warm);
    Ok(Loaded {
        target: Box::new(target),
        probe,
        draft: engine::Draft::Unavailable("no draft is loaded".to_owned()),
        text: Box::new(move |stop| Box::new(Sink(text.stream(stop)))),
        eos_token_ids: bundle.manifest().generation.eos_token_ids.clone(),
    })
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
    /// Whether drafting is switched on; the engine's status tells what its last step did with it.
    switch: Mutex<bool>,
}

impl EngineBackend {
    fn switch(&self) -> MutexGuard<'_, bool> {
        self.switch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for EngineBackend {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn limits(&self) -> ModelLimits {
        self.limits
    }

    fn status(&self) -> EngineStatus {
        let mut status = self.engine.status();
        if let Some(speculation) = &mut status.speculation
            && speculation.drafting == Drafting::Off
            && *self.switch()
        {
            // No step has run since it was switched on.
            speculation.drafting = Drafting::On;
        }
        status
    }

    fn speculation(&self) -> bool {
        *self.switch()
    }

    fn set_speculation(&self, enabled: bool) -> Result<(), SpeculationError> {
        let mut switch = self.switch();
        self.engine.set_speculation(enabled)?;
        *switch = enabled;
        Ok(())
    }

    fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, SubmitError> {
        self.engine.submit(request)
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
