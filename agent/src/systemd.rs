//! Messages to systemd (sd_notify(3)).

/// Does nothing without a service manager.
pub fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!("tell systemd: {error}");
    }
}
