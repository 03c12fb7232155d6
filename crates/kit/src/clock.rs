//! The agent's clocks.
//!
//! Unix time may be set: it is only shown, logged and stored, and used for an address's rest, which IPAM restarts when
//! it is set back. The monotonic clock measures deadlines, backoff and ages, the boot clock times that outlive the
//! agent.

use std::{
    cell::Cell,
    fs, io,
    sync::LazyLock,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::time::{ClockId, clock_gettime};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

thread_local! {
    /// Offset of Unix time, milliseconds; 0 outside of tests.
    static STEPPED_MS: Cell<i64> = const { Cell::new(0) };
}

/// Milliseconds since the Unix epoch.
#[must_use]
pub fn unix_ms() -> u64 {
    unix_ms_of(SystemTime::now()).saturating_add_signed(STEPPED_MS.get())
}

/// A time's milliseconds since the Unix epoch; 0 before it.
#[must_use]
pub fn unix_ms_of(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, millis)
}

/// Milliseconds on CLOCK_MONOTONIC since its first use here.
#[must_use]
pub fn monotonic_ms() -> u64 {
    millis(START.elapsed())
}

/// Milliseconds since the boot (CLOCK_BOOTTIME).
#[must_use]
pub fn boot_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| millis(time.into()))
}

/// The boot's id (random(4), /proc/sys/kernel/random/boot_id).
///
/// # Errors
/// Unreadable file.
pub fn boot_id() -> io::Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).map_err(|why| io::Error::new(why.kind(), format!("read {path}: {why}")))?;
    Ok(id.trim().to_owned())
}

/// For tests; steps this thread's Unix time.
pub fn step_unix_time(by_ms: i64) {
    STEPPED_MS.set(STEPPED_MS.get().saturating_add(by_ms));
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
