//! What lies below the HTTP library on a connection: a stream that sees what the library does not.
//!
//! The library times the first head of a connection and no other, and while an answer is under way it notices a client that leaves only as long as it
//! has room for what that client has sent. Here
//! - a head behind the first has as much time as the first;
//! - a client that closes its side while it waits has gone away, whatever it has sent before, and what it asked for is dropped;
//! - a client that does not take its answers is not read from, and has gone away after a time where the system does not see to it;
//! - what is sent ahead of an answer stays out of the library's reach until the answer is complete, and too much of it ends the connection.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::rt::time::{Sleep, sleep};
use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::requests::Requests;

/// What a client may send ahead of an answer that it waits for.
const MAX_AHEAD_BYTES: usize = 64 << 10;

/// What the library is given between two of its turns, far below what it holds: when that is full, it spins.
const BURST_BYTES: usize = 64 << 10;

/// What is read of a client between two requests, far above a head: the rest of a body that nobody wants, so that its sender gets to read why.
const MAX_REST_BYTES: usize = 64 << 20;

/// Runs from the first time that it is asked.
#[derive(Debug, Default)]
struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    fn is_over(&mut self, limit: Duration, cx: &mut Context<'_>) -> bool {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(cx).is_ready()
    }

    fn stop(&mut self) {
        self.0 = None;
    }
}

/// The stream of a connection.
#[derive(Debug)]
pub struct Stream<T> {
    io: T,
    requests: Requests,
    header_timeout: Duration,
    /// Runs while a head behind the first arrives.
    head: Timer,
    /// `None` where the system sees to it.
    write_timeout: Option<Duration>,
    /// Runs while the client takes nothing.
    blocked: Timer,
    /// Requests that had begun when it was looked at last.
    seen: u64,
    /// Bytes read since the library's last turn.
    burst_bytes: usize,
    /// Bytes read since the last request had its answer.
    rest_bytes: usize,
    /// Whether the client takes no more of its answers for now.
    is_blocked: bool,
    /// What was sent ahead of the answer.
    ahead: BytesMut,
    /// Whether the client has closed its side.
    is_closed: bool,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream<T> {
    /// A connection whose heads have this time each.
    pub fn new(io: T, header_timeout: Duration) -> Self {
        Self {
            io,
            requests: Requests::default(),
            header_timeout,
            head: Timer::default(),
            write_timeout: None,
            blocked: Timer::default(),
            seen: 0,
            burst_bytes: 0,
            rest_bytes: 0,
            is_blocked: false,
            ahead: BytesMut::new(),
            is_closed: false,
        }
    }

    /// The same for a transport whose clients may otherwise take nothing for as long as they like.
    pub fn with_write_timeout(self, limit: Duration) -> Self {
        Self {
            write_timeout: Some(limit),
            ..self
        }
    }

    /// Where the application tells of the connection's requests.
    pub fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// Reads what is sent ahead of the answer, to see the client leave.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while !self.is_closed {
            let mut bytes = [0; 4096];
            let mut buffer = ReadBuf::new(&mut bytes);
            if Pin::new(&mut self.io)
                .poll_read(cx, &mut buffer)?
                .is_pending()
            {
                return Ok(());
            }
            self.is_closed = buffer.filled().is_empty();
            self.ahead.extend_from_slice(buffer.filled());
            if self.ahead.len() > MAX_AHEAD_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    format!("more than {MAX_AHEAD_BYTES} bytes came ahead of an answer"),
                ));
            }
        }
        Ok(())
    }

    /// Fails when whoever waits for an answer has gone.
    fn check_client(&self) -> io::Result<()> {
        if self.is_closed && self.requests.is_in_flight() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the client closed its side before it had its answer",
            ));
        }
        Ok(())
    }

    /// Fails when a head behind the first takes too long.
    fn poll_head(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let begun = self.requests.begun();
        if begun != self.seen {
            self.seen = begun;
            self.head.stop();
            self.rest_bytes = 0;
        }
        let is_later = begun > 0 && self.requests.is_arriving();
        if is_later && self.head.is_over(self.header_timeout, cx) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the head of a request took too long",
            ));
        }
        Ok(())
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.requests.is_answering() {
            self.poll_ahead(cx)?;
            return if self.is_closed {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            };
        }
        self.poll_head(cx)?;
        if self.is_blocked {
            // Woken when it takes some.
            return Poll::Pending;
        }
        if self.burst_bytes >= BURST_BYTES {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if !self.ahead.is_empty() {
            let length = buffer.remaining().min(self.ahead.len());
            buffer.put_slice(&self.ahead[..length]);
            self.ahead.advance(length);
        } else if !self.is_closed {
            if Pin::new(&mut self.io).poll_read(cx, buffer)?.is_pending() {
                return Poll::Pending;
            }
            self.is_closed = buffer.filled().len() == before;
        }
        let read = buffer.filled().len() - before;
        self.burst_bytes += read;
        if read > 0 {
            self.requests.receive();
        }
        if self.requests.is_in_flight() {
            self.rest_bytes = 0;
        } else {
            self.rest_bytes += read;
        }
        if self.rest_bytes > MAX_REST_BYTES {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                format!("more than {MAX_REST_BYTES} bytes came that are no request"),
            )));
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_client()?;
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, bytes);
        this.is_blocked = written.is_pending();
        if !this.is_blocked {
            this.blocked.stop();
        } else if let Some(limit) = this.write_timeout
            && this.blocked.is_over(limit, cx)
        {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client took nothing of its answer for too long",
            )));
        }
        written
    }

    /// The last thing that the library does in each of its turns.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.burst_bytes = 0;
        if self.requests.is_answering() {
            // The library no longer reads when it has met bytes that are no request.
            self.poll_ahead(cx)?;
        } else if !self.ahead.is_empty() {
            cx.waker().wake_by_ref();
        }
        self.check_client()?;
        self.poll_head(cx)?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
