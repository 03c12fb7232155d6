//! The benchmark itself: its smoke run measures every part and writes every file. What it measures is not judged here.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_tests::{
    bench::PARTS,
    process::{bin_dir, run},
    wait,
};

/// Twice what the smoke run may take on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

fn texts<'a>(findings: &'a Value, list: &str, key: &'a str) -> Vec<&'a str> {
    let items = findings.get(list).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    items.iter().filter_map(|item| item.get(key)?.as_str()).collect()
}

/// Runs these parts; they are to make these groups, among others, and this many marks.
fn smoke(parts: &[&str], titles: &[&str], marks_expected: usize) -> Result<()> {
    let out = tempfile::tempdir()?;
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_wharf-bench"));
    command.args(parts.iter().flat_map(|part| ["--only", part]));
    command.args(["--quick", "--out"]).arg(out.path()).env("WHARF_BIN_DIR", bin_dir());
    let finished = run(command, b"", LIMIT)?;
    let printed = finished.ok()?;

    let read = |name: &str| fs::read_to_string(out.path().join(name)).with_context(|| name.to_owned());
    let findings: Value = serde_json::from_str(&read("bench.json")?)?;
    let groups = texts(&findings, "groups", "title");
    for title in titles {
        ensure!(groups.contains(title), "{title} was not measured: {groups:?}");
    }
    ensure!(groups.iter().collect::<BTreeSet<_>>().len() == groups.len(), "a title stands twice: {groups:?}");
    let text = read("bench.txt")?;
    let svg = read("bench.svg")?;
    for title in &groups {
        ensure!(printed.contains(title) && text.contains(title), "{title} was not printed");
    }
    ensure!(svg.matches("font-size=\"14\"").count() == groups.len(), "not every group was drawn");
    let marks = texts(&findings, "marks", "target");
    ensure!(marks.len() == marks_expected, "marks: {marks:?}");
    for mark in marks {
        ensure!(printed.contains(mark), "the mark `{mark}` was not printed");
    }
    Ok(())
}

const POLICY: &str = "policy";
const L7: &str = "l7";
const FEED: &str = "feed";
const KUBE: &str = "kube";

/// About packets; [`POLICY`], [`L7`], [`FEED`] and [`KUBE`] are too. All others are about endpoints.
const PACKETS: [&str; 4] = ["traffic", "nodes", "programs", "flows"];

#[test]
fn the_smoke_run_measures_packets() -> Result<()> {
    let titles = [
        "TCP bulk between nodes, each end on a CPU of its own",
        "DEL beside flows",
        "connections while flows are collected",
        "one packet in the programs",
    ];
    smoke(&PACKETS, &titles, 19)
}

#[test]
fn the_smoke_run_measures_endpoints() -> Result<()> {
    let parts = PARTS.into_iter().filter(|part| ![POLICY, L7, FEED, KUBE].contains(part) && !PACKETS.contains(part));
    let titles = [
        "ADD, one at a time",
        "DEL, one at a time",
        "until a new address of the node is in IPCACHE",
        "CHECK in the agent, one at a time",
        "CHECKs of all endpoints at once",
        "ADD with masquerading and ports",
        "start of a pod, one at a time",
        "stop of pods, 8 at once",
        "memory of the agent",
    ];
    smoke(&parts.collect::<Vec<_>>(), &titles, 20)
}

#[test]
fn the_smoke_run_measures_policy() -> Result<()> {
    let titles = [
        "policy: TCP request/response, 1 byte",
        "policy: the first packet of a flow in the programs",
        "policy: networks of one policy, until they are in force",
        "policy: rows that an added rule writes",
    ];
    smoke(&[POLICY], &titles, 13)
}

#[test]
fn the_smoke_run_measures_rules_about_requests() -> Result<()> {
    let titles = [
        "l7: requests, 16 connections that stay open",
        "l7: TCP request/response, 1 byte, on a port without requests",
        "l7: a DEL's wait for the proxy",
        "l7: DEL of 20 with redirects, 16 at once",
        "l7: DEL while the proxy is stopped",
    ];
    smoke(&[L7], &titles, 6)
}

#[test]
fn the_smoke_run_measures_the_cluster_feed() -> Result<()> {
    let titles = [
        "feed: a snapshot, until all rows are in force",
        "feed: memory of the agent",
        "feed: a pod with other labels, until it is in force",
        "feed: ADD, one at a time",
        "feed: TCP request/response, 1 byte, under policy",
        "feed: the agent beside 1,000 pod changes a second",
        "feed: restart with these rows, after SIGKILL",
    ];
    smoke(&[FEED], &titles, 8)
}

#[test]
fn the_smoke_run_measures_wharf_kube() -> Result<()> {
    let titles = [
        "kube: 40 nodes and 400 pods, from the start of wharf-kube until all rows are in force",
        "kube: memory of wharf-kube",
        "kube: processor time beside 100 pod changes a second",
        "kube: from the arrival of a changed pod until it is in force",
    ];
    smoke(&[KUBE], &titles, 5)
}

#[test]
fn a_part_that_does_not_exist_is_refused() -> Result<()> {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_wharf-bench"));
    command.args(["--only", "everything"]);
    let finished = run(command, b"", wait::PATIENCE)?;
    ensure!(finished.code() == 2 && finished.stderr.contains("traffic"), "{}", finished.describe());
    ensure!(!Path::new("everything").exists(), "it wrote something");
    Ok(())
}
