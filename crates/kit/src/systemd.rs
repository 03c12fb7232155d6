//! Messages to systemd (sd_notify(3)).

use sd_notify::NotifyState;

const TARGET: &str = "wharf_agent::systemd";
/// For a stop and the start after it, microseconds: nothing feeds the watchdog meanwhile.
const RESTART_USEC: u32 = 120_000_000;

/// No-op without service manager.
pub fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(target: TARGET, "tell systemd: {error}");
    }
}

/// The agent serves.
pub fn ready() {
    let mut state = vec![NotifyState::Ready];
    // Ends the interval of [`restarting`].
    let interval = sd_notify::watchdog_enabled();
    state.extend(interval.map(|i| NotifyState::WatchdogUsec(u32::try_from(i.as_micros()).unwrap_or(u32::MAX))));
    notify(&state);
}

/// The process executes the agent again, which calls [`ready`]. Not STOPPING=1: systemd would end the process.
pub fn restarting() {
    let mut state = vec![NotifyState::Reloading];
    match NotifyState::monotonic_usec_now() {
        Ok(now) => state.push(now),
        Err(error) => tracing::warn!(target: TARGET, "read the monotonic clock for systemd: {error}"),
    }
    state.extend(sd_notify::watchdog_enabled().map(|_| NotifyState::WatchdogUsec(RESTART_USEC)));
    notify(&state);
}
