//! One running request: its tokens, its place in the KV cache, and what its caller has been told.
//!
//! A token becomes part of the sequence only through [`Sequence::commit`], which walks the end conditions in one place:
//! the first of end-of-sequence token, stop string and length wins.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::request::{
    EngineError, Event, FinishReason, Request, SpeculativeUsage, TokenLogprobs, Usage,
};
use super::sampler::Context;
use super::speculation::SequenceDraft;
use super::trace::Trace;

/// Turns committed tokens into text, and watches for stop strings.
pub trait TextSink: Send {
    /// Text that became final with this token, and whether a stop string was completed (then nothing may follow).
    fn push(&mut self, id: u32) -> (String, bool);
    /// Text held back until the end.
    fn finish(&mut self) -> String;
}

/// Counts a completion among those that hold a slot until it is dropped.
pub(super) struct Running(Arc<AtomicUsize>);

impl Running {
    pub(super) fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request that holds a slot.
pub(super) struct Sequence {
    request: Request,
    events: UnboundedSender<Event>,
    text: Box<dyn TextSink>,
    /// Prompt and committed tokens.
    tokens: Vec<u32>,
    /// Cache rows that are valid; always fewer than `tokens`, as the newest token has not been fed yet.
    cached: usize,
    prompt_logprobs: Vec<TokenLogprobs>,
    /// What the drafter holds and proposes for it.
    pub(super) draft: SequenceDraft,
    usage: SpeculativeUsage,
    /// Given up before the caller is told the end, so that nobody who knows of the end still sees it counted.
    running: Option<Running>,
    admitted: Instant,
    /// When the newest token was committed.
    last_commit: Option<Instant>,
    /// Prompt tokens whose rows were there before any was fed.
    reused: usize,
}

/// Whether a sequence goes on after a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Running,
    Finished,
}

impl Sequence {
    pub(super) fn new(
        mut request: Request,
        events: UnboundedSender<Event>,
        text: Box<dyn TextSink>,
        running: Running,
        admitted: Instant,
    ) -> Self {
        let tokens = request.prompt.clone();
        request.trace.prefill(tokens.len());
        Self {
            request,
            events,
            text,
            tokens,
            cached: 0,
            prompt_logprobs: Vec::new(),
            draft: SequenceDraft::default(),
            usage: SpeculativeUsage::default(),
            running: Some(running),
            admitted,
            last_commit: None,
            reused: 0,
        }
    }

    /// When it got its slot.
    pub(super) fn admitted(&self) -> Instant {
        self.admitted
    }

    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    /// Cache rows that are valid.
    pub(super) fn cached(&self) -> usize {
        self.cached
    }

    /// Tokens that are committed and not in the cache: the rest of the prompt, or the newest token.
    pub(super) fn pending(&self) -> &[u32] {
        &self.tokens[self.cached..]
    }

    /// Whether part of the prompt is still to be fed besides what a decode step feeds anyway.
    pub(super) fn is_prefilling(&self) -> bool {
        self.cached < self.request.prompt.len()
    }

    /// Whether the caller dropped its end.
    pub(super) fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Most tokens that may still be committed.
    pub(super) fn remaining_tokens(&self) -> usize {
        self.request.max_tokens - self.generated()
    }

    /// Prompt and committed tokens.
    pub(super) fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Committed tokens from position `start` on, at most `limit`.
    pub(super) fn committed(&self, start: usize, limit: usize) -> &[u32] {
        &self.tokens[start..self.tokens.len().min(start + limit)]
    }

    /// The token that was committed last.
    pub(super) fn newest_token(&self) -> u32 {
        *self.tokens.last().expect("a prompt has at least one token")
    }

    /// Counts a pass that checked `drafted` tokens.
    pub(super) fn record_drafted(&mut self, drafted: usize) {
        self.usage.drafted_tokens += drafted;
        self.usage.steps += 1;
    }

    /// Counts a drafted token that is the target's choice.
    pub(super) fn record_accepted(&mut self) {
        self.usage.accepted_tokens += 1;
    }

    /// The committed token at `position`, when there is one.
    pub(super) fn token_at(&self, position: usize) -> Option<u32> {
        self.tokens.get(position).copied()
    }

    /// What the choice of the next token depends on.
    pub(super) fn context(&self) -> Context<'_> {
        Context {
            sampling: &self.request.sampling,
            seed: self.request.seed,
            tokens: &self.tokens,
            prompt_tokens: self.request.prompt.len(),
        }
    }

    /// Records that the rows of all tokens below `cached` are in the cache.
    pub(super) fn set_cached(&mut self, cached: usize) {
        debug_assert!(cached <= self.tokens.len());
        self.cached = cached;
    }

    /// Records that the rows that are valid now were there before the request.
    pub(super) fn note_reused(&mut self) {
        self.reused = self.cached;
    }

    /// Keeps the log-probability of a prompt token; sent to the caller when the prompt is done.
    pub(super) fn record_prompt_logprobs(&mut self, logprobs: TokenLogprobs) {
        self.prompt_logprobs.push(logprobs);
    }

    /// Ends the prompt phase: reports its log-probabilities, and finishes a request that wanted nothing else.
    pub(super) fn prompt_done(&mut self) -> Progress {
        if self.request.prompt_logprobs.is_some() {
            let logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.send(Event::Prompt(logprobs));
        }
        if self.request.max_tokens == 0 {
            self.finish(FinishReason::Length)
        } else {
            Progress::Running
        }
    }

    /// Appends the target's choice and tells the caller; `eos` are the model's end-of-sequence tokens, `now` is when the pass was over.
    pub(super) fn commit(
        &mut self,
        id: u32,
        logprobs: Option<TokenLogprobs>,
        eos: &[u32],
        now: Instant,
    ) -> Progress {
        debug_assert!(self.remaining_tokens() > 0);
        self.record_time(now);
        self.tokens.push(id);
        if self.generated() == 1 {
            self.request.trace.decode();
        }
        if !self.request.ignore_eos && eos.contains(&id) {
            self.send(Event::Token {
                id,
                text: String::new(),
                logprobs,
            });
            return self.finish(FinishReason::Stop);
        }
        let (text, stopped) = self.text.push(id);
        self.send(Event::Token { id, text, logprobs });
        if stopped {
            self.send_finished(FinishReason::Stop, String::new());
            return Progress::Finished;
        }
        if self.remaining_tokens() == 0 {
            return self.finish(FinishReason::Length);
        }
        Progress::Running
    }

    fn record_time(&mut self, now: Instant) {
        let (name, since) = match self.last_commit.replace(now) {
            None => ("outrider_time_to_first_token_seconds", self.request.arrived),
            Some(last) => ("outrider_inter_token_seconds", last),
        };
        metrics::histogram!(name).record(now.saturating_duration_since(since).as_secs_f64());
    }

    /// Tells the caller that the request failed.
    pub(super) fn fail(&mut self, error: EngineError) {
        super::count_failure(&error);
        self.running = None;
        self.request.trace = Trace::default();
        self.send(Event::Failed(error));
    }

    fn finish(&mut self, reason: FinishReason) -> Progress {
        let text = self.text.finish();
        self.send_finished(reason, text);
        Progress::Finished
    }

    fn send_finished(&mut self, reason: FinishReason, text: String) {
        self.running = None;
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.reused,
            completion_tokens: self.generated(),
            speculative: self.usage,
        };
        self.request.trace.finished(&usage);
        self.send(Event::Finished {
            reason,
            text,
            usage,
        });
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// A caller that is gone is noticed at the next step through [`Sequence::is_cancelled`].
    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}
