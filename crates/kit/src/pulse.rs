//! Heartbeats as plain atomics, readable when a part is stuck.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use crate::socket::Reach;

/// Interval of heartbeats.
pub const BEAT: Duration = Duration::from_millis(250);

/// A part's last heartbeat.
#[derive(Debug)]
pub struct Pulse {
    born: Instant,
    /// Milliseconds since `born`, plus one; 0: none.
    last: AtomicU64,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { born: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl Pulse {
    /// Records a beat.
    pub fn beat(&self) {
        let ms = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(ms.saturating_add(1), Ordering::Release);
    }

    /// `None` before the first beat.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.born.elapsed().saturating_sub(Duration::from_millis(last)))
    }

    /// Beats while the runtime runs tasks.
    pub async fn keep(&self) {
        loop {
            self.beat();
            tokio::time::sleep(BEAT).await;
        }
    }
}

/// Parts that the agent needs.
#[derive(Debug, Default)]
pub struct Pulses {
    /// The main runtime.
    pub runtime: Pulse,
    /// API accepts, or waits for a place.
    pub api: Pulse,
    /// The API's socket file.
    pub api_socket: Reach,
    /// The admin socket's file.
    pub admin_socket: Reach,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_age_before_the_first_beat() {
        let pulse = Pulse::default();
        assert_eq!(pulse.age(), None);
        pulse.beat();
        assert!(pulse.age().is_some());
    }
}
