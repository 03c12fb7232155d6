//! The pace of work: the average time between the ends of two operations.

/// Assumed time before the first measurement, microseconds.
const START_US: u64 = 10_000;
/// Largest number of ends in one sample. Parallel operations tend to end together, so a sample takes one end of each.
/// Larger samples would delay the average.
const SAMPLE_ENDS: u32 = 8;
/// Weight of a sample in the average: one part in this many.
const WEIGHT: u64 = 4;
/// A sample counts as at most this many times the average, so that an hour of suspend does not become the pace.
const LEAP: u64 = 64;
/// Half-life of a slow average while the pace is not measured, milliseconds: a slow minute says little about the next
/// one.
const FORGET_MS: u64 = 10_000;

/// A running average of the time between two ends, measured only while it is watched.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    average_us: u64,
    /// End of the last watch.
    last_ms: u64,
    /// Start of the current watch, or the last end in it; none while not watched.
    watched_ms: Option<u64>,
    /// Watched time and, in `ends`, ends that are not in a sample yet.
    watched_us: u64,
    ends: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { average_us: START_US, last_ms: 0, watched_ms: None, watched_us: 0, ends: 0 }
    }
}

impl Pace {
    /// Starts or stops the watch. Unwatched time is not counted.
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
                // An incomplete sample overestimates the time. If even this estimate is below the average, take the
                // sample.
                if self.ends > 0 && self.watched_us / self.ends < self.average_us {
                    self.sample();
                }
            }
            _ => {}
        }
    }

    /// One of `at_once` parallel operations has ended. Counted only while watched.
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

    /// Time between two ends, microseconds, at least 1. While `at_once` operations run and none ends, the time is at
    /// least the elapsed time divided by `at_once`.
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
