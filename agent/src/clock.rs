//! Wall-clock time, for people. All that is decided by it is how long an address rests: a clock that jumps makes a rest
//! longer or shorter, and the checks at its end are made all the same.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch; 0 when the clock stands before it.
#[must_use]
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
