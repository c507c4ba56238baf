//! What both listeners share: the HTTP library on streams that see what it does not, with the same limits for TCP, TLS and sockets in the file system.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix_http::error::DispatchError;
use actix_http::{Extensions, HttpService, Protocol, Request};
use actix_service::{Service, ServiceFactory, ServiceFactoryExt as _, fn_service, map_config};
use actix_tls::accept::TlsError;
use actix_tls::accept::rustls_0_23::{Acceptor, TlsStream};
use actix_web::body::MessageBody;
use actix_web::dev::{AppConfig, Server, ServiceResponse};
use actix_web::http::KeepAlive;
use actix_web::rt::net::{TcpStream, UnixStream};
use actix_web::{HttpResponse, web};
use tokio::io::{AsyncRead, AsyncWrite};

use super::State;
use super::connection::Stream;
use crate::listen::{self, Listener, SocketFile};
use crate::tls::Certificate;

/// Longer than the idle time of common gateways, so that they close an idle connection first and never send into a closing one.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// How long connections may take to send the rest of their answers when the server ends, in seconds.
const FLUSH_SECONDS: u64 = 1;

/// How long what a client still sends is thrown away behind an answer that did not wait for it, so that the client gets to read the answer.
const LINGER: Duration = Duration::from_secs(5);

/// What the connections of a listener are held to, beside the settings that can change.
pub struct Limits<'a> {
    /// Threads.
    pub workers: usize,
    /// Connections that are open at the same time.
    pub max_connections: usize,
    /// Time for the head of a request, and for the TLS handshake.
    pub header_timeout: Duration,
    /// What TLS is spoken with; `None` is plain HTTP, and so is every socket in the file system.
    pub certificate: Option<&'a Arc<Certificate>>,
}

/// Starts an application on a bound listener. The caller decides when it stops, and keeps the file of a socket until then.
///
/// # Errors
///
/// TLS can't be set up, or the listener can't be used.
pub fn start<A, B>(
    name: &str,
    listener: Listener,
    limits: &Limits<'_>,
    state: web::Data<State>,
    app: impl Fn() -> A + Clone + Send + 'static,
) -> std::io::Result<(Server, Option<SocketFile>)>
where
    A: ServiceFactory<
            Request,
            Config = AppConfig,
            Response = ServiceResponse<B>,
            Error = actix_web::Error,
            InitError = (),
        > + 'static,
    A::Future: 'static,
    <A::Service as Service<Request>>::Future: 'static,
    B: MessageBody + 'static,
{
    let header_timeout = limits.header_timeout;
    let server = Server::build()
        .workers(limits.workers)
        // The library counts them for each worker, and gives each the same share.
        .max_concurrent_connections(limits.max_connections.div_ceil(limits.workers))
        .shutdown_timeout(FLUSH_SECONDS)
        .disable_signals();
    let stopping = server.graceful_shutdown_signal();
    let stopping = move || {
        let stopping = stopping.clone();
        async move { stopping.notified().await }
    };
    let write_timeout = move || state.settings().write_timeout;
    let accepted = {
        let write_timeout = write_timeout.clone();
        move |io: &TcpStream| {
            listen::set_write_timeout(io, write_timeout()).map_err(DispatchError::Io)?;
            Ok(io.peer_addr().ok())
        }
    };
    let (server, socket_file) = match (listener, limits.certificate) {
        (Listener::Tcp(listener), None) => {
            let server = server.listen(name, listener, move || {
                let accepted = accepted.clone();
                fn_service(move |io: TcpStream| {
                    let peer = accepted(&io);
                    async move { Ok((Stream::new(io, header_timeout), Protocol::Http1, peer?)) }
                })
                .and_then(http1(header_timeout, stopping.clone(), app()))
            })?;
            (server, None)
        }
        (Listener::Tcp(listener), Some(certificate)) => {
            let tls = Arc::clone(certificate).server_config();
            let tls = tls.map_err(std::io::Error::other)?;
            let server = server.listen(name, listener, move || {
                let accepted = accepted.clone();
                let mut acceptor = Acceptor::new(tls.clone());
                acceptor.set_handshake_timeout(header_timeout);
                acceptor
                    .map_init_err(|_| ())
                    .map_err(TlsError::into_service_error)
                    .and_then(move |io: TlsStream<TcpStream>| {
                        let peer = accepted(io.get_ref().0).map_err(TlsError::Service);
                        async move { Ok((Stream::new(io, header_timeout), Protocol::Http1, peer?)) }
                    })
                    .and_then(
                        http1(header_timeout, stopping.clone(), app()).map_err(TlsError::Service),
                    )
            })?;
            (server, None)
        }
        (Listener::Unix(listener, file), _) => {
            let server = server.listen_uds(name, listener, move || {
                let write_timeout = write_timeout.clone();
                fn_service(move |io: UnixStream| {
                    let stream = Stream::new(io, header_timeout);
                    let stream = stream.with_write_timeout(write_timeout());
                    async move { Ok((stream, Protocol::Http1, None)) }
                })
                .and_then(http1(header_timeout, stopping.clone(), app()))
            })?;
            (server, Some(file))
        }
    };
    Ok((server.run(), socket_file))
}

/// HTTP/1.1 on streams that see what the library does not.
fn http1<T, A, B, F>(
    header_timeout: Duration,
    stopping: impl Fn() -> F + 'static,
    app: A,
) -> impl ServiceFactory<
    (Stream<T>, Protocol, Option<SocketAddr>),
    Config = (),
    Response = (),
    Error = DispatchError,
    InitError = (),
>
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
    A: ServiceFactory<
            Request,
            Config = AppConfig,
            Response = ServiceResponse<B>,
            Error = actix_web::Error,
            InitError = (),
        > + 'static,
    A::Future: 'static,
    <A::Service as Service<Request>>::Future: 'static,
    B: MessageBody + 'static,
    F: Future<Output = ()> + 'static,
{
    let app = app.map_err(HttpResponse::from_error);
    HttpService::build()
        .graceful_shutdown_signal(stopping)
        .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
        .client_request_timeout(header_timeout)
        .client_disconnect_timeout(LINGER)
        // A client that closes its side has gone away, which the stream sees in time; here it is the one way to answer what came before bytes that are
        // no request.
        .h1_allow_half_closed(true)
        .tcp_nodelay(true)
        .on_connect_ext(|stream: &Stream<T>, data: &mut Extensions| {
            data.insert(stream.requests());
        })
        .finish(map_config(app, |()| AppConfig::default()))
}
