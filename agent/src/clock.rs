//! The clocks of the agent.
//!
//! Unix time is for people: it is shown, logged and stored. It steps when somebody sets the machine's clock, so nothing
//! is decided by it except how long an address rests, and IPAM begins the rests anew when that clock is set back.
//! Deadlines, backoff and ages are measured with the monotonic clock, and what outlives the agent, but not the boot, with the boot's.

use std::{
    cell::Cell,
    fs, io,
    sync::LazyLock,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::time::{ClockId, clock_gettime};

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

/// Milliseconds since the boot, on a clock that never steps (CLOCK_BOOTTIME); every Linux has it.
#[must_use]
pub fn boot_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| millis(time.into()))
}

/// Identifies the boot (random(4), /proc/sys/kernel/random/boot_id).
///
/// # Errors
/// The file cannot be read.
pub fn boot_id() -> io::Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).map_err(|why| io::Error::new(why.kind(), format!("read {path}: {why}")))?;
    Ok(id.trim().to_owned())
}

/// Steps the Unix time of this thread, and no other clock, as when somebody sets the machine's clock. For tests: the
/// machine's own clock is not theirs to set.
pub fn step_unix_time(by_ms: i64) {
    STEPPED_MS.set(STEPPED_MS.get().saturating_add(by_ms));
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
