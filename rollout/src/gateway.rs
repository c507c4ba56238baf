//! What divides the callers between two versions: read the canary's share, set it, and see that it is so.

pub mod haproxy;
pub mod kubernetes;
pub mod nginx;

use anyhow::Context;

use crate::plan::Plan;

/// A gateway.
pub trait Gateway {
    /// Share of the canary in percent; `None` when what runs and what a restart would read do not agree.
    fn percent(&self) -> anyhow::Result<Option<u8>>;
    /// Gives the canary this share in one change, and comes back when that is confirmed.
    fn set(&self, percent: u8) -> anyhow::Result<()>;
    /// What `set` would do, for a person.
    fn describe(&self, percent: u8) -> String;
}

/// The gateway of a plan.
pub fn of(plan: &Plan) -> anyhow::Result<Box<dyn Gateway>> {
    let gateway = &plan.gateway;
    let haproxy = gateway.haproxy.as_ref().map(|settings| {
        Box::new(haproxy::Haproxy {
            socket: plan.path(&settings.socket),
            map: plan.path(&settings.map),
        }) as Box<dyn Gateway>
    });
    let nginx = gateway.nginx.as_ref().map(|settings| {
        Box::new(nginx::Nginx {
            program: settings.program.clone(),
            prefix: plan.path(&settings.prefix),
            config: plan.path(&settings.config),
            split: plan.path(&settings.split),
            pid: plan.path(&settings.pid),
            salt: plan.id.clone(),
        }) as Box<dyn Gateway>
    });
    let kubernetes = gateway.kubernetes.as_ref().map(|settings| {
        Box::new(kubernetes::Route {
            settings: settings.clone(),
        }) as Box<dyn Gateway>
    });
    haproxy
        .or(nginx)
        .or(kubernetes)
        .context("the plan has no gateway")
}
