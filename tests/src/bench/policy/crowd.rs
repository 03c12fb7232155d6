//! Many endpoints of a few identities, with a policy for each identity: what a new endpoint and an added rule cost, and
//! the memory that they take.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    Extent, documents,
    tables::{Rows, TABLES, memory},
};
use crate::{
    Node, NodeConfig, Sandbox,
    bench::{
        churn::{at_once, ms},
        findings::{Better, Group, Mark, Part},
        plugin::Plugin,
        scale::{KIB, Memory},
        traffic::paired,
    },
};

const PLAIN: &str = "no policy";
const POLICED: &str = "policy in force";
/// Rules that are added at least; more only while all of them take less than [`LONGEST`].
pub(super) const FEWEST: usize = 20;
/// Time that adding rules may take.
pub(super) const LONGEST: Duration = Duration::from_secs(10);
/// Changes of which the rows are counted.
const COUNTED: usize = 5;

/// A node and its endpoints.
pub(super) struct Crowd {
    plugin: Plugin,
    members: Vec<(Sandbox, Value)>,
}

impl Crowd {
    /// Adds the endpoints; their labels go round.
    pub(super) fn gather(name: &'static str, agent: &NodeConfig, extent: &Extent) -> Result<Self> {
        let plugin = Plugin::wharf_as(name, agent, &json!([]))?;
        let numbered: Vec<(usize, Sandbox)> =
            plugin.sandboxes("crowd", extent.endpoints)?.into_iter().enumerate().collect();
        let (_, added) = at_once(&numbered, |(n, sandbox)| {
            plugin.add_labelled(sandbox, &documents::app(n % extent.identities)).map(|(_, added)| added)
        })?;
        plugin.settle()?;
        let members = numbered.into_iter().map(|(_, sandbox)| sandbox).zip(added).collect();
        Ok(Self { plugin, members })
    }

    /// Two of them, which get policies or none.
    pub(super) fn gather_two(agent: &NodeConfig, extent: &Extent) -> Result<[Self; 2]> {
        Ok([Self::gather(PLAIN, agent, extent)?, Self::gather(POLICED, agent, extent)?])
    }

    pub(super) fn node(&self) -> Result<&Node> {
        self.plugin.node().context("wharf has a node")
    }

    /// DEL, which no time is taken of. On a busy machine a step may overrun its bound; the next DEL does what is left.
    fn del(&self, sandbox: &Sandbox, added: &Value) -> Result<()> {
        self.plugin.del(sandbox, added).or_else(|_| self.plugin.del(sandbox, added)).map(drop)
    }

    /// The end: all endpoints are deleted, and the node must be clean.
    pub(super) fn leave(self) -> Result<()> {
        self.members.iter().try_for_each(|(sandbox, added)| self.del(sandbox, added))?;
        drop(self.members);
        self.plugin.finish()
    }
}

/// ADD on both, in turn, of endpoints whose labels others have already; and the rows that one writes where there is
/// policy.
pub(super) fn newcomers(crowds: &[Crowd; 2], extent: &Extent) -> Result<Part> {
    let mut sandboxes = Vec::new();
    for crowd in crowds {
        sandboxes.push(crowd.plugin.sandboxes("new", extent.adds + COUNTED)?);
    }
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..extent.adds {
        for turn in 0..2 {
            let place = (round + turn) % 2;
            let crowd = &crowds[place];
            let sandbox = sandboxes[place].get(round).context("a sandbox of the round")?;
            crowd.plugin.settle()?;
            let (took, added) = crowd.plugin.add_labelled(sandbox, &documents::app(round % extent.identities))?;
            crowd.del(sandbox, &added)?;
            // What the agent does afterwards must not be in the next one's time.
            crowd.plugin.settle()?;
            samples[place].push(ms(took));
        }
    }
    let mut adds =
        Group::new(&format!("policy: ADD of a known identity, among {}", extent.endpoints), "ms", Better::Lower);
    for (name, samples) in [PLAIN, POLICED].into_iter().zip(samples) {
        adds.add(name, samples)?;
    }
    adds.compare_to(PLAIN)?;
    let ratio = paired(&adds, POLICED, PLAIN).context("no rounds")?;
    adds.note(format!(
        "{POLICED} to {PLAIN} within each round: median {:.3}, quartiles {:.3} - {:.3}",
        ratio.median, ratio.q1, ratio.q3
    ));
    let mark = "ADD of a known identity: as without policy";
    let mut marks = vec![Mark::judge(mark, "x", Better::Lower, ratio.median, 1.03)];

    let [_, policed] = crowds;
    let mut written = [const { Vec::new() }; 4];
    for (n, sandbox) in sandboxes[1].iter().skip(extent.adds).enumerate() {
        let before = Rows::of(policed.node()?)?;
        let (_, added) = policed.plugin.add_labelled(sandbox, &documents::app(n % extent.identities))?;
        let rows = Rows::of(policed.node()?)?.written_since(&before);
        written.iter_mut().zip(rows).for_each(|(all, rows)| all.push(rows));
        policed.del(sandbox, &added)?;
    }
    let all: Vec<f64> = (0..COUNTED).map(|n| written.iter().filter_map(|rows| rows.get(n)).sum()).collect();
    let mut rows = Group::new("policy: rows that a new endpoint of a known identity writes", "rows", Better::Lower);
    rows.add("all tables", all)?;
    for (name, samples) in TABLES.into_iter().zip(written) {
        rows.add(name, samples)?;
    }
    rows.note("an IPv4 and an IPv6 address in IPCACHE, and which rules it has in POLICY_SETS");
    let mark = "rows that a new endpoint of a known identity writes: 2";
    marks.push(Mark::judge(mark, "rows", Better::Lower, rows.median("all tables")?, 2.0));
    Ok((vec![adds, rows], marks))
}

/// Milliseconds until a rule that is added to the policy of one identity is in the kernel, for identity after identity,
/// and the rows that this writes.
pub(super) fn added_rules(node: &Node, extent: &Extent) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut times, mut written) = (Vec::new(), Vec::new());
    let of = |n: usize, added| documents::of_identity(n % extent.identities, extent.identities, added);
    for n in 0..COUNTED {
        let before = Rows::of(node)?;
        super::import(node, of(n, true))?;
        written.push(Rows::of(node)?.written_since(&before).iter().sum());
        super::import(node, of(n, false))?;
    }
    let start = Instant::now();
    for n in (0..extent.changes).take_while(|n| *n < FEWEST || start.elapsed() < LONGEST) {
        times.push(ms(super::import(node, of(n, true))?));
        super::import(node, of(n, false))?;
    }
    Ok((times, written))
}

/// Memory of a node's agent and tables, KiB.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    agent: f64,
    tables: [f64; 4],
    /// Rule sets that there are.
    sets: u64,
}

impl Used {
    /// Now, after the agent had time to give back what it freed.
    pub(super) fn of(node: &Node, extent: &Extent) -> Result<Self> {
        thread::sleep(extent.gives_back);
        let rows = node.ask(async |client| client.policies().await)?.rows;
        Ok(Self { agent: Memory::of(node)?.rss, tables: memory(node)?, sets: rows.sets })
    }

    fn all_tables(&self) -> f64 {
        self.tables.iter().sum()
    }
}

/// Memory before and after the policies of all identities, and after `networks` more in `IPCACHE`.
pub(super) fn memory_group(extent: &Extent, [empty, ruled, full]: [Used; 3]) -> Result<Group> {
    let (endpoints, rules) = (extent.endpoints, extent.rules());
    let mut group = Group::new(&format!("policy: memory with {endpoints} endpoints"), "KiB", Better::Lower);
    let full_of = format!("{rules} rules, {} networks", extent.networks);
    for (state, used) in [("no policy", empty), (&format!("{rules} rules"), ruled), (&full_of, full)] {
        group.add(&format!("agent, resident: {state}"), vec![used.agent])?;
        group.add(&format!("tables in the kernel: {state}"), vec![used.all_tables()])?;
    }
    // Thousands at most: exact.
    let (of_endpoints, of_sets) = (endpoints as f64, ruled.sets as f64);
    ensure!(ruled.sets > 0 && empty.sets == 0, "rule sets: {} before, {} after", empty.sets, ruled.sets);
    let grown = |table: usize| ruled.tables[table] - empty.tables[table];
    group
        .add("what the rules add to the agent, for each endpoint", vec![(ruled.agent - empty.agent) / of_endpoints])?;
    group.add("IPCACHE, for each endpoint", vec![grown(0) / of_endpoints])?;
    group.add("ports and cells, for each rule set", vec![(grown(1) + grown(2)) / of_sets])?;
    group.note(format!("{} rule sets; tables: memlock of fdinfo, without the inner nodes of the tries", ruled.sets));
    Ok(group)
}

/// Seconds to load that many networks by one policy of a container, and a note of what it took.
pub(super) fn load(node: &Node, text: &str, networks: u32, rounds: usize) -> Result<(Vec<f64>, String)> {
    let mut times = Vec::new();
    let mut note = String::new();
    for _ in 0..rounds {
        super::forget(node)?;
        times.push(super::import(node, text.to_owned())?.as_secs_f64());
        let rows = node.ask(async |client| client.policies().await)?.rows;
        ensure!(rows.peers >= u64::from(networks), "{} rows of {networks} are in IPCACHE", rows.peers);
        let mebi = memory(node)?[0] / KIB;
        note = format!("{} rows in IPCACHE ({mebi:.0} MiB), {} in POLICY_CELLS", rows.peers, rows.cells);
    }
    super::forget(node)?;
    Ok((times, note))
}

/// Milliseconds to load networks that are allowed and denied, and the rows.
pub(super) fn load_rows(node: &Node, text: &str, rounds: usize) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut times, mut written) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        super::forget(node)?;
        let before = Rows::of(node)?;
        let start = Instant::now();
        super::import(node, text.to_owned())?;
        times.push(ms(start.elapsed()));
        written.push(Rows::of(node)?.written_since(&before).iter().sum());
    }
    super::forget(node)?;
    Ok((times, written))
}
