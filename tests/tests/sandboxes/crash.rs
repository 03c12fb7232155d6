//! The tool is killed between every two of its side effects; a remove then leaves nothing.
//!
//! Which points there are is learned from a run with a trace, so that the list cannot fall behind the code.

use std::{collections::BTreeMap, fs, os::unix::process::ExitStatusExt as _};

use anyhow::{Context, Result, ensure};
use wharf_tests::{Node, wait};

use crate::scene::{BACK, FRONT, Scene, with_sandboxes};

const CREATE: [&str; 6] = ["create", "web", "--network", FRONT, "--network", BACK];

/// The points that a command passes that ends with this exit status, each as `NAME:N`.
fn points(node: &Node, s: &Scene, arguments: &[&str], code: i32) -> Result<Vec<String>> {
    let file = node.dirs().root.join("trace");
    let done = s.armed(node, arguments, "WHARF_CRASH_TRACE", &file.display().to_string())?;
    ensure!(done.code() == code, "wanted {code}: {}", done.describe());
    let text = fs::read_to_string(&file).context("read the trace")?;
    fs::remove_file(&file)?;
    let mut passed = BTreeMap::new();
    let numbered = text.lines().map(|name| {
        let n: &mut u32 = passed.entry(name.to_owned()).or_default();
        *n += 1;
        format!("{name}:{n}")
    });
    Ok(numbered.collect())
}

fn die_at(node: &Node, s: &Scene, arguments: &[&str], point: &str) -> Result<()> {
    let done = s.armed(node, arguments, "WHARF_CRASH_POINT", point)?;
    ensure!(done.status.signal() == Some(9), "it was to die at {point}: {}", done.describe());
    Ok(())
}

/// Nothing of a sandbox is there: no file, no name, no endpoint, no lease.
fn nothing_left(node: &Node, s: &Scene) -> Result<()> {
    let left = s.left()?;
    ensure!(left.is_empty(), "{left:?}");
    wait::until_equal("what is left in the node", &Vec::<String>::new(), || node.left_behind())
}

/// Kills the command at each of its points; `before` comes before it, and `after` must mend what it leaves.
fn each_point(before: &[&[&str]], (killed, code): (&[&str], i32), least: usize, after: &[&[&str]]) -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("refuses", "[ \"$CNI_COMMAND\" = ADD ] && exit 1")?;
        s.network(node, "30-chain.conflist", "chain", &["refuses"])?;
        let prepare = || before.iter().try_for_each(|arguments| s.ok(node, arguments).map(drop));
        prepare()?;
        let points = points(node, s, killed, code)?;
        s.ok(node, &["rm", "web"])?;
        ensure!(points.len() >= least, "only {} points: {points:?}", points.len());
        for point in &points {
            prepare()?;
            die_at(node, s, killed, point)?;
            s.ok(node, &["list"]).with_context(|| format!("after a death at {point}"))?;
            for arguments in after {
                s.ok(node, arguments).with_context(|| format!("after a death at {point}"))?;
            }
            nothing_left(node, s).with_context(|| format!("after a death at {point}"))?;
        }
        Ok(())
    })
}

#[test]
fn a_create_that_dies_is_removed_without_a_trace() -> Result<()> {
    each_point(&[], (&CREATE, 0), 14, &[&["rm", "web"]])
}

#[test]
fn a_start_that_dies_is_stopped_or_removed() -> Result<()> {
    each_point(&[&CREATE, &["stop", "web"]], (&["start", "web"], 0), 9, &[&["stop", "web"], &["rm", "web"]])
}

#[test]
fn a_stop_that_dies_is_resumed() -> Result<()> {
    each_point(&[&CREATE], (&["stop", "web"], 0), 12, &[&["stop", "web"], &["rm", "web"]])
}

#[test]
fn a_remove_that_dies_is_resumed() -> Result<()> {
    each_point(&[&CREATE], (&["rm", "web"], 0), 15, &[&["rm", "web"]])
}

#[test]
fn an_undo_that_dies_is_resumed() -> Result<()> {
    let create = ["create", "web", "--network", FRONT, "--network", "chain"];
    each_point(&[], (&create, 1), 25, &[&["rm", "web"]])
}
