//! The HTTP interface on real sockets, with a fake model behind it.

mod fake;
mod server;

mod admin;
mod answers;
mod audit;
mod authentication;
mod connections;
mod cross_origin;
mod fields;
mod limits;
mod tls;
mod transport;
