//! One line of the audit log.

use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;

/// Version of the lines. It grows when a field changes its meaning or goes away; fields may be added without.
pub const SCHEMA_VERSION: u32 = 1;

/// Room that a record takes in the queue besides the texts in it.
const FIXED_BYTES: usize = 1024;

/// What is written about one generation request.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// When the head of the request had arrived.
    #[serde(serialize_with = "to_the_microsecond")]
    pub time: Timestamp,
    /// Identifier of the request, as in the answer's header and the log.
    pub request_id: String,
    /// Requests without a valid key that this line stands for, of which it tells the last; absent for any other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_requests: Option<u64>,
    /// Name of the caller: that of its key, or its address where no keys are asked for.
    pub caller: String,
    /// Path that was called.
    pub endpoint: String,
    /// Version of the server.
    pub server_version: &'static str,
    /// Name of the model served; null before it is loaded.
    pub model: Option<String>,
    /// Digest of its bundle; null before it is loaded.
    pub bundle_digest: Option<String>,
    /// Whether a stream was asked for; null for a request that was refused before it was understood, as with the three fields below.
    pub stream: Option<bool>,
    /// What shaped the answer.
    pub parameters: Option<Parameters>,
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: Option<usize>,
    /// Those of them that were computed for an earlier request already, of the completions that ended.
    pub cached_tokens: usize,
    /// How drafting went.
    pub speculation: Option<Speculation>,
    /// Tokens generated, over all completions, also where the answer was cut short.
    pub completion_tokens: usize,
    /// How each completion ended: `stop`, `length`, or null for one that did not end.
    pub finish_reasons: Vec<Option<&'static str>>,
    /// HTTP status; 499 when the caller left before the answer was complete.
    pub status: u16,
    /// Code of the error that the answer is, or ended with.
    pub error_code: Option<&'static str>,
    /// Time from the head of the request to the first token of any completion.
    pub first_token_seconds: Option<f64>,
    /// Time from the head of the request to the end of the answer.
    pub seconds: f64,
    /// What was sent and answered, where the configuration asks for it.
    #[serde(flatten)]
    pub texts: Option<Texts>,
}

/// The values that were used, the model's own where the request had none.
#[derive(Clone, Debug, Serialize)]
pub struct Parameters {
    /// Prompts in the request.
    pub prompts: usize,
    /// Completions of each prompt.
    pub n: usize,
    /// Most tokens of each completion; null for as many as fit.
    pub max_tokens: Option<usize>,
    /// Softmax temperature.
    pub temperature: f32,
    /// Nucleus bound.
    pub top_p: f32,
    /// Candidate bound; 0 keeps all.
    pub top_k: u32,
    /// Least share of the largest probability.
    pub min_p: f32,
    /// Presence penalty.
    pub presence_penalty: f32,
    /// Frequency penalty.
    pub frequency_penalty: f32,
    /// Repetition penalty.
    pub repetition_penalty: f32,
    /// Tokens whose logits were changed.
    pub logit_bias_tokens: usize,
    /// Seed of the first completion, drawn by the server where the request had none.
    pub seed: i64,
    /// Stop strings.
    pub stop_strings: usize,
    /// Whether completions went on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Most likely tokens reported for each position; null without log-probabilities.
    pub logprobs: Option<usize>,
}

/// How drafting went for a request.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Speculation {
    /// Whether the request allowed it and the server's switch was on.
    pub enabled: bool,
    /// Drafted tokens that the target checked, over all completions that ended.
    pub drafted_tokens: usize,
    /// Those of them that became part of a completion.
    pub accepted_tokens: usize,
    /// Target passes that checked drafted tokens.
    pub steps: usize,
}

/// What was sent and answered.
#[derive(Clone, Debug, Serialize)]
pub struct Texts {
    /// The body of the request.
    #[serde(flatten)]
    pub request: Option<Body>,
    /// The text of each completion, as far as it came.
    pub completions: Vec<String>,
}

/// The body of a request, byte for byte, so that it can be sent again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body(pub Bytes);

impl Serialize for Body {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "snake_case")]
        enum Encoded<'a> {
            RequestBody(&'a str),
            /// For bytes that are no text, which JSON can't hold.
            RequestBodyHex(String),
        }
        match std::str::from_utf8(&self.0) {
            Ok(text) => Encoded::RequestBody(text),
            Err(_) => Encoded::RequestBodyHex(hex::encode(&self.0)),
        }
        .serialize(serializer)
    }
}

impl Record {
    /// About how much memory it takes while it waits.
    pub(super) fn bytes(&self) -> usize {
        let texts = self.texts.as_ref().map_or(0, |texts| {
            texts.request.as_ref().map_or(0, |body| body.0.len())
                + texts.completions.iter().map(String::len).sum::<usize>()
        });
        FIXED_BYTES + texts
    }

    /// The line; `lost_lines` says how many are missing before it.
    pub(super) fn line(&self, lost_lines: u64) -> Vec<u8> {
        #[derive(Serialize)]
        struct Line<'a> {
            schema_version: u32,
            #[serde(skip_serializing_if = "is_zero")]
            lost_lines: u64,
            #[serde(flatten)]
            record: &'a Record,
        }
        let line = Line {
            schema_version: SCHEMA_VERSION,
            lost_lines,
            record: self,
        };
        // Writing to memory fails only for keys that are not text and for values that can't be serialised; a record has neither.
        let mut bytes = serde_json::to_vec(&line).expect("a record serialises");
        bytes.push(b'\n');
        bytes
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn to_the_microsecond<S: serde::Serializer>(
    time: &Timestamp,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{time:.6}"))
}
