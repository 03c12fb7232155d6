//! What the agent costs while nothing happens: its audits and self-checks.

use std::{thread, time::Duration};

use anyhow::{Context, Result};
use nix::{
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};

use crate::Node;

/// Audits of which each sample is the processor time.
const AUDITS: usize = 5;

/// Processor time that the agent has used so far, all its threads together.
pub(super) fn used(node: &Node) -> Result<Duration> {
    used_by(node.agent_pid()?)
}

/// As [`used`], of another process.
pub(super) fn used_by(pid: u32) -> Result<Duration> {
    let pid = i32::try_from(pid).context("a process id")?;
    let clock = clock_getcpuclockid(Pid::from_raw(pid)).context("the process' clock")?;
    Ok(Duration::from(clock_gettime(clock).context("read the process' clock")?))
}

/// Processor time of a whole audit, milliseconds, a sample for each of some audits. Work of others on the machine does
/// not count, unlike in the time until the answer.
pub(super) fn audits(node: &Node) -> Result<Vec<f64>> {
    (0..AUDITS)
        .map(|_| {
            let before = used(node)?;
            node.ask(async |client| client.audit(false).await)?;
            Ok(used(node)?.saturating_sub(before).as_secs_f64() * 1_000.0)
        })
        .collect()
}

/// Share of one processor that the agent uses while nobody asks it anything, percent.
pub(super) fn share(node: &Node, window: Duration) -> Result<f64> {
    let before = used(node)?;
    thread::sleep(window);
    Ok(used(node)?.saturating_sub(before).as_secs_f64() / window.as_secs_f64() * 100.0)
}
