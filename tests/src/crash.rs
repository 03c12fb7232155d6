//! Killing Wharf between two side effects.
//!
//! The binaries `wharf-agent-crash`, `wharf-cni-crash` and `wharf-crash` have crash points. They append each point that
//! they pass to the node's trace, and kill themselves at the point that the node's wish names. Agent and plugin share
//! both files.

use std::{ffi::OsString, fs, io::ErrorKind, path::PathBuf};

use anyhow::{Context, Result, ensure};

use crate::agent::Dirs;

/// Where passed points are written, a line each.
#[must_use]
pub fn trace_file(dirs: &Dirs) -> PathBuf {
    dirs.root.join("crash-trace")
}

/// Where the point to die at is read.
#[must_use]
pub fn wish_file(dirs: &Dirs) -> PathBuf {
    dirs.root.join("crash-wish")
}

/// The variables that a binary with crash points reads.
#[must_use]
pub fn environment(dirs: &Dirs) -> [(&'static str, OsString); 3] {
    [
        ("WHARF_CRASH_FILE", wish_file(dirs).into()),
        ("WHARF_CRASH_TRACE", trace_file(dirs).into()),
        ("WHARF_HOLD_FILE", hold_file(dirs).into()),
    ]
}

/// Where the points to wait at are read.
#[must_use]
pub fn hold_file(dirs: &Dirs) -> PathBuf {
    dirs.root.join("crash-hold")
}

/// Whoever comes to one of these points waits there, and blocks its thread, until [`release`].
///
/// # Errors
/// When the wish cannot be written.
pub fn hold(dirs: &Dirs, points: &[&str]) -> Result<()> {
    let new = dirs.root.join("crash-hold-new");
    fs::write(&new, points.join("\n")).context("write the points to wait at")?;
    fs::rename(&new, hold_file(dirs)).context("put the points to wait at in place")
}

/// Nobody waits any more.
///
/// # Errors
/// When the wish cannot be removed.
pub fn release(dirs: &Dirs) -> Result<()> {
    gone_or(fs::remove_file(hold_file(dirs))).context("remove the points to wait at")
}

/// Whoever comes to this point (`NAME`, or `NAME:N` for the Nth time from now) dies there.
///
/// # Errors
/// When the wish cannot be written.
pub fn wish(dirs: &Dirs, point: &str) -> Result<()> {
    // By a rename: a reader sees all of it or nothing.
    let new = dirs.root.join("crash-wish-new");
    fs::write(&new, point).context("write the wish")?;
    fs::rename(&new, wish_file(dirs)).context("put the wish in place")
}

/// Nobody dies any more.
///
/// # Errors
/// When the wish cannot be removed.
pub fn forget_wish(dirs: &Dirs) -> Result<()> {
    gone_or(fs::remove_file(wish_file(dirs))).context("remove the wish")
}

/// Points passed since [`forget_trace`], in order.
///
/// # Errors
/// When the trace cannot be read.
pub fn trace(dirs: &Dirs) -> Result<Vec<String>> {
    let text = match fs::read_to_string(trace_file(dirs)) {
        Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
        other => other.context("read the trace")?,
    };
    Ok(text.lines().map(str::to_owned).collect())
}

/// Of an operation's points those that this run kills at: all, or the share that `WHARF_CRASH_SHARE=K/N` names, `K`
/// from 0 below `N`. The `N` shares together are all points, and a point's share does not depend on the other points.
///
/// # Errors
/// When the variable is not of this form.
pub fn share(points: Vec<String>) -> Result<Vec<String>> {
    const VARIABLE: &str = "WHARF_CRASH_SHARE";
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(points) };
    let parsed = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let (own, of): (usize, usize) = parsed.with_context(|| format!("{VARIABLE}={text}: not of the form K/N"))?;
    ensure!(own < of, "{VARIABLE}={text}: K is to be below N");
    let is_ours = |point: &String| point.bytes().map(usize::from).sum::<usize>() % of == own;
    Ok(points.into_iter().filter(is_ours).collect())
}

/// Forgets the points passed so far.
///
/// # Errors
/// When the trace cannot be removed.
pub fn forget_trace(dirs: &Dirs) -> Result<()> {
    gone_or(fs::remove_file(trace_file(dirs))).context("remove the trace")
}

fn gone_or(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
