//! The spans of one completion in the engine: its wait for a slot, its prompt, its tokens. At most one of them is open.
//!
//! They are given up before the caller is told the end, so that who knows of the end finds them closed.

use tracing::Span;
use tracing::field::Empty;

use super::request::Usage;

/// Where a completion is on its way, as a span within that of its request.
#[derive(Clone, Debug)]
pub struct Trace {
    request: Span,
    phase: Span,
}

/// A completion that nobody follows.
impl Default for Trace {
    fn default() -> Self {
        Self {
            request: Span::none(),
            phase: Span::none(),
        }
    }
}

impl Trace {
    /// A completion within the span `request` that waits for its slot from now on.
    pub fn waiting(request: Span) -> Self {
        let phase = tracing::info_span!(parent: &request, "queue");
        Self { request, phase }
    }

    /// The span of the request, for records that belong to it.
    pub(super) fn request(&self) -> &Span {
        &self.request
    }

    /// It has its slot, and its prompt is computed.
    pub(super) fn prefill(&mut self, prompt_tokens: usize) {
        let prompt_tokens = count(prompt_tokens);
        self.phase = tracing::info_span!(parent: &self.request, "prefill", prompt_tokens);
    }

    /// Its first token is there.
    pub(super) fn decode(&mut self) {
        self.phase = tracing::info_span!(
            parent: &self.request,
            "decode",
            completion_tokens = Empty,
            drafted_tokens = Empty,
            accepted_tokens = Empty
        );
    }

    /// It has come to its end; nothing of it keeps the span of its request open from now on.
    pub(super) fn finished(&mut self, usage: &Usage) {
        self.phase
            .record("completion_tokens", count(usage.completion_tokens))
            .record("drafted_tokens", count(usage.speculative.drafted_tokens))
            .record("accepted_tokens", count(usage.speculative.accepted_tokens));
        *self = Self::default();
    }
}

/// A count as an attribute; one that is not signed would be exported as text.
pub(super) fn count(tokens: usize) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX)
}
