//! What lies below the HTTP library on a connection: a stream that sees what the library does not.
//!
//! The library times the first head of a connection and no other, and while an answer is under way it notices a client that leaves only as long as it
//! has room for what that client has sent. Here
//! - the library is given one head or body at a time, and the next head once the answer is complete; so it is known whether one has begun;
//! - a head behind the first has as much time as the first;
//! - a client that closes its side while it waits has gone away, whatever it has sent before, and what it asked for is dropped;
//! - a client that does not take its answers is not read from, and has gone away after a time where the system does not see to it;
//! - too much that is sent ahead of an answer ends the connection.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::rt::time::{Sleep, sleep};
use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::framing::{Lines, Part};
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
    /// What comes next from the client, or from what it has sent ahead.
    part: Part,
    /// Whether there was a request before the head that comes next.
    has_begun: bool,
    header_timeout: Duration,
    /// Runs while a head behind the first arrives.
    head: Timer,
    /// `None` where the system sees to it.
    write_timeout: Option<Duration>,
    /// Runs while the client takes nothing.
    blocked: Timer,
    /// Bytes read since the library's last turn.
    burst_bytes: usize,
    /// Bytes read since the last request had its answer.
    rest_bytes: usize,
    /// Whether the client takes no more of its answers for now.
    is_blocked: bool,
    /// What was read and not yet given to the library.
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
            part: Part::Head(Lines::default()),
            has_begun: false,
            header_timeout,
            head: Timer::default(),
            write_timeout: None,
            blocked: Timer::default(),
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

    /// Whether a request has arrived whole and has not had its answer.
    fn is_answering(&self) -> bool {
        self.requests.is_in_flight() && matches!(self.part, Part::Head(_))
    }

    /// Learns of a request that has begun; says whether one has.
    fn follow(&mut self) -> bool {
        let Some(body) = self.requests.take_begun() else {
            return false;
        };
        self.part = Part::behind_head(body);
        self.has_begun = true;
        self.head.stop();
        self.rest_bytes = 0;
        true
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
        if self.is_closed && self.is_answering() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the client closed its side before it had its answer",
            ));
        }
        Ok(())
    }

    /// Fails when a head behind the first takes too long.
    fn poll_head(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let is_arriving = match &self.part {
            Part::Head(lines) => lines.has_begun(),
            Part::Unknown { .. } => true,
            Part::Body(_) => false,
        };
        if self.has_begun && is_arriving && self.head.is_over(self.header_timeout, cx) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the head of a request took too long",
            ));
        }
        Ok(())
    }

    /// Reads what belongs to the part that comes next, and nothing when the client has closed its side.
    fn poll_part(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if !self.ahead.is_empty() {
            let length = buffer.remaining().min(self.ahead.len());
            let taken = self.part.take(&self.ahead[..length])?;
            buffer.put_slice(&self.ahead[..taken]);
            self.ahead.advance(taken);
        } else if !self.is_closed {
            if Pin::new(&mut self.io).poll_read(cx, buffer)?.is_pending() {
                return Poll::Pending;
            }
            let read = &buffer.filled()[before..];
            self.is_closed = read.is_empty();
            let taken = self.part.take(read)?;
            self.ahead.extend_from_slice(&read[taken..]);
            buffer.set_filled(before + taken);
        }
        if let Part::Unknown { has_bare_line_feed } = self.part {
            self.requests.end_head(has_bare_line_feed);
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.follow();
        if matches!(this.part, Part::Body(_)) {
            this.requests.offer_body();
        }
        if this.is_answering() {
            this.poll_ahead(cx)?;
            return if this.is_closed {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            };
        }
        this.poll_head(cx)?;
        if this.is_blocked || matches!(this.part, Part::Unknown { .. }) {
            // Woken when the client takes some, or when the request begins.
            return Poll::Pending;
        }
        if this.burst_bytes >= BURST_BYTES {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if this.poll_part(cx, buffer)?.is_pending() {
            return Poll::Pending;
        }
        let read = buffer.filled().len() - before;
        this.burst_bytes += read;
        if this.requests.is_in_flight() {
            this.rest_bytes = 0;
        } else {
            this.rest_bytes += read;
        }
        if this.rest_bytes > MAX_REST_BYTES {
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
        let this = self.get_mut();
        this.check_client()?;
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
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.burst_bytes = 0;
        let has_begun = this.follow();
        if this.is_answering() {
            // The library no longer reads when it has met bytes that are no request.
            this.poll_ahead(cx)?;
        } else if has_begun || !this.ahead.is_empty() && !matches!(this.part, Part::Unknown { .. })
        {
            cx.waker().wake_by_ref();
        }
        this.check_client()?;
        this.poll_head(cx)?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}
