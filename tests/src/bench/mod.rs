//! What Wharf costs, side by side with what people use today. `cargo xtask bench` runs it.
//!
//! Everything that is compared is measured in the same run, in rounds that take turns, so that a machine that is busy
//! for a while is busy for all of them. Nothing here fails because a number is bad: the marks say what is wanted and
//! what was seen.
//!
//! | part | what |
//! |---|---|
//! | [`traffic`] | request/response and bulk between two containers, over [`wires`] |
//! | [`nodes`] | the same between two nodes, by routes and by the overlay |
//! | [`programs`] | nanoseconds a packet in the programs |
//! | [`churn`] | ADD and DEL through the CNI binaries of each [`plugin`] |
//! | [`pods`] | start and stop of pods by containerd |
//! | [`times`] | a new address of the node until policy knows it; CHECK, one at a time and of many endpoints at once |
//! | [`nat`] | ADD with masquerading and published ports, the first packet to one of many ports |
//! | [`flows`] | DEL beside half a million flows; a million connections while flows are collected |
//! | [`scale`] | a thousand endpoints: time, memory, and what the agent does at rest |
//! | [`policy`] | traffic and packets with rules and without; added rules, new endpoints, many networks |
//! | [`l7`] | rules about requests: deletes that wait for the proxy, requests through it, flows beside them |
//! | [`feed`] | the cluster feed with many rows: time, memory, a changed pod, traffic during changes, restarts |
//! | [`kube`] | `wharf-kube` with a large cluster: time, memory, changes of pods, a restart |

pub mod churn;
pub mod ends;
pub mod feed;
pub mod findings;
pub mod flows;
pub mod kube;
pub mod l7;
pub mod machine;
pub mod nat;
pub mod nodes;
pub mod phases;
pub mod plot;
pub mod plugin;
pub mod pods;
pub mod policy;
pub mod programs;
mod rest;
pub mod scale;
pub mod stats;
pub mod table;
pub mod times;
pub mod traffic;
pub mod wires;

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use self::{
    findings::{Findings, Part},
    machine::Machine,
};
use crate::NodeConfig;

/// What is to be measured. `None` for a number of rounds: the part's own.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A smoke run, under two minutes.
    pub quick: bool,
    /// Parts to run, by name; all when empty.
    pub only: Vec<String>,
    /// Rounds of every part.
    pub rounds: Option<usize>,
    /// Flags for the agent, which else runs as it does by default.
    pub agent_flags: Vec<String>,
}

/// Names of the parts, in the order they run. Those that leave the kernel work to do after them come last.
pub const PARTS: [&str; 14] = [
    "traffic", "nodes", "programs", "one", "times", "nat", "flows", "many", "pods", "scale", "policy", "l7", "feed",
    "kube",
];

impl Options {
    fn rounds(&self, quick: usize, full: usize) -> usize {
        self.rounds.unwrap_or(if self.quick { quick } else { full }).max(1)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| o == part)
    }
}

/// Measures. `told` hears of each part before it runs.
///
/// # Errors
/// When a part cannot be measured; a bad number is no error.
pub fn measure(options: &Options, mut told: impl FnMut(&str)) -> Result<Findings> {
    let start = Instant::now();
    let mut findings = Findings::new(Machine::look()?, options.quick);
    findings.agent_flags.clone_from(&options.agent_flags);
    for part in PARTS.into_iter().filter(|part| options.wants(part)) {
        told(part);
        findings.extend(one(part, options).with_context(|| format!("measure {part}"))?);
    }
    findings.seconds = start.elapsed().as_secs_f64();
    Ok(findings)
}

fn one(part: &str, options: &Options) -> Result<Part> {
    let quick = options.quick;
    // What is measured is what was asked for, and nothing beside it.
    let name = ["--node-name", "bench", "--health-interval-ms", "0"].map(str::to_owned);
    let agent = &NodeConfig { flags: [&name[..], &options.agent_flags].concat(), toml: None };
    match part {
        "traffic" => {
            traffic::measure(agent, options.rounds(3, 20), Duration::from_millis(if quick { 50 } else { 300 }))
        }
        "nodes" => nodes::measure(options.rounds(3, 20), Duration::from_millis(if quick { 50 } else { 300 })),
        "programs" => programs::measure(agent, options.rounds(3, 9), quick),
        "one" => churn::one_at_a_time(agent, options.rounds(3, 100)),
        "times" => times::measure(agent, options.rounds(10, 50).min(250), if quick { 10 } else { 100 }),
        "nat" => nat::measure(agent, options.rounds(3, 50), if quick { 50 } else { 2_000 }),
        "flows" => flows::measure(agent, options.rounds(3, 50), if quick { 2_000 } else { 1_000_000 }),
        "many" => churn::many_at_once(agent, options.rounds(1, 10), options.rounds(1, 3), if quick { 2 } else { 8 }),
        "pods" => {
            let (at_once, waves) = if quick { (8, 1) } else { (50, options.rounds(1, 5)) };
            pods::measure(agent, options.rounds(3, 30), at_once, waves)
        }
        "scale" => {
            let (endpoints, rest) = if quick { (80, 2) } else { (1_000, 65) };
            scale::measure(agent, endpoints, Duration::from_secs(rest))
        }
        "policy" => policy::measure(agent, &policy::Extent::of(quick, options.rounds(3, 20), options.rounds(3, 50))),
        "l7" => l7::measure(agent, &l7::Extent::of(quick, options.rounds(3, 100), options.rounds(2, 20))),
        "feed" => feed::measure(agent, feed::Extent::of(quick, options.rounds(2, 10))),
        "kube" => kube::measure(agent, kube::Extent::of(quick)),
        other => anyhow::bail!("there is no part {other}; there are {}", PARTS.join(", ")),
    }
}

/// Writes `bench.json`, `bench.svg` and `bench.txt`; the directory is made when it is not there.
///
/// # Errors
/// When a file cannot be written.
pub fn save(findings: &Findings, directory: &Path) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let json = serde_json::to_string_pretty(findings).context("write the findings as JSON")?;
    let files = [("bench.json", json), ("bench.svg", plot::render(findings)), ("bench.txt", table::render(findings))];
    files
        .into_iter()
        .map(|(name, text)| {
            let path = directory.join(name);
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            Ok(path)
        })
        .collect()
}

/// Where the build puts things: `WHARF_TARGET_DIR`, or `target` of the workspace.
#[must_use]
pub fn target_dir() -> PathBuf {
    env::var_os("WHARF_TARGET_DIR")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target")), PathBuf::from)
}
