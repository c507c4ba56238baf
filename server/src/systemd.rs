//! What is told to systemd, in the protocol of sd_notify(3). Without `NOTIFY_SOCKET` in the environment nothing is.

use std::time::Duration;

use sd_notify::NotifyState;

/// Tells systemd; that it can't be told is logged and changes nothing else.
pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd cannot be told how the server is");
    }
}

/// Tells systemd that the configuration is being read again; [`NotifyState::Ready`] must follow.
pub fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "systemd cannot be told about the reload"),
    }
}

/// How often to send [`NotifyState::Watchdog`]: twice in the time that the unit allows, when it does.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}
