//! Delays between attempts.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

const FIRST: Duration = Duration::from_millis(200);
/// Without jitter, which at most doubles a delay.
const LAST: Duration = Duration::from_secs(15);

/// Exponential delays with jitter.
#[derive(Debug)]
pub struct Delays {
    builder: ExponentialBuilder,
    delays: ExponentialBackoff,
}

impl Default for Delays {
    /// For requests to the API.
    fn default() -> Self {
        Self::up_to(LAST)
    }
}

impl Delays {
    /// From 200 ms to `last`, at most doubled by jitter.
    #[must_use]
    pub fn up_to(last: Duration) -> Self {
        let builder = ExponentialBuilder::new().with_jitter().with_min_delay(FIRST).with_max_delay(last);
        let builder = builder.without_max_times();
        Self { builder, delays: builder.build() }
    }

    /// The next delay, longer than the `asked` one.
    pub fn next(&mut self, asked: Option<Duration>) -> Duration {
        let delay = self.delays.next().unwrap_or(LAST);
        // Jitter also spreads clients with equal `asked` delays.
        asked.map_or(delay, |asked| asked + delay)
    }

    /// Restarts at the first delay.
    pub fn reset(&mut self) {
        self.delays = self.builder.build();
    }
}

/// `duration` times a random factor from 1 to 1.5.
#[must_use]
pub fn spread(duration: Duration) -> Duration {
    duration.mul_f64(rand::random_range(1.0..1.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_and_respect_the_server() {
        let mut delays = Delays::default();
        let all: Vec<Duration> = (0..20).map(|_| delays.next(None)).collect();
        assert!(all.iter().all(|delay| *delay >= FIRST && *delay <= LAST * 2), "{all:?}");
        assert!(all.iter().skip(10).all(|delay| *delay >= LAST), "{all:?}");
        assert!(delays.next(Some(Duration::from_secs(60))) >= Duration::from_secs(75));
        delays.reset();
        assert!(delays.next(None) < FIRST * 2);
    }

    #[test]
    fn two_processes_do_not_wait_alike() {
        let several = || (0..8).map(|_| Delays::default().next(None)).collect::<Vec<_>>();
        assert_ne!(several(), several());
        assert!((0..100).map(|_| spread(LAST)).all(|delay| delay >= LAST && delay <= LAST * 3 / 2));
    }
}
