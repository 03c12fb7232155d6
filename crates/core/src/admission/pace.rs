//! How fast work ends: the time from one end to the next, averaged.

/// What is assumed before anything was measured, microseconds.
const START_US: u64 = 10_000;
/// Most ends that make one sample. Works that run side by side tend to end together, so that a sample is one end of each
/// of them; more would be learned late.
const SAMPLE_ENDS: u32 = 8;
/// A sample counts one part in so many.
const WEIGHT: u64 = 4;
/// A sample counts as at most so many times what is known: one hour in which the machine slept is not the pace.
const LEAP: u64 = 64;
/// After each such time without being watched, milliseconds, half of what is slow about the pace is forgotten: what was
/// measured in a bad minute says little about the next one.
const FORGET_MS: u64 = 10_000;

/// A running measure of the time between two ends, taken only while it is watched.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    average_us: u64,
    /// When it was watched last.
    last_ms: u64,
    /// Since when it is watched without an end, if it is.
    watched_ms: Option<u64>,
    /// What is not a sample yet: time watched, and ends.
    watched_us: u64,
    ends: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { average_us: START_US, last_ms: 0, watched_ms: None, watched_us: 0, ends: 0 }
    }
}

impl Pace {
    /// Begins or stops to watch. Time between is not counted.
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
                // The first of those that would have ended together says too much rather than too little: where even
                // that is quicker than what is known, it is news.
                if self.ends > 0 && self.watched_us / self.ends < self.average_us {
                    self.sample();
                }
            }
            _ => {}
        }
    }

    /// One of `at_once` works has ended; counts only while watched.
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

    /// Time between two ends, microseconds, at least 1. While `at_once` works run and none ends, it cannot be less than
    /// if all of them ended now.
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
