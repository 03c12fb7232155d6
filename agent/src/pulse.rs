//! Signs of life: who beats, and how long ago it did. Plain atomics, so that they can be read whatever is stuck.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use crate::socket::Reach;

/// How often what lives beats.
pub const BEAT: Duration = Duration::from_millis(250);

/// The last beat of something.
#[derive(Debug)]
pub struct Pulse {
    born: Instant,
    /// Milliseconds after `born` of the last beat, plus one; 0 before the first.
    last: AtomicU64,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { born: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl Pulse {
    /// It lives.
    pub fn beat(&self) {
        let ms = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(ms.saturating_add(1), Ordering::Release);
    }

    /// How long ago it beat last; none before the first beat.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.born.elapsed().saturating_sub(Duration::from_millis(last)))
    }

    /// Beats for as long as the runtime that it is awaited on lets it.
    pub async fn keep(&self) {
        loop {
            self.beat();
            tokio::time::sleep(BEAT).await;
        }
    }
}

/// What the agent cannot be without.
#[derive(Debug, Default)]
pub struct Pulses {
    /// The main runtime: a task of it is run.
    pub runtime: Pulse,
    /// The API's listener: it takes connections, or waits for a place for one.
    pub api: Pulse,
    /// The name of the API's socket.
    pub api_socket: Reach,
    /// The name of the admin thread's socket.
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
