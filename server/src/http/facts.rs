//! What becomes known of a generation request while it runs, gathered for its line in the audit log.

use std::time::Duration;

use actix_web::http::Method;
use bytes::Bytes;

use super::backend::Backend;
use super::choices::{Plan, Prompt};
use super::params::Generation;
use super::shape::finish_reason;
use crate::audit::{Body, Parameters, Record, Speculation, Texts};
use crate::engine::{Event, Sampling, Usage};

/// Routes whose requests have a line in the audit log.
const GENERATION_ROUTES: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

/// Whether a request asks for a completion.
pub fn is_generation(method: &Method, route: &str) -> bool {
    *method == Method::POST && GENERATION_ROUTES.contains(&route)
}

/// What is known of a generation request.
#[derive(Debug, Default)]
pub struct Facts {
    keeps_texts: bool,
    body: Option<Bytes>,
    asked: Option<Asked>,
    choices: Vec<ChoiceFacts>,
    first_token: Option<Duration>,
}

/// What is known once a request is understood.
#[derive(Debug)]
struct Asked {
    stream: bool,
    parameters: Parameters,
    prompt_tokens: usize,
    speculative: bool,
}

#[derive(Debug, Default)]
struct ChoiceFacts {
    tokens: usize,
    finish_reason: Option<&'static str>,
    usage: Option<Usage>,
    text: String,
}

impl Facts {
    /// Nothing yet; `keeps_texts` asks for prompts and completions as well.
    pub fn new(keeps_texts: bool) -> Self {
        Self {
            keeps_texts,
            ..Self::default()
        }
    }

    /// Notes the body of the request.
    pub fn body(&mut self, body: &Bytes) {
        if self.keeps_texts {
            self.body = Some(body.clone());
        }
    }

    /// Notes what the request asks for, with the values that are used.
    pub fn asked(
        &mut self,
        backend: &dyn Backend,
        prompts: &[Prompt],
        generation: &Generation,
        sampling: &Sampling,
        plan: &Plan,
    ) {
        self.asked = Some(Asked {
            stream: generation.stream,
            parameters: Parameters {
                prompts: prompts.len(),
                n: generation.n,
                max_tokens: generation.max_tokens.or(plan.default_max_tokens),
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                min_p: sampling.min_p,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                repetition_penalty: sampling.repetition_penalty,
                logit_bias_tokens: sampling.logit_bias.len(),
                seed: plan.seed,
                stop_strings: generation.stop.len(),
                ignore_eos: generation.ignore_eos,
                logprobs: generation.logprobs,
            },
            prompt_tokens: prompts.iter().map(|prompt| prompt.tokens.len()).sum(),
            speculative: plan.speculative && backend.speculation(),
        });
        self.choices
            .resize_with(prompts.len() * generation.n, ChoiceFacts::default);
    }

    /// Notes what a completion has brought, this long after the request began.
    pub fn event(&mut self, index: usize, event: &Event, elapsed: Duration) {
        let Some(choice) = self.choices.get_mut(index) else {
            return;
        };
        let text = match event {
            Event::Token { text, .. } => {
                self.first_token.get_or_insert(elapsed);
                choice.tokens += 1;
                text
            }
            Event::Finished {
                reason,
                text,
                usage,
            } => {
                choice.finish_reason = Some(finish_reason(*reason));
                choice.usage = Some(*usage);
                text
            }
            Event::Prompt(_) | Event::Failed(_) => return,
        };
        if self.keeps_texts {
            choice.text.push_str(text);
        }
    }

    /// Puts what is known into the record of the request.
    pub fn fill(self, record: &mut Record) {
        record.finish_reasons = self
            .choices
            .iter()
            .map(|choice| choice.finish_reason)
            .collect();
        record.completion_tokens = self.choices.iter().map(|choice| choice.tokens).sum();
        record.first_token_seconds = self.first_token.map(|time| time.as_secs_f64());
        if let Some(asked) = self.asked {
            // The first completion of each prompt says what was there before; the others find what it computed.
            let firsts = self.choices.iter().step_by(asked.parameters.n);
            record.cached_tokens = firsts
                .filter_map(|choice| choice.usage)
                .map(|usage| usage.cached_tokens)
                .sum();
            let finished = self.choices.iter().filter_map(|choice| choice.usage);
            let drafting = finished.fold(
                Speculation {
                    enabled: asked.speculative,
                    ..Speculation::default()
                },
                |sum, usage| Speculation {
                    drafted_tokens: sum.drafted_tokens + usage.speculative.drafted_tokens,
                    accepted_tokens: sum.accepted_tokens + usage.speculative.accepted_tokens,
                    steps: sum.steps + usage.speculative.steps,
                    ..sum
                },
            );
            record.speculation = Some(drafting);
            record.stream = Some(asked.stream);
            record.prompt_tokens = Some(asked.prompt_tokens);
            record.parameters = Some(asked.parameters);
        }
        if self.keeps_texts {
            record.texts = Some(Texts {
                request: self.body.map(Body),
                completions: self.choices.into_iter().map(|choice| choice.text).collect(),
            });
        }
    }
}
