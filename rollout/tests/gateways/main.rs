//! The drivers before the gateways that they drive: real HAProxy and nginx with the shipped configurations, and kubectl.

mod haproxy;
mod kubernetes;
mod nginx;
mod world;
