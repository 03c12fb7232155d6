//! Average time between the ends of two operations.

/// Before the first measurement, microseconds.
const START_US: u64 = 10_000;
/// Most ends in one sample: parallel operations tend to end together. Larger samples delay the average.
const SAMPLE_ENDS: u32 = 8;
/// A sample weighs `1/WEIGHT`.
const WEIGHT: u64 = 4;
/// Caps a sample, in averages: an hour of suspend has little effect.
const LEAP: u64 = 64;
/// Half-life of a slow average while not measured, milliseconds.
const FORGET_MS: u64 = 10_000;

/// Average time between ends, measured only while watched.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    average_us: u64,
    last_ms: u64,
    /// Start of the watch, or its last end.
    watched_ms: Option<u64>,
    /// Not yet in a sample.
    watched_us: u64,
    ends: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { average_us: START_US, last_ms: 0, watched_ms: None, watched_us: 0, ends: 0 }
    }
}

impl Pace {
    pub(super) fn watch(&mut self, wanted: bool, now_ms: u64) {
        match (self.watched_ms, wanted) {
            (None, true) => {
                self.average_us = self.known_us(now_ms);
                self.watched_ms = Some(now_ms);
            }
            (Some(since_ms), false) => {
                self.watched_us = self.watched_us.saturating_add(micros(since_ms, now_ms));
                self.watched_ms = None;
                self.last_ms = now_ms;
                // An incomplete sample overestimates: take it only below the average.
                if self.ends > 0 && self.watched_us / self.ends < self.average_us {
                    self.sample();
                }
            }
            _ => {}
        }
    }

    pub(super) fn on_end(&mut self, now_ms: u64, at_once: u32) {
        let Some(since_ms) = self.watched_ms else { return };
        self.watched_us = self.watched_us.saturating_add(micros(since_ms, now_ms));
        self.watched_ms = Some(now_ms);
        self.ends += 1;
        if self.ends >= u64::from(at_once.clamp(1, SAMPLE_ENDS)) {
            self.sample();
        }
    }

    fn sample(&mut self) {
        let sample_us = (self.watched_us / self.ends.max(1)).min(self.average_us.saturating_mul(LEAP));
        self.average_us = (self.average_us.saturating_mul(WEIGHT - 1).saturating_add(sample_us) / WEIGHT).max(1);
        (self.watched_us, self.ends) = (0, 0);
    }

    /// Microseconds between two ends, at least 1 and, while `at_once` operations run without an end, the elapsed time
    /// divided by `at_once`.
    pub(super) fn cost_us(&self, now_ms: u64, at_once: u32) -> u64 {
        let stalled_us = self.watched_ms.map_or(0, |since_ms| micros(since_ms, now_ms)) / u64::from(at_once.max(1));
        self.known_us(now_ms).max(stalled_us).max(1)
    }

    fn known_us(&self, now_ms: u64) -> u64 {
        if self.watched_ms.is_some() {
            return self.average_us;
        }
        let halvings = u32::try_from(now_ms.saturating_sub(self.last_ms) / FORGET_MS).unwrap_or(u32::MAX);
        let slow_us = self.average_us.saturating_sub(START_US);
        self.average_us - slow_us + slow_us.checked_shr(halvings).unwrap_or(0)
    }
}

fn micros(from_ms: u64, to_ms: u64) -> u64 {
    to_ms.saturating_sub(from_ms).saturating_mul(1_000)
}
