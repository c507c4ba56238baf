//! The commands that prove a service, against services with and without faults.

mod all;
mod baseline;
mod boundary;
mod lossless;
mod perf;
mod service;
mod soak;
mod tls;

use std::process::{Command, Output};

use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::service::Service;
use service::Fake;

/// A connection to a service.
fn connect(fake: &Fake) -> Service {
    let client = Client::new(&fake.endpoint(), ClientOptions::default()).unwrap();
    Service::connect(client, None).unwrap()
}

/// Runs the program.
fn verify(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider-verify"))
        .args(arguments)
        .output()
        .unwrap()
}
