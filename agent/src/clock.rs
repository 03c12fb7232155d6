//! The two clocks of the agent.
//!
//! Unix time is for people: it is shown, logged and stored. It steps when somebody sets the machine's clock, so nothing
//! is decided by it except how long an address rests, and IPAM begins the rests anew when that clock is set back.
//! Deadlines, backoff and ages are measured with the monotonic clock.

use std::{
    cell::Cell,
    sync::LazyLock,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Monotonic times count from here.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

thread_local! {
    /// How far this thread's Unix time is off the machine's, milliseconds: 0 outside of tests.
    static STEPPED_MS: Cell<i64> = const { Cell::new(0) };
}

/// Milliseconds since the Unix epoch; 0 when the clock stands before it.
#[must_use]
pub fn unix_ms() -> u64 {
    unix_ms_of(SystemTime::now()).saturating_add_signed(STEPPED_MS.get())
}

/// A time as milliseconds since the Unix epoch; 0 for one before it.
#[must_use]
pub fn unix_ms_of(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, millis)
}

/// Milliseconds on a clock that never steps (CLOCK_MONOTONIC), since its first use in this process.
#[must_use]
pub fn monotonic_ms() -> u64 {
    millis(START.elapsed())
}

/// Steps the Unix time of this thread, and no other clock, as when somebody sets the machine's clock. For tests: the
/// machine's own clock is not theirs to set.
pub fn step_unix_time(by_ms: i64) {
    STEPPED_MS.set(STEPPED_MS.get().saturating_add(by_ms));
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
