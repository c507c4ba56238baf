//! The engine: one thread that owns the model and steps all running sequences together.
//!
//! It knows tokens, slots and steps; it does no network or file I/O and knows nothing of HTTP.
//! Callers hold an [`EngineHandle`] and receive [`Event`]s; dropping the receiver cancels the request.

mod clock;
mod queue;
pub mod request;
pub mod sampler;
mod sequence;
mod slots;
pub mod speculation;
pub mod status;
mod step;
#[cfg(test)]
mod tests;
mod trace;
mod walk;
mod width;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::field::Empty;

pub use clock::Clock;
pub use request::{
    EngineError, Event, FinishReason, Request, Sampling, SpeculativeUsage, SubmitError,
    TokenLogprobs, Usage,
};
pub use sequence::TextSink;
pub use slots::KvRows;
pub use speculation::Draft;
pub use status::{Drafting, EngineStatus, LosslessClass, ModelLimits, Phase, SpeculationStatus};
pub use trace::Trace;

use crate::model::{ModelError, ProbeReport, Target, TargetShape};
use queue::{Queue, Waiting};
use sequence::{Running, Sequence};
use speculation::Speculation;
use step::Stepper;

/// How often an idle engine shows that it is alive.
const IDLE_HEARTBEAT: Duration = Duration::from_millis(200);

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Limits, until [`EngineHandle::set_limits`] sets others.
    pub limits: EngineLimits,
    /// What limits are measured by.
    pub clock: Clock,
    /// Whether a completion starts from rows of its prompt that are in some slot already.
    pub prefix_cache: bool,
    /// Whether to draft, until [`EngineHandle::set_speculation`] says otherwise.
    pub speculate: bool,
    /// Widest draft block in tokens, when it is not the draft's own; at least 2.
    pub draft_block_size: Option<usize>,
    /// Whether measured costs and acceptance choose how much of a block is checked, down to nothing; otherwise it is always all of it.
    pub adaptive_width: bool,
}

/// Limits that can be changed while the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Requests that may wait for a slot.
    pub queue_capacity: usize,
    /// Longest wait for a slot; a request that has none by then fails with [`EngineError::QueueTimeout`].
    pub queue_timeout: Duration,
    /// Longest time from the arrival of a request to its last token; a request that takes longer fails with [`EngineError::DeadlineExceeded`].
    pub request_deadline: Duration,
    /// Prompt tokens fed in one step, at least 1.
    pub prefill_chunk_tokens: usize,
}

/// Makes the text side of a sequence from the request's stop strings.
pub type TextSinks = Box<dyn Fn(&[String]) -> Box<dyn TextSink> + Send>;

/// What the loader hands to the engine.
pub struct Loaded {
    /// The target model, all its slots free.
    pub target: Box<dyn Target>,
    /// What the width probe found for it.
    pub probe: ProbeReport,
    /// The drafter, or why there is none.
    pub draft: Draft,
    /// The text side of sequences.
    pub text: TextSinks,
    /// Tokens that end a completion.
    pub eos_token_ids: Vec<u32>,
}

/// The callers' end of the engine.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when a request arrives or the engine is asked to end.
    wake: Condvar,
    limits: Mutex<EngineLimits>,
    clock: Clock,
    started: Instant,
    heartbeat_ms: AtomicU64,
    /// Completions that hold a slot; read and raised under the lock of the queue, so that none is missed or counted twice on its way.
    running: Arc<AtomicUsize>,
    stop_now: AtomicBool,
    speculate: AtomicBool,
    facts: Mutex<Facts>,
}

struct Facts {
    phase: Phase,
    detail: String,
    lossless: Option<LosslessClass>,
    shape: Option<TargetShape>,
    kv_rows: KvRows,
    /// Drafting as it is when it is switched on.
    speculation: Option<SpeculationStatus>,
}

/// Starts the engine thread. `load` runs on it, so that a model that takes minutes to load does not hold up the caller.
pub fn start(
    options: EngineOptions,
    load: impl FnOnce() -> Result<Loaded, ModelError> + Send + 'static,
) -> std::io::Result<(EngineHandle, JoinHandle<()>)> {
    let shared = Arc::new(Shared {
        queue: Mutex::default(),
        wake: Condvar::new(),
        limits: Mutex::new(options.limits),
        clock: options.clock.clone(),
        started: Instant::now(),
        heartbeat_ms: AtomicU64::new(0),
        running: Arc::default(),
        stop_now: AtomicBool::new(false),
        speculate: AtomicBool::new(options.speculate),
        facts: Mutex::new(Facts {
            phase: Phase::Starting,
            detail: "loading the model".to_owned(),
            lossless: None,
            shape: None,
            kv_rows: KvRows::default(),
            speculation: None,
        }),
    });
    let handle = EngineHandle {
        shared: Arc::clone(&shared),
    };
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || {
            let ended = Ended {
                shared: &shared,
                fault: Some("the engine thread panicked".to_owned()),
            };
            ended.with(run(&shared, &options, load));
        })?;
    Ok((handle, thread))
}

impl EngineHandle {
    /// Queues requests of one caller, all of them or none. Dropping a receiver cancels its request: its place or slot is free within one step.
    ///
    /// # Errors
    ///
    /// A request doesn't fit the model, whose index comes with the error; or the queue is full and its places are shared fairly, or the engine is not
    /// ready, which are about all of them.
    pub fn submit_all(
        &self,
        requests: &mut dyn Iterator<Item = Request>,
    ) -> Result<Vec<UnboundedReceiver<Event>>, (usize, SubmitError)> {
        let shape = lock(&self.shared.facts).shape.clone();
        let shape = shape.ok_or((0, SubmitError::NotReady))?;
        let since = self.shared.clock.now();
        let mut arrivals: Vec<Waiting> = Vec::new();
        let mut receivers = Vec::new();
        for (index, request) in requests.enumerate() {
            check(&request, &shape).map_err(|error| (index, error))?;
            let (events, receiver) = unbounded_channel();
            arrivals.push(Waiting {
                request,
                events,
                since,
            });
            receivers.push(receiver);
        }
        let count = arrivals.len();
        let mut queue = lock(&self.shared.queue);
        if !queue.open {
            return Err((0, SubmitError::NotReady));
        }
        let limit = lock(&self.shared.limits).queue_capacity;
        // Whoever gets a free slot in the next step does not wait for one.
        let running = self.shared.running.load(Ordering::SeqCst);
        let places = limit + queue.slots.saturating_sub(running);
        queue.push(&mut arrivals, places).map_err(|retry_after| {
            count_failures("queue_full", count);
            (0, SubmitError::QueueFull { limit, retry_after })
        })?;
        drop(queue);
        self.shared.wake.notify_one();
        Ok(receivers)
    }

    /// Queues one request, see [`EngineHandle::submit_all`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, SubmitError> {
        let submitted = self.submit_all(&mut std::iter::once(request));
        let receivers = submitted.map_err(|(_, error)| error)?;
        receivers.into_iter().next().ok_or(SubmitError::NotReady)
    }

    /// A snapshot.
    pub fn status(&self) -> EngineStatus {
        let (waiting, running) = {
            let queue = lock(&self.shared.queue);
            (queue.len(), self.shared.running.load(Ordering::SeqCst))
        };
        let facts = lock(&self.shared.facts);
        let now_ms = self.shared.started.elapsed().as_millis() as u64;
        let heartbeat_ms = self.shared.heartbeat_ms.load(Ordering::Relaxed);
        EngineStatus {
            phase: facts.phase,
            detail: facts.detail.clone(),
            heartbeat_age: Duration::from_millis(now_ms.saturating_sub(heartbeat_ms)),
            running,
            slots: facts.shape.as_ref().map_or(0, |shape| shape.slots),
            kv_rows: facts.kv_rows,
            waiting,
            lossless: facts.lossless,
            speculation: facts.speculation.clone().map(|mut status| {
                if status.drafting != Drafting::Unavailable && !self.speculation_enabled() {
                    status.drafting = Drafting::Off;
                    status.detail.clear();
                }
                status
            }),
        }
    }

    /// Time since the engine last came round its loop; `None` until it does for the first time. It takes no lock, so it can be asked even when the
    /// engine hangs.
    pub fn heartbeat_age(&self) -> Option<Duration> {
        let heartbeat_ms = self.shared.heartbeat_ms.load(Ordering::Relaxed);
        let now_ms = self.shared.started.elapsed().as_millis() as u64;
        (heartbeat_ms > 0).then(|| Duration::from_millis(now_ms.saturating_sub(heartbeat_ms)))
    }

    /// Whether drafting is switched on; it may be unavailable all the same.
    pub fn speculation_enabled(&self) -> bool {
        self.shared.speculate.load(Ordering::Relaxed)
    }

    /// Switches drafting on or off from the next step on; running requests carry on, and their output stays the same.
    ///
    /// # Errors
    ///
    /// The engine is not ready, or there is nothing to switch on.
    pub fn set_speculation(&self, enabled: bool) -> Result<(), SpeculationError> {
        let facts = lock(&self.shared.facts);
        match &facts.speculation {
            None => Err(SpeculationError::NotReady),
            Some(status) if enabled && status.drafting == Drafting::Unavailable => {
                Err(SpeculationError::Unavailable(status.detail.clone()))
            }
            Some(_) => {
                self.shared.speculate.store(enabled, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// The limits that hold.
    pub fn engine_limits(&self) -> EngineLimits {
        *lock(&self.shared.limits)
    }

    /// Changes the limits from the next step on, for requests that wait or run as well; none of them loses its place for it.
    pub fn set_limits(&self, limits: EngineLimits) {
        *lock(&self.shared.limits) = limits;
    }

    /// What the model accepts, once it is loaded.
    pub fn limits(&self) -> Option<ModelLimits> {
        let facts = lock(&self.shared.facts);
        facts.shape.as_ref().map(|shape| ModelLimits {
            context_tokens: shape.context_tokens,
            vocab_size: shape.vocab_size,
        })
    }

    /// Takes no more requests, finishes those that wait or run, then ends the thread.
    pub fn drain(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.open = false;
        queue.draining = true;
        drop(queue);
        self.shared.wake.notify_one();
    }

    /// Ends the thread after the current step; requests that wait or run fail with [`EngineError::Stopped`].
    pub fn stop(&self) {
        self.shared.stop_now.store(true, Ordering::Relaxed);
        self.drain();
    }
}

/// Why drafting can't be switched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpeculationError {
    /// The model is not loaded yet.
    #[error("the engine is not ready")]
    NotReady,
    /// There is no draft to switch on.
    #[error("drafting is not available: {0}")]
    Unavailable(String),
}

/// Marks the engine as stopped and answers what is left in the queue, whichever way the thread ends.
struct Ended<'a> {
    shared: &'a Shared,
    fault: Option<String>,
}

impl Ended<'_> {
    fn with(mut self, result: Result<(), ModelError>) {
        self.fault = result.err().map(|error| error.to_string());
    }
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut facts = lock(&self.shared.facts);
        facts.phase = Phase::Failed;
        facts.detail = self.fault.take().unwrap_or_else(|| "stopped".to_owned());
        drop(facts);
        let mut queue = lock(&self.shared.queue);
        queue.open = false;
        queue.fail_all(&EngineError::Stopped);
    }
}

fn run(
    shared: &Shared,
    options: &EngineOptions,
    load: impl FnOnce() -> Result<Loaded, ModelError>,
) -> Result<(), ModelError> {
    let Loaded {
        target,
        probe,
        draft,
        text,
        eos_token_ids,
    } = load()?;
    beat(shared);
    let speculation = Speculation::new(draft, options.draft_block_size, options.adaptive_width);
    {
        let mut facts = lock(&shared.facts);
        facts.shape = Some(target.shape().clone());
        facts.lossless = Some(probe.class);
        facts.speculation = Some(speculation.status());
    }
    {
        let mut queue = lock(&shared.queue);
        queue.slots = target.shape().slots;
        queue.open = !queue.draining;
    }
    {
        // Last: who sees that the engine is ready may submit at once.
        let mut facts = lock(&shared.facts);
        facts.phase = Phase::Ready;
        facts.detail = "serving".to_owned();
    }

    let prefix_cache = options.prefix_cache && probe.class == LosslessClass::Exact;
    if options.prefix_cache && !prefix_cache {
        // Rows computed in other passes would not be the same bits.
        tracing::warn!(
            lossless_class = probe.class.as_str(),
            "the prefix cache is not used: it needs the lossless class exact"
        );
    }
    let mut stepper = Stepper::new(
        target,
        speculation,
        probe.rule,
        eos_token_ids,
        prefix_cache,
        shared.clock.clone(),
    );
    loop {
        let limits = *lock(&shared.limits);
        stepper.drop_cancelled();
        stepper.expire(limits.request_deadline);
        if shared.stop_now.load(Ordering::Relaxed) {
            stepper.fail_all(&EngineError::Stopped);
            return Ok(());
        }
        publish(shared, &stepper);
        if !admit(shared, &limits, &mut stepper, &text) {
            return Ok(());
        }
        if stepper.running() > 0 {
            let started = Instant::now();
            let speculate = shared.speculate.load(Ordering::Relaxed);
            let span = tracing::debug_span!(
                "step",
                running = trace::count(stepper.running()),
                prompt_tokens = Empty,
                committed_tokens = Empty
            );
            let step = span.in_scope(|| stepper.step(speculate, limits.prefill_chunk_tokens));
            span.record("prompt_tokens", trace::count(step.prefill_tokens))
                .record("committed_tokens", trace::count(step.committed_tokens));
            let elapsed = started.elapsed();
            let in_models = step.prefill_time + step.verify_time + step.draft_time;
            metrics::histogram!("outrider_step_seconds").record(elapsed.as_secs_f64());
            metrics::histogram!("outrider_step_overhead_seconds")
                .record(elapsed.saturating_sub(in_models).as_secs_f64());
            for (name, time) in [
                ("outrider_prefill_seconds", step.prefill_time),
                ("outrider_verify_seconds", step.verify_time),
                ("outrider_draft_seconds", step.draft_time),
            ] {
                if !time.is_zero() {
                    metrics::histogram!(name).record(time.as_secs_f64());
                }
            }
            metrics::counter!("outrider_prompt_tokens_total").increment(step.prefill_tokens as u64);
            metrics::counter!("outrider_generated_tokens_total")
                .increment(step.committed_tokens as u64);
        }
        beat(shared);
    }
}

/// Shows observers how the engine is.
fn publish(shared: &Shared, stepper: &Stepper) {
    let mut facts = lock(&shared.facts);
    facts.kv_rows = stepper.kv_rows();
    let shown = facts.speculation.as_ref();
    let shown = shown.map(|status| (status.drafting, status.detail.as_str()));
    if shown != Some(stepper.speculation().ability()) {
        facts.speculation = Some(stepper.speculation().status());
    }
}

/// Moves waiting requests into free slots; waits when there is nothing to do. False when the engine should end.
fn admit(shared: &Shared, limits: &EngineLimits, stepper: &mut Stepper, text: &TextSinks) -> bool {
    {
        let mut queue = lock(&shared.queue);
        for held in stepper.take_occupancies() {
            queue.record_occupancy(held);
        }
        queue.expire(limits, shared.clock.now());
    }
    while stepper.has_room() {
        // Rows may be copied for a sequence that begins; the queue is open to callers meanwhile.
        let next = {
            let mut queue = lock(&shared.queue);
            let waiting = queue.next(|caller| stepper.running_of(caller));
            waiting.map(|waiting| (waiting, Running::new(Arc::clone(&shared.running))))
        };
        let Some((waiting, running)) = next else {
            break;
        };
        let now = shared.clock.now();
        metrics::histogram!("outrider_queue_wait_seconds")
            .record(now.saturating_duration_since(waiting.since).as_secs_f64());
        let sink = text(&waiting.request.stop);
        stepper.admit(Sequence::new(
            waiting.request,
            waiting.events,
            sink,
            running,
            now,
        ));
    }
    if stepper.running() > 0 {
        return true;
    }
    let queue = lock(&shared.queue);
    if queue.len() > 0 {
        // It came behind the last look, and has woken nobody.
        return true;
    }
    if queue.draining {
        return false;
    }
    let (queue, _) = shared
        .wake
        .wait_timeout(queue, IDLE_HEARTBEAT)
        .unwrap_or_else(PoisonError::into_inner);
    drop(queue);
    true
}

fn check(request: &Request, shape: &TargetShape) -> Result<(), SubmitError> {
    let prompt_tokens = request.prompt.len();
    if prompt_tokens == 0 {
        return Err(SubmitError::EmptyPrompt);
    }
    let context_tokens = shape.context_tokens;
    let room = usize::from(request.max_tokens > 0);
    if prompt_tokens + room > context_tokens {
        return Err(SubmitError::PromptTooLong {
            prompt_tokens,
            limit_tokens: context_tokens - room,
        });
    }
    if request.max_tokens > context_tokens - prompt_tokens {
        return Err(SubmitError::ContextExceeded {
            prompt_tokens,
            max_tokens: request.max_tokens,
            context_tokens,
        });
    }
    let vocab_size = shape.vocab_size;
    let biased = request.sampling.logit_bias.iter().map(|(id, _)| id);
    match request
        .prompt
        .iter()
        .chain(biased)
        .find(|&&id| id as usize >= vocab_size)
    {
        Some(&id) => Err(SubmitError::UnknownToken { id, vocab_size }),
        None => Ok(()),
    }
}

/// Counts a completion that failed, or was never taken, by cause.
fn count_failures(cause: &'static str, count: usize) {
    metrics::counter!("outrider_completions_failed_total", "cause" => cause)
        .increment(count as u64);
}

fn count_failure(error: &EngineError) {
    count_failures(error.cause(), 1);
}

fn beat(shared: &Shared) {
    shared.heartbeat_ms.store(
        // 0 stands for none yet.
        (shared.started.elapsed().as_millis() as u64).max(1),
        Ordering::Relaxed,
    );
}

/// The data behind these locks is valid after every single change, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
