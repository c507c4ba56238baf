//! The body of a streamed answer: server-sent events, made as the engine's events arrive.
//!
//! Each chunk is one `data:` event; the last one is `data: [DONE]`.
//! When a completion fails on the way, its error object is sent as the last event and there is no `[DONE]`: OpenAI's clients raise it, and
//! a client that waits for `[DONE]` sees that the answer is not complete.
//! The body is dropped when the client goes away, and with it the receivers, which cancels the completions.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, MessageBody};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use serde::Serialize;

use super::access::AccessRecord;
use super::backend::Backend;
use super::choices::{Choices, Piece};
use super::error::ApiError;
use super::shape::AnswerWriter;
use crate::engine::EngineError;
use crate::lifecycle::Drain;

/// A streamed answer.
pub struct EventStream {
    backend: Arc<dyn Backend>,
    choices: Choices,
    writer: AnswerWriter,
    include_usage: bool,
    record: AccessRecord,
    /// Comes when the server goes down and waits no longer.
    cut_off: LocalBoxFuture<'static, ()>,
    state: State,
    buffer: BytesMut,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was sent.
    Opening,
    /// Completions are running.
    Running,
    /// The last event is in the buffer or sent.
    Ended,
}

impl EventStream {
    /// Streams `choices`; `include_usage` adds a chunk with the token counts. When `drain` cuts requests off, the stream ends with an error.
    pub fn new(
        backend: Arc<dyn Backend>,
        choices: Choices,
        writer: AnswerWriter,
        include_usage: bool,
        record: AccessRecord,
        drain: Arc<Drain>,
    ) -> Self {
        Self {
            backend,
            choices,
            writer,
            include_usage,
            record,
            cut_off: async move { drain.cut_off().await }.boxed_local(),
            state: State::Opening,
            buffer: BytesMut::new(),
        }
    }

    fn open(&mut self) {
        for (index, choice) in self.choices.iter().enumerate() {
            if let Some(body) = self.writer.opening(index, choice, self.include_usage) {
                write_event(&mut self.buffer, &body);
            }
        }
        self.state = State::Running;
    }

    fn fail(&mut self, error: &ApiError) {
        write_event(&mut self.buffer, &error.body());
        self.record.failed(error);
        self.choices.cancel();
        self.state = State::Ended;
    }

    /// Takes every event that is there into the buffer.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.state == State::Running {
            match self.choices.poll_next(cx) {
                // Asked last, so that a completion which has just finished is not lost.
                Poll::Pending if self.cut_off.poll_unpin(cx).is_ready() => {
                    self.fail(&ApiError::from(EngineError::Stopped));
                }
                Poll::Pending => return,
                Poll::Ready(Some((index, Ok(event)))) => {
                    let mut piece = Piece::default();
                    piece.absorb(event);
                    let Some(choice) = self.choices.iter().nth(index) else {
                        continue;
                    };
                    let body =
                        self.writer
                            .chunk(&*self.backend, index, choice, piece, self.include_usage);
                    if let Some(body) = body {
                        write_event(&mut self.buffer, &body);
                    }
                    self.record.usage(self.writer.usage());
                }
                Poll::Ready(Some((_, Err(error)))) => self.fail(&ApiError::from(error)),
                Poll::Ready(None) => {
                    if self.include_usage {
                        write_event(&mut self.buffer, &self.writer.usage_chunk());
                    }
                    self.buffer.extend_from_slice(b"data: [DONE]\n\n");
                    self.state = State::Ended;
                }
            }
        }
    }
}

impl MessageBody for EventStream {
    type Error = Infallible;

    fn size(&self) -> BodySize {
        BodySize::Stream
    }

    fn poll_next(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        let stream = self.get_mut();
        if stream.state == State::Opening {
            stream.open();
        }
        stream.fill(cx);
        if !stream.buffer.is_empty() {
            return Poll::Ready(Some(Ok(stream.buffer.split().freeze())));
        }
        match stream.state {
            State::Ended => Poll::Ready(None),
            State::Opening | State::Running => Poll::Pending,
        }
    }
}

fn write_event(buffer: &mut BytesMut, body: &impl Serialize) {
    buffer.extend_from_slice(b"data: ");
    let mut writer = bytes::BufMut::writer(&mut *buffer);
    // JSON escapes line breaks, so an event is one line. Writing to memory fails only for keys that are not text, which no body has.
    let written = serde_json::to_writer(&mut writer, body);
    debug_assert!(written.is_ok(), "a body did not serialise: {written:?}");
    buffer.extend_from_slice(b"\n\n");
}
