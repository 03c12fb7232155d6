//! What network policy costs: packets with rules and without, and changes of rules and endpoints.
//!
//! | file | what |
//! |---|---|
//! | `documents` | the policies |
//! | `pair` | two endpoints with a hundred rules each way: traffic, and nanoseconds a packet |
//! | `crowd` | many endpoints: an added rule, a new endpoint, memory; many networks |
//! | `engine` | an added rule among more identities than a node has, without a kernel |
//! | `tables` | rows and memory of the tables in the kernel |

mod crowd;
mod documents;
mod engine;
mod pair;
pub(super) mod tables;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use wharf_api::{PolicyDeleteQuery, PolicyImport};

pub(super) use self::tables::open;
use self::{
    crowd::{Crowd, Used},
    pair::{PLAIN, POLICED, Runs},
};
use super::{
    findings::{Better, Group, Mark, Part},
    programs::REPEAT,
    stats::p99,
    wires::Wire,
};
use crate::{Node, NodeConfig};

/// Longest that a change of policy may take.
const LIMIT: Duration = Duration::from_secs(120);

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Extent {
    /// Rounds of traffic.
    rounds: usize,
    /// Rounds of ADDs.
    adds: usize,
    /// Time that one kind of traffic takes in a round.
    span: Duration,
    runs: Runs,
    /// Endpoints of a crowd. More would leave the kernel minutes of work: there are two crowds.
    endpoints: usize,
    /// Endpoints with policies that the engine alone has.
    members: usize,
    /// Identities that they have, each with a policy.
    identities: usize,
    /// Identities that the engine alone has beside.
    many: usize,
    /// Rules that are added one after the other.
    changes: usize,
    /// Networks in `IPCACHE` while rules are added.
    networks: u32,
    /// Networks that are loaded at once.
    load: u32,
    /// Networks that are allowed, and as many that are denied.
    cidrs: u32,
    /// Rounds of loads.
    loads: usize,
    /// Time that the agent is given to give back what it freed, before its memory is read.
    gives_back: Duration,
}

impl Extent {
    /// That of the smoke run, or the whole.
    #[must_use]
    pub fn of(quick: bool, rounds: usize, adds: usize) -> Self {
        if quick {
            let runs = Runs { rounds: 3, repeat: REPEAT / 20, calls: 100 };
            return Self {
                rounds,
                adds,
                span: Duration::from_millis(50),
                runs,
                endpoints: 20,
                members: 40,
                identities: 20,
                many: 500,
                changes: 10,
                networks: 500,
                load: 1_000,
                cidrs: 50,
                loads: 1,
                gives_back: Duration::ZERO,
            };
        }
        Self {
            rounds,
            adds,
            span: Duration::from_millis(300),
            runs: Runs { rounds: 9, repeat: REPEAT / 2, calls: 1_000 },
            endpoints: 200,
            members: 1_000,
            identities: 100,
            many: 50_000,
            changes: 100,
            networks: 50_000,
            load: 100_000,
            cidrs: 1_000,
            loads: 3,
            gives_back: Duration::from_secs(3),
        }
    }

    /// Rules of the policies of all identities.
    fn rules(&self) -> usize {
        self.identities * documents::OF_IDENTITY
    }
}

/// Traffic, packets, loads and changes, in that order: those that leave the kernel work to do come last.
///
/// # Errors
/// When a node cannot be made, or policy does not do what is measured.
pub fn measure(agent: &NodeConfig, extent: &Extent) -> Result<Part> {
    let (mut groups, mut marks) = (Vec::new(), Vec::new());
    let mut take = |(more, judged): Part| {
        groups.extend(more);
        marks.extend(judged);
    };
    let wires = [Wire::direct()?, Wire::labelled(PLAIN, agent)?, Wire::labelled(POLICED, agent)?];
    let [_, plain, policed] = wires.each_ref().map(|wire| wire.node());
    let (plain, policed) = plain.zip(policed).context("wharf has nodes")?;
    import(policed, documents::each_way())?;
    pair::is_policed(policed)?;
    take(pair::traffic(&wires, extent.rounds, extent.span).context("traffic")?);
    take(pair::packets([plain, policed], extent.runs).context("packets")?);
    take(loads(policed, extent).context("loads")?);
    wires.into_iter().try_for_each(Wire::finish)?;
    let crowds = Crowd::gather_two(agent, extent).context("gather endpoints")?;
    take(changes(&crowds, extent).context("changes")?);
    crowds.into_iter().try_for_each(Crowd::leave)?;
    Ok((groups, marks))
}

/// Many networks at once, on a node with two endpoints.
fn loads(node: &Node, extent: &Extent) -> Result<Part> {
    let Extent { load, cidrs, loads, .. } = *extent;
    let mut times = Group::new("policy: networks of one policy, until they are in force", "s", Better::Lower);
    let mut marks = Vec::new();
    for (name, text) in [
        (format!("{load} networks, each a peer"), documents::peers("client", load)),
        (format!("{load} exceptions of one network"), documents::exceptions("client", load)),
    ] {
        let (samples, note) = crowd::load(node, &text, load, loads).with_context(|| name.clone())?;
        times.add(&name, samples)?;
        times.note(format!("{name}: {note}"));
        marks.push(Mark::judge(&format!("{name}: in force within 2 s"), "s", Better::Lower, times.median(&name)?, 2.0));
    }
    let title = format!("policy: {cidrs} networks allowed, a part of each denied");
    let mut mixed = Group::new(&title, "ms", Better::Lower);
    let (samples, rows) = crowd::load_rows(node, &documents::denied_and_allowed("client", cidrs), loads)?;
    mixed.add("until they are in force", samples)?;
    mixed.note(format!("{:.0} rows written", rows.first().context("no rounds")?));
    Ok((vec![times, mixed], marks))
}

/// New endpoints, added rules, and the memory of both.
fn changes(crowds: &[Crowd; 2], extent: &Extent) -> Result<Part> {
    let node = crowds[1].node()?;
    let Extent { endpoints, members, identities, many, networks, .. } = *extent;
    let rules = extent.rules();
    let empty = Used::of(node, extent)?;
    let first = import(node, documents::of_identities(identities))?;
    let ruled = Used::of(node, extent)?;
    let (mut groups, mut marks) = crowd::newcomers(crowds, extent).context("new endpoints")?;

    let here = format!("agent: {endpoints} endpoints, {identities} identities");
    let beside = format!("agent: and {networks} networks in IPCACHE");
    let mut samples = vec![(here, crowd::added_rules(node, extent)?)];
    import(node, documents::peers(&documents::app(0), networks))?;
    samples.push((beside, crowd::added_rules(node, extent)?));
    let full = Used::of(node, extent)?;
    for identities in [identities, many] {
        let name = format!("engine: {members} endpoints, {identities} identities");
        samples.push((name, engine::added_rules(extent, identities)?));
    }

    let title = format!("policy: one rule added to {rules}, until it is in force");
    let mut times = Group::new(&title, "ms", Better::Lower);
    let mut written = Group::new("policy: rows that an added rule writes", "rows", Better::Lower);
    for (name, (took, rows)) in samples {
        let slow = p99(&took).context("no samples")?;
        times.note(format!("{name}: p99 {slow:.2} ms"));
        marks.push(Mark::judge(&format!("added rule, p99, {name}"), "ms", Better::Lower, slow, 10.0));
        times.add(&name, took)?;
        written.add(&name, rows)?;
    }
    times.note(format!("the first import of the {rules} rules: {:.1} ms", first.as_secs_f64() * 1e3));
    times.note("engine: the computation alone, without agent and kernel");
    written.note("agent: rows that are others afterwards; engine: changes of rows");
    written.note("the most: by a rule of the identity whose own rules name the networks");
    let rows: Vec<f64> = written.series.iter().map(|series| series.summary.median).collect();
    if let [here, beside, few, many_rows] = rows[..] {
        for (name, ratio) in [
            (format!("{networks} networks: as without"), beside / here),
            (format!("{many} identities: as with {identities}"), many_rows / few),
        ] {
            marks.push(Mark::judge(&format!("rows of an added rule, {name}"), "x", Better::Lower, ratio, 1.0));
        }
    }
    groups.extend([times, written, crowd::memory_group(extent, [empty, ruled, full])?]);
    Ok((groups, marks))
}

/// Imports policies; the time from the request until the kernel has them.
pub(super) fn import(node: &Node, text: String) -> Result<Duration> {
    let import = PolicyImport { file: "bench.yaml".to_owned(), text };
    let start = Instant::now();
    let change = node.ask(async |client| client.with_timeout(LIMIT).import_policy(&import).await)?;
    let took = start.elapsed();
    ensure!(change.is_in_force(), "the policies are not in force: {change:?}");
    Ok(took)
}

/// Deletes all policies.
pub(super) fn forget(node: &Node) -> Result<()> {
    let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
    node.ask(async |client| client.with_timeout(LIMIT).delete_policy(&all).await).map(drop)
}
