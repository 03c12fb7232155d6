//! Waiting with a deadline, for what the kernel does in its own time.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How long a scenario waits for something that takes milliseconds on an idle machine; a busy one may need seconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Asks until the answer is `Some`, at most [`PATIENCE`] long. The pause between two questions keeps the processor free
/// for what is waited for; nothing depends on its length.
///
/// # Errors
/// The deadline passed (with the last words of `what`), or `ask` failed.
pub fn until<T>(what: &str, ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(PATIENCE, what, ask)
}

/// As [`until`], at most `limit` long: for what takes long on an idle machine, too.
///
/// # Errors
/// As [`until`].
pub fn until_within<T>(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() >= end {
            bail!("waited {limit:?} in vain for {what}");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Probes all of them at the same time, because most probes that must fail wait for their timeout.
///
/// # Errors
/// One of the failed probes.
pub fn all<T: Send>(of: impl IntoIterator<Item = T>, probe: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let probe = &probe;
        let probes: Vec<_> = of.into_iter().map(|one| scope.spawn(move || probe(one))).collect();
        let ended = probes.into_iter().map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.fold(Ok(()), Result::and)
    })
}

/// Waits until `observe` gives `expected`.
///
/// # Errors
/// The deadline passed; the message names the last value seen.
pub fn until_equal<T: PartialEq + std::fmt::Debug>(
    what: &str,
    expected: &T,
    mut observe: impl FnMut() -> Result<T>,
) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let seen = observe()?;
        if seen == *expected {
            return Ok(());
        }
        if Instant::now() >= end {
            bail!("{what}: expected {expected:?}, after {PATIENCE:?} still {seen:?}");
        }
        thread::sleep(Duration::from_millis(2));
    }
}
