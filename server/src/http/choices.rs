//! The completions of one request while they run: submission to the engine, and their events as they come.
//!
//! Dropping [`Choices`] drops every receiver, which is how the engine learns that nobody waits any more.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::error::TryRecvError;

use super::access::AccessRecord;
use super::backend::{Backend, ModelCard};
use super::caller::Caller;
use super::error::ApiError;
use super::params::Generation;
use crate::engine::{
    EngineError, Event, FinishReason, Request, Sampling, TokenLogprobs, Trace, Usage,
};
use crate::metrics;

/// A tokenised prompt.
#[derive(Debug)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its text, when the answer is to repeat it.
    pub echo: Option<String>,
    /// Name of the field it came from.
    pub param: String,
}

/// One completion.
#[derive(Debug)]
pub struct Choice {
    /// The prompt it completes.
    pub prompt: Arc<Prompt>,
    /// Whether it is the first of its prompt, which answers for the tokens of the prompt.
    pub is_first: bool,
    /// The seed of its noise.
    pub seed: i64,
    events: Option<UnboundedReceiver<Event>>,
}

/// Whether a completion has not come to its end, whatever of it was not taken yet.
fn is_open(events: &mut UnboundedReceiver<Event>) -> bool {
    loop {
        match events.try_recv() {
            Ok(Event::Finished { .. } | Event::Failed(_)) | Err(TryRecvError::Disconnected) => {
                return false;
            }
            Ok(_) => {}
            Err(TryRecvError::Empty) => return true,
        }
    }
}

/// The completions of one request, in the order of their index: all of the first prompt, then all of the second.
#[derive(Debug)]
pub struct Choices {
    choices: Vec<Choice>,
    /// Where the next look for an event begins, so that no choice starves the others.
    next: usize,
    /// An event that was waited for and not taken yet.
    first: Option<(usize, Event)>,
    /// Hears of every event.
    record: AccessRecord,
}

/// How the completions of a request are to be run, beyond what the request itself says.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name of the request in logs.
    pub request_id: String,
    /// Who asks.
    pub caller: Caller,
    /// When the request arrived.
    pub arrived: Instant,
    /// Seed of the first choice of each prompt.
    pub seed: i64,
    /// Most tokens, when the request does not say; `None` is as many as fit.
    pub default_max_tokens: Option<usize>,
    /// Whether drafting may be used.
    pub speculative: bool,
}

impl Choices {
    /// Submits `n` completions of every prompt, all or none.
    pub fn submit(
        backend: &dyn Backend,
        prompts: Vec<Prompt>,
        generation: &Generation,
        plan: &Plan,
        record: &AccessRecord,
    ) -> Result<Self, ApiError> {
        let context_tokens = backend.limits().context_tokens;
        let sampling = sampling(generation, backend.card());
        record.asked(backend, &prompts, generation, &sampling, plan);
        let mut choices = Vec::with_capacity(prompts.len() * generation.n);
        for prompt in prompts {
            let prompt = Arc::new(prompt);
            choices.extend((0..generation.n).map(|choice| Choice {
                prompt: Arc::clone(&prompt),
                is_first: choice == 0,
                seed: choice_seed(plan.seed, choice),
                events: None,
            }));
        }
        let request = |(index, choice): (usize, &Choice)| {
            let prompt = &choice.prompt;
            let room = context_tokens.saturating_sub(prompt.tokens.len()).max(1);
            let max_tokens = match (generation.max_tokens, plan.default_max_tokens) {
                (Some(asked), _) => asked,
                (None, Some(default)) => default.min(room),
                (None, None) => room,
            };
            let prompt_logprobs = match prompt.echo {
                // Without tokens to generate the engine scores the prompt, asked for or not.
                Some(_) if max_tokens == 0 => Some(generation.logprobs.unwrap_or(0)),
                Some(_) => generation.logprobs,
                None => None,
            };
            Request {
                id: format!("{}/{index}", plan.request_id),
                caller: plan.caller.0.clone(),
                arrived: plan.arrived,
                prompt: prompt.tokens.clone(),
                max_tokens,
                sampling: sampling.clone(),
                seed: choice.seed.cast_unsigned(),
                stop: generation.stop.clone(),
                ignore_eos: generation.ignore_eos,
                logprobs: generation.logprobs,
                prompt_logprobs,
                speculative: plan.speculative,
                trace: Trace::waiting(record.span()),
            }
        };
        // One by one, so that prompts that do not fit are not copied.
        let mut requests = choices.iter().enumerate().map(request);
        let receivers = backend.submit(&mut requests).map_err(|(index, error)| {
            let prompt = choices.get(index).map(|choice| &choice.prompt);
            ApiError::from_submit(error, prompt.map_or("prompt", |prompt| &prompt.param))
        })?;
        for (choice, events) in choices.iter_mut().zip(receivers) {
            choice.events = Some(events);
        }
        Ok(Self {
            choices,
            next: 0,
            first: None,
            record: record.clone(),
        })
    }

    /// The completions.
    pub fn iter(&self) -> impl Iterator<Item = &Choice> {
        self.choices.iter()
    }

    /// Gives up the completions that have not finished.
    pub fn cancel(&mut self) {
        let open = self
            .choices
            .iter_mut()
            .filter_map(|choice| choice.events.take())
            .filter_map(|mut events| is_open(&mut events).then_some(events))
            .count();
        if open > 0 {
            metrics::completions_cancelled(open);
        }
    }

    /// Returns when a completion has something to tell, so that an answer is only begun when there is one.
    ///
    /// # Errors
    ///
    /// A completion failed before any had something to tell.
    pub async fn begun(&mut self) -> Result<(), EngineError> {
        if let Some((index, event)) = poll_fn(|cx| self.poll_next(cx)).await {
            self.first = Some((index, event?));
        }
        Ok(())
    }

    /// The next event of any completion, with its index; `None` when all have finished.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<(usize, Result<Event, EngineError>)>> {
        if let Some((index, event)) = self.first.take() {
            return Poll::Ready(Some((index, Ok(event))));
        }
        let count = self.choices.len();
        let mut open = false;
        for step in 0..count {
            let index = (self.next + step) % count;
            let Some(events) = self.choices[index].events.as_mut() else {
                continue;
            };
            open = true;
            let Poll::Ready(event) = events.poll_recv(cx) else {
                continue;
            };
            self.next = (index + 1) % count;
            let event = match event {
                Some(Event::Failed(error)) => Err(error),
                Some(event) => Ok(event),
                None => Err(EngineError::Stopped),
            };
            if let Ok(event) = &event {
                self.record.event(index, event);
            }
            if matches!(event, Err(_) | Ok(Event::Finished { .. })) {
                self.choices[index].events = None;
            }
            return Poll::Ready(Some((index, event)));
        }
        if open {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    }
}

impl Drop for Choices {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// What a completion has brought since it was last looked at.
#[derive(Debug, Default)]
pub struct Piece {
    /// Text.
    pub text: String,
    /// Tokens.
    pub tokens: Vec<u32>,
    /// Their log-probabilities, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt's tokens from the second on.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// How it ended, and what it cost.
    pub finished: Option<(FinishReason, Usage)>,
}

impl Piece {
    /// Adds an event.
    pub fn absorb(&mut self, event: Event) {
        match event {
            Event::Prompt(logprobs) => self.prompt_logprobs = Some(logprobs),
            Event::Token { id, text, logprobs } => {
                self.tokens.push(id);
                self.text.push_str(&text);
                self.logprobs.extend(logprobs);
            }
            Event::Finished {
                reason,
                text,
                usage,
            } => {
                self.text.push_str(&text);
                self.finished = Some((reason, usage));
            }
            Event::Failed(_) => {}
        }
    }
}

/// The sampling of a request, the model's own settings where the request says nothing.
fn sampling(generation: &Generation, card: &ModelCard) -> Sampling {
    let defaults = &card.generation;
    Sampling {
        temperature: generation
            .temperature
            .or(defaults.temperature)
            .unwrap_or(1.0),
        top_p: generation.top_p.or(defaults.top_p).unwrap_or(1.0),
        top_k: generation.top_k.or(defaults.top_k).unwrap_or(0),
        min_p: generation.min_p.or(defaults.min_p).unwrap_or(0.0),
        presence_penalty: generation.presence_penalty,
        frequency_penalty: generation.frequency_penalty,
        repetition_penalty: generation
            .repetition_penalty
            .or(defaults.repetition_penalty)
            .unwrap_or(1.0),
        logit_bias: generation.logit_bias.clone(),
    }
}

/// The seed of choice `index`: the request's own for the first, then a mix of both (the output function of SplitMix64), so that
/// requests with neighbouring seeds share no noise. 53 bits, so that clients which read numbers as doubles can send it back.
pub fn choice_seed(seed: i64, index: usize) -> i64 {
    if index == 0 {
        return seed;
    }
    let mut bits = seed
        .cast_unsigned()
        .wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11).cast_signed()
}

/// A seed for a request that brings none, of 53 bits.
pub fn random_seed() -> Result<i64, ApiError> {
    getrandom::u64()
        .map(|bits| (bits >> 11).cast_signed())
        .map_err(|error| ApiError::internal(format!("no random seed: {error}")))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[test]
    fn a_completion_whose_end_was_not_taken_yet_is_not_given_up() {
        let token = || Event::Token {
            id: 1,
            text: String::new(),
            logprobs: None,
        };
        for (events, is_open_then) in [
            (vec![], true),
            (vec![token()], true),
            (vec![token(), Event::Failed(EngineError::Stopped)], false),
        ] {
            let (sender, mut receiver) = unbounded_channel();
            for event in &events {
                sender.send(event.clone()).unwrap();
            }
            assert_eq!(is_open(&mut receiver), is_open_then, "{events:?}");
            drop(sender);
            assert!(!is_open(&mut receiver), "nobody is left to end it");
        }
    }
}
