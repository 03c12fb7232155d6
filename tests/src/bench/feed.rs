//! The cluster feed with many rows: time and memory until all are in force, a changed pod, traffic during many changes,
//! and restarts.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use wharf_api::PolicyList;
use wharf_feed::v1;

use super::{
    churn::ms,
    findings::{Better, Group, Mark, Part},
    plugin::settle,
    rest::used,
    scale::{KIB, Memory},
    stats::p99,
    traffic::{Cpus, paired, tcp_round_trips},
    wires::Wire,
};
use crate::{
    Node, NodeConfig, Sandbox,
    feed::{self, Producer},
    process::ip,
    scratch,
    stream::UdpStream,
    wait,
};

/// As of `--node-name`.
pub(super) const OWN: &str = "bench";
/// Networks of the default pools.
pub(super) const POOLS: [&str; 2] = ["10.87.0.0/16", "fd57:4a7f:e8f::/64"];
const KINDS: [&str; 4] = ["node", "pod", "namespace", "policy"];
/// Nodes, with this one.
const NODES: u32 = 5_000;
/// Pods of other nodes, with an address of each family.
const PODS: u32 = 150_000;
/// Different sets of labels.
const SETS: u32 = 10_000;
/// Values of the label `app`. Each set has one, and a value of the label `team`.
const APPS: u32 = 50;
/// Values of `app` that a rule selects.
const RULED: u32 = 5;
/// Pod changes in a second, and in a message.
const CHANGES: (u32, u32) = (1_000, 10);
const RESTARTS: usize = 3;
/// Longest that an answer may take.
const LIMIT: Duration = Duration::from_secs(120);

const ALONE: &str = "no changes";
const BESIDE: &str = "1,000 pod changes a second";

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// With this one.
    nodes: u32,
    pods: u32,
    /// A multiple of [`APPS`].
    sets: u32,
    /// Pods that are changed one after the other.
    changes: u32,
    adds: usize,
    /// Rounds of traffic.
    rounds: usize,
    /// Time of traffic in a round.
    span: Duration,
}

impl Extent {
    /// Of the smoke run, or of the whole one.
    #[must_use]
    pub fn of(quick: bool, rounds: usize) -> Self {
        if quick {
            let span = Duration::from_millis(300);
            return Self { nodes: 40, pods: 400, sets: 10 * APPS, changes: 20, adds: 3, rounds, span };
        }
        Self { nodes: NODES, pods: PODS, sets: SETS, changes: 200, adds: 40, rounds, span: Duration::from_secs(3) }
    }

    /// The set of a pod, `turn` changes later. Changes keep the value of `app`.
    fn set(&self, pod: u32, turn: u32) -> u32 {
        (pod + turn * APPS) % self.sets
    }

    fn pod(&self, pod: u32, turn: u32) -> v1::Change {
        let (node, host) = (1 + pod % (self.nodes - 1), 2 + pod / (self.nodes - 1));
        let (v4, v6) = cidrs(node);
        let addresses = [Ipv4Addr::from_bits(v4.to_bits() + host).to_string(), of_v6(v6, host).to_string()];
        let set = self.set(pod, turn);
        let [app, team] = [format!("app-{}", set % APPS), format!("team-{}", set / APPS)];
        let labels = [("app", app.as_str()), ("team", team.as_str())];
        feed::pod(&format!("pod-{pod}"), &name(node), &addresses.each_ref().map(String::as_str), &labels)
    }

    /// A snapshot of every kind, in messages.
    fn snapshot(&self) -> Vec<Vec<v1::Change>> {
        let fixed = [feed::namespace("default", &[]), feed::namespace("shop", &[]), feed::policy("pair", &policy())];
        let nodes = (0..self.nodes).map(node_row);
        let pods = (0..self.pods).map(|pod| self.pod(pod, 0));
        let rows = fixed.into_iter().chain(nodes).chain(pods);
        let begins = KINDS.into_iter().map(feed::begin);
        feed::messages(begins.chain(rows).chain(KINDS.into_iter().map(feed::complete)).collect())
    }
}

pub(super) fn name(node: u32) -> String {
    if node == 0 { OWN.to_owned() } else { format!("node-{node}") }
}

fn of_v6(network: Ipv6Addr, host: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(network.to_bits() + u128::from(host))
}

/// In the network of the link between the nodes.
pub(super) fn addresses(node: u32) -> [String; 2] {
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 1).to_bits() + node);
    let v6 = of_v6(Ipv6Addr::new(0x2001, 0xdb8, 0x12, 0, 0, 0, 0, 1), node);
    [v4.to_string(), v6.to_string()]
}

/// Networks of the containers of another node: a `/24` and a `/64`.
pub(super) fn cidrs(node: u32) -> (Ipv4Addr, Ipv6Addr) {
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(10, 128, 0, 0).to_bits() + (node << 8));
    let v6 = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 0).to_bits() + (u128::from(node) << 64);
    (v4, Ipv6Addr::from_bits(v6))
}

fn node_row(node: u32) -> v1::Change {
    let (v4, v6) = cidrs(node);
    let networks = match node {
        0 => POOLS.map(str::to_owned),
        _ => [format!("{v4}/24"), format!("{v6}/64")],
    };
    let addresses = addresses(node);
    feed::node(&name(node), &addresses.each_ref().map(String::as_str), &networks.each_ref().map(String::as_str))
}

/// The client reaches the server and nothing else; the server is reached by the client and by some pods of other nodes.
fn policy() -> String {
    let document = |name: &str, rules: &str| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: default}}\n\
             spec: {{podSelector: {{matchLabels: {{app: {name}}}}}, {rules}}}\n---\n"
        )
    };
    let pods = |app: &str| format!("podSelector: {{matchLabels: {{app: {app}}}}}");
    let elsewhere = (0..RULED).map(|app| format!("{{{}, namespaceSelector: {{}}}}", pods(&format!("app-{app}"))));
    let peers = [format!("{{{}}}", pods("client"))].into_iter().chain(elsewhere).collect::<Vec<_>>().join(", ");
    let client = format!("policyTypes: [Egress], egress: [{{to: [{{{}}}]}}]", pods("server"));
    document("client", &client) + &document("server", &format!("ingress: [{{from: [{peers}]}}]"))
}

/// Two endpoints under policy, with an agent that has a feed.
pub(super) struct Scene {
    wire: Wire,
    /// Of the feed.
    pub(super) socket: PathBuf,
}

impl Scene {
    pub(super) fn new(name: &'static str, agent: &NodeConfig) -> Result<Self> {
        let directory = scratch::fresh_dir("bench-feed")?.join("feed");
        let agent = agent.clone().flags(&[&format!("--cluster-feed={}", directory.display())]);
        let wire = Wire::labelled(name, &agent)?;
        let scene = Self { wire, socket: directory.join(wharf_feed::SOCKET) };
        let ([v4, v6], space) = (addresses(0), scene.node()?.space());
        ip(space, "link add up0 type veth peer name up1")?;
        ip(space, &format!("addr add {v4}/15 dev up0"))?;
        ip(space, &format!("addr add {v6}/64 dev up0 nodad"))?;
        ip(space, "link set up0 up")?;
        ip(space, "link set up1 up")?;
        Ok(scene)
    }

    pub(super) fn node(&self) -> Result<&Node> {
        self.wire.node().context("wharf has a node")
    }

    /// As [`Wire::finish`].
    pub(super) fn finish(self) -> Result<()> {
        self.wire.finish()
    }

    /// A new stream, and the seconds until every row is in force.
    fn fill(&self, extent: &Extent) -> Result<(Producer, f64)> {
        let mut producer = connect(&self.socket)?;
        let messages = extent.snapshot();
        let start = Instant::now();
        for message in messages {
            let v1::Processed { refused, unlisted, .. } = producer.send(message)?;
            ensure!(refused.is_empty(), "{} rows are refused: {:?}", refused.len() as u64 + unlisted, refused.first());
        }
        producer.settle()?;
        Ok((producer, start.elapsed().as_secs_f64()))
    }
}

fn connect(socket: &Path) -> Result<Producer> {
    Ok(Producer::opened(socket, feed::opening("bench", "bench", OWN, &KINDS))?.with_patience(LIMIT))
}

/// Rows, changes, traffic and restarts, in that order, on one node.
///
/// # Errors
/// When the node cannot be made, or a row is refused or not in force in time.
pub fn measure(agent: &NodeConfig, extent: Extent) -> Result<Part> {
    let mut scene = Scene::new("wharf, cluster feed", agent)?;
    let (mut groups, mut marks) = (Vec::new(), Vec::new());
    let mut take = |(more, judged): Part| {
        groups.extend(more);
        marks.extend(judged);
    };
    let (mut producer, filled) = rows(&scene, &extent)?;
    take(filled);
    take(changes(&mut producer, &extent)?);
    take(adds(&scene, agent, extent.adds)?);
    take(traffic(&scene, &extent, &mut producer)?);
    drop(producer);
    take(restarts(&mut scene, &extent)?);
    scene.finish()?;
    Ok((groups, marks))
}

fn rows(scene: &Scene, extent: &Extent) -> Result<(Producer, Part)> {
    let Extent { nodes, pods, sets, .. } = *extent;
    let empty = Memory::of(scene.node()?)?.rss;
    let (producer, took) = scene.fill(extent)?;
    let full = Memory::of(scene.node()?)?.rss;
    let what = format!("{nodes} nodes, {pods} pods, {sets} label sets");
    let mut times = Group::new("feed: a snapshot, until all rows are in force", "s", Better::Lower);
    times.add(&what, vec![took])?;
    times.note("addresses and networks of both families for each node, and addresses of both for each pod");
    let mut memory = Group::new("feed: memory of the agent", "KiB", Better::Lower);
    memory.add("resident, no rows", vec![empty])?;
    memory.add(&format!("resident, {what}"), vec![full])?;
    let marks = vec![
        Mark::judge(&format!("feed of {what}: in force within 5 s"), "s", Better::Lower, took, 5.0),
        Mark::judge("the agent with this feed: at most 300 MiB resident", "MiB", Better::Lower, full / KIB, 300.0),
    ];
    Ok((producer, (vec![times, memory], marks)))
}

/// In turn with a node that has the policy and no feed.
fn adds(scene: &Scene, agent: &NodeConfig, rounds: usize) -> Result<Part> {
    const WITHOUT: &str = "no feed";
    let mut plain = Node::start(agent.clone())?;
    super::policy::import(&plain, policy())?;
    let nodes = [&plain, scene.node()?];
    // The end of a namespace would take time from the next ADD.
    let sandboxes = nodes.map(|node| (0..rounds + 1).map(|n| node.sandbox(&format!("added-{n}"))).collect());
    let [of_plain, of_scene]: [Result<Vec<Sandbox>>; 2] = sandboxes;
    let (of_plain, of_scene) = (of_plain?, of_scene?);
    let (mut times, mut ends) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for (round, pair) in of_plain.iter().zip(&of_scene).enumerate() {
        for (place, sandbox) in <[&Sandbox; 2]>::from(pair).into_iter().enumerate() {
            settle(nodes[place])?;
            let start = Instant::now();
            ends[place].push(nodes[place].attach(sandbox)?);
            // The first ADD of an agent is slower.
            times[place].extend((round > 0).then(|| ms(start.elapsed())));
        }
    }
    for (node, ends) in nodes.into_iter().zip(ends) {
        ends.iter().try_for_each(|end| node.detach(end))?;
    }
    plain.stop_agent()?;
    let [without, with] = times;
    let mut group = Group::new("feed: ADD, one at a time", "ms", Better::Lower);
    group.add(WITHOUT, without)?;
    group.add("this feed", with)?;
    group.compare_to(WITHOUT)?;
    let ratio = group.median("this feed")? / group.median(WITHOUT)?;
    let mark = Mark::judge("ADD with this feed: of without", "x", Better::Lower, ratio, 1.05);
    Ok((vec![group], vec![mark]))
}

fn changes(producer: &mut Producer, extent: &Extent) -> Result<Part> {
    let mut times = Vec::new();
    for pod in 0..extent.changes {
        let change = vec![extent.pod(pod, 1)];
        let start = Instant::now();
        producer.send(change)?;
        producer.settle()?;
        times.push(ms(start.elapsed()));
    }
    let worst = p99(&times).context("no changes")?;
    let mut group = Group::new("feed: a pod with other labels, until it is in force", "ms", Better::Lower);
    group.add("one after another", times)?;
    group.note(format!("99 of 100 within {worst:.2} ms"));
    let target = "a changed pod of the feed in force: 99 of 100 within 10 ms";
    Ok((vec![group], vec![Mark::judge(target, "ms", Better::Lower, worst, 10.0)]))
}

/// Traffic of the two endpoints, in turn without changes and during changes.
fn traffic(scene: &Scene, extent: &Extent, producer: &mut Producer) -> Result<Part> {
    let (Scene { wire, .. }, cpus) = (scene, Cpus::of_this_process()?);
    let (mut rates, mut shares) = ([Vec::new(), Vec::new()], Vec::new());
    // The changes above were the first turn.
    let (mut turn, mut sent, mut seconds) = (1, 0, 0.0);
    for round in 0..extent.rounds {
        for half in 0..2 {
            let place = (round + half) % 2;
            if place == 0 {
                rates[0].push(tcp_round_trips(wire, extent.span, cpus).context(ALONE)?);
                continue;
            }
            let (before, since) = (used(scene.node()?)?, Instant::now());
            let done = AtomicBool::new(false);
            let (rate, count) = thread::scope(|scope| {
                let changing = scope.spawn(|| change_pods(producer, extent, &mut turn, &done));
                let rate = tcp_round_trips(wire, extent.span, cpus).context(BESIDE);
                done.store(true, Ordering::Relaxed);
                let count = changing.join().map_err(|_| anyhow!("the producer panicked"))??;
                anyhow::Ok((rate?, count))
            })?;
            let took = since.elapsed().as_secs_f64();
            shares.push(used(scene.node()?)?.saturating_sub(before).as_secs_f64() / took * 100.0);
            rates[1].push(rate);
            sent += count;
            seconds += took;
        }
    }
    let mut group = Group::new("feed: TCP request/response, 1 byte, under policy", "transactions/s", Better::Higher);
    for (name, rates) in [ALONE, BESIDE].into_iter().zip(rates) {
        group.add(name, rates)?;
    }
    group.compare_to(ALONE)?;
    let ratio = paired(&group, BESIDE, ALONE).context("no rounds")?;
    group.note(format!(
        "within each round: median {:.3}, quartiles {:.3} - {:.3}; {:.0} changes a second of pods that no rule selects",
        ratio.median,
        ratio.q1,
        ratio.q3,
        f64::from(sent) / seconds
    ));
    let mut load = Group::new("feed: the agent beside 1,000 pod changes a second", "%", Better::Lower);
    load.add("of one processor", shares)?;
    let target = "request/response beside 1,000 pod changes a second: at least 0.95 of without";
    let marks = vec![
        Mark::judge(target, "x", Better::Higher, ratio.median, 0.95),
        Mark::judge(
            "the agent beside 1,000 pod changes a second: at most half a processor",
            "%",
            Better::Lower,
            load.median("of one processor")?,
            50.0,
        ),
    ];
    Ok((vec![group, load], marks))
}

/// Changes pods that no rule selects, at the rate of [`CHANGES`], until `done`. Returns the number of changes, all of
/// them in force. `turn`: of the labels.
fn change_pods(producer: &mut Producer, extent: &Extent, turn: &mut u32, done: &AtomicBool) -> Result<u32> {
    let (rate, each) = CHANGES;
    let pods: Vec<u32> = (0..extent.pods).filter(|pod| extent.set(*pod, 0) % APPS >= RULED).collect();
    let (gap, mut next, mut sent) = (Duration::from_secs(1) * each / rate, Instant::now(), 0);
    let mut all = pods.iter().copied();
    while !done.load(Ordering::Relaxed) {
        let mut message = Vec::new();
        for _ in 0..each {
            let pod = match all.next() {
                Some(pod) => pod,
                None => {
                    *turn += 1;
                    all = pods.iter().copied();
                    all.next().context("no pods")?
                }
            };
            message.push(extent.pod(pod, *turn + 1));
        }
        producer.send(message)?;
        sent += each;
        next += gap;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    // The next call begins with the first pod again.
    *turn += 1;
    producer.settle()?;
    Ok(sent)
}

fn policies(node: &Node) -> Result<PolicyList> {
    node.ask(async |client| client.policies().await)
}

/// Kills the agent and starts it again, under traffic: until it serves, until the rows of its file are in force, and
/// the snapshot of a producer.
fn restarts(scene: &mut Scene, extent: &Extent) -> Result<Part> {
    let (client, server) = (scene.wire.left()?.try_clone()?, scene.wire.right()?.try_clone()?);
    let before = policies(scene.node()?)?.rows.peers;
    // The agent writes them some seconds after a change.
    let (file, pods) = (scene.node()?.dirs().state.join("feed.json"), extent.pods as usize);
    wait::until_within(LIMIT, "every pod in the agent's file", || {
        let text = fs::read_to_string(&file).context("read the agent's file")?;
        Ok((text.matches("\"uid\":\"pod-").count() == pods).then_some(()))
    })?;
    let stream = UdpStream::start(&client, &server, scene.wire.address(), 1_000)?;
    let (mut serves, mut kept, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RESTARTS {
        let node = scene.wire.node_mut().context("wharf has a node")?;
        node.kill_agent()?;
        let start = Instant::now();
        node.start_agent()?;
        serves.push(start.elapsed().as_secs_f64());
        loop {
            let list = policies(node)?;
            if list.realized == list.revision && list.rows.peers >= before {
                break;
            }
            ensure!(start.elapsed() < LIMIT, "{} of {before} rows are in force after {LIMIT:?}", list.rows.peers);
            thread::sleep(Duration::from_millis(1));
        }
        kept.push(start.elapsed().as_secs_f64());
        node.await_rebuilt()?;
        sent.push(scene.fill(extent)?.1);
    }
    let report = stream.stop()?;
    let lost = f64::from(u32::try_from(report.lost() + report.refused).context("packets")?);
    let mut group = Group::new("feed: restart with these rows, after SIGKILL", "s", Better::Lower);
    group.add("serves", serves)?;
    group.add("rows of its file in force", kept)?;
    group.add("the producer's snapshot in force, from its begin", sent)?;
    group.note(format!("{lost} of {} packets of a stream under policy lost", report.sent));
    let marks = vec![
        Mark::judge("restart with this feed: serves within 0.5 s", "s", Better::Lower, group.median("serves")?, 0.5),
        Mark::judge("packets lost over restarts with this feed: none", "", Better::Lower, lost, 0.0),
    ];
    Ok((vec![group], marks))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wharf_policy::read::read;

    use super::*;

    #[test]
    fn a_snapshot_has_every_row_once_in_messages_that_fit() {
        let extent = Extent::of(true, 1);
        let changes: Vec<v1::Change> = extent.snapshot().into_iter().flatten().collect();
        let expected = extent.nodes + extent.pods + 2 + 1 + 8;
        assert_eq!(u32::try_from(changes.len()), Ok(expected));
        let texts: BTreeSet<String> = changes.iter().map(|change| format!("{change:?}")).collect();
        assert_eq!(texts.len(), changes.len());
    }

    #[test]
    fn a_changed_pod_has_another_set_with_the_same_app() {
        let extent = Extent::of(true, 1);
        for pod in 0..extent.pods {
            let [before, after] = [0, 1].map(|turn| extent.set(pod, turn));
            assert!(before != after && before % APPS == after % APPS, "{pod}: {before}, {after}");
        }
        let whole = Extent::of(false, 1);
        let sets: BTreeSet<u32> = (0..whole.pods).map(|pod| whole.set(pod, 0)).collect();
        assert_eq!(u32::try_from(sets.len()), Ok(SETS));
    }

    #[test]
    fn the_policy_is_read() {
        assert_eq!(read("t", &policy()).expect("valid").len(), 2);
    }
}
