//! The agent is killed at each crash point of a change of the cluster feed: routes, the overlay, policy, and the file
//! of the rows. The next start and the producer complete the change. A run may take a share of the points
//! ([`wharf_tests::crash::share`]).

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use wharf_feed::v1;
use wharf_tests::{
    Node,
    cluster::{Container, DEVICE, FAR, NAMES, Nodes, THREE, address, await_routes, pool, routes, to},
    crash,
    feed::{self, Producer},
    wait,
};

#[path = "crash_matrix/rules.rs"]
mod rules;

const KINDS: [&str; 4] = ["node", "pod", "namespace", "policy"];
const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n\
                      metadata: {name: one, namespace: default}\n\
                      spec: {podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: three}}, \
                      namespaceSelector: {}}]}]}\n";
/// Points of a change of the feed. Others belong to tasks that run at any time.
const ROOMS: [&str; 6] =
    ["kept/", "datapath/peers/", "datapath/overlay/", "datapath/filters/", "datapath/nft/", "datapath/policy/"];
/// A change takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Rows that are in force: a near node, node c behind the overlay with a pod, and a policy that selects it; or without
/// them, and so without the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Small,
    Large,
}

use Stage::{Large, Small};

impl Stage {
    fn other(self) -> Self {
        match self {
            Small => Large,
            Large => Small,
        }
    }

    fn routes(self) -> Vec<String> {
        if self == Small {
            return Vec::new();
        }
        let (mut all, from, at) = (to(1), address(0, false), address(FAR, false));
        all.extend([false, true].map(|v6| format!("{} overlay to {at} from {from} mtu 1450", pool(FAR, v6))));
        all.sort();
        all
    }

    /// The change that leads to it.
    fn changes(self) -> Vec<v1::Change> {
        match self {
            Large => large(),
            Small => {
                let nodes = [1, FAR].map(|n| feed::delete("node", NAMES[n]));
                [feed::delete("policy", "one"), feed::delete("pod", "three")].into_iter().chain(nodes).collect()
            }
        }
    }

    fn snapshot(self) -> Vec<v1::Change> {
        let base = [node_row(0), feed::namespace("default", &[]), feed::namespace("shop", &[])];
        let more = if self == Large { large() } else { Vec::new() };
        let rows = base.into_iter().chain(more);
        let begins = KINDS.into_iter().map(feed::begin);
        begins.chain(rows).chain(KINDS.into_iter().map(feed::complete)).collect()
    }
}

fn node_row(n: usize) -> v1::Change {
    let (addresses, cidrs) = ([address(n, false), address(n, true)], [pool(n, false), pool(n, true)]);
    feed::node(NAMES[n], &addresses.each_ref().map(String::as_str), &cidrs.each_ref().map(String::as_str))
}

fn large() -> Vec<v1::Change> {
    let pod = feed::pod("three", NAMES[FAR], &["10.87.2.9", "fd87:0:0:3::9"], &[("app", "three")]);
    vec![node_row(1), node_row(FAR), pod, feed::policy("one", POLICY)]
}

/// A producer whose rows are in force.
fn produce(socket: &Path, stage: Stage) -> Result<Producer> {
    let mut producer = Producer::opened(socket, feed::opening("kube", "one", NAMES[0], &KINDS))?;
    let processed = producer.send(stage.snapshot())?;
    ensure!(processed.refused.is_empty(), "{processed:?}");
    producer.settle()?;
    Ok(producer)
}

/// What the kernel has of each stage when no change was interrupted.
type Known = BTreeMap<Stage, rules::Rules>;

/// The kernel has exactly what follows from the stage.
fn check(node: &Node, stage: Stage, known: &mut Known) -> Result<()> {
    await_routes(node, stage.routes())?;
    wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())?;
    let has_device = node.space().links()?.iter().any(|name| name == DEVICE);
    ensure!(has_device == (stage == Large), "{stage:?}: {DEVICE} is there: {has_device}");
    let found = rules::observe(node)?;
    let wanted = known.entry(stage).or_insert_with(|| found.clone());
    ensure!(found == *wanted, "{stage:?}: {found:#?}, not {wanted:#?}");
    Ok(())
}

/// Points that the change to a stage passes.
fn learn(node: &Node, producer: &mut Producer, stage: Stage) -> Result<Vec<String>> {
    crash::forget_trace(node.dirs())?;
    producer.send(stage.changes())?;
    producer.settle()?;
    let mut points: Vec<String> = crash::trace(node.dirs())?;
    points.retain(|point| ROOMS.iter().any(|room| point.starts_with(room)));
    points.sort();
    points.dedup();
    Ok(points)
}

/// Kills the agent amid the change to a stage. The start without a producer has the routes of one stage, and the
/// producer completes the change.
fn kill_at(
    node: &mut Node,
    socket: &Path,
    mut producer: Producer,
    stage: Stage,
    point: &str,
    known: &mut Known,
) -> Result<Producer> {
    crash::wish(node.dirs(), point)?;
    // The stream ends with the agent.
    let _ = producer.send(stage.changes()).and_then(|_| producer.settle());
    let is_killed = node.await_crash_for(PATIENCE)?;
    crash::forget_wish(node.dirs())?;
    ensure!(is_killed, "no kill");
    drop(producer);
    ensure!(node.start_armed_agent()?, "a kill without a wish");
    node.await_rebuilt()?;
    // Routes that no row explains and that were not removed yet stay until the producer has sent every row.
    let found = routes(node)?;
    ensure!(found.iter().all(|route| Large.routes().contains(route)), "{found:?}");
    wait::until_equal("what is amiss without the producer", &Vec::new(), || node.found_amiss())?;
    rules::observe(node).context("without the producer")?;
    let producer = produce(socket, stage)?;
    check(node, stage, known).context("with the producer")?;
    Ok(producer)
}

fn kill_at_each_point(joined: &mut Nodes, socket: &Path) -> Result<()> {
    let node = &mut joined.nodes[0];
    ensure!(node.start_armed_agent()?, "a kill without a wish");
    let one = Container::start(node, "one")?;
    let mut producer = produce(socket, Small)?;
    let (mut stage, mut known) = (Small, Known::new());
    let mut all = Vec::new();
    for next in [Large, Small] {
        let points = learn(node, &mut producer, next)?;
        check(node, next, &mut known).context("without a kill")?;
        for room in ["kept/", "datapath/peers/", "datapath/policy/"] {
            ensure!(points.iter().any(|point| point.starts_with(room)), "{next:?}: no point of {room}: {points:?}");
        }
        all.extend(crash::share(points)?.into_iter().map(|point| (next, point)));
    }
    for (next, point) in all {
        if stage == next {
            stage = next.other();
            producer.send(stage.changes())?;
            producer.settle()?;
        }
        let at = || format!("{next:?}, killed at {point}");
        producer = kill_at(node, socket, producer, next, &point, &mut known).with_context(at)?;
        stage = next;
    }
    node.detach(&one.end)
}

#[test]
fn a_change_of_the_feed_that_is_killed_at_any_point_is_completed() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    let file = format!("--cluster-file={}", joined.file.display());
    let directory = joined.nodes[0].dirs().root.join("feed");
    joined.nodes[0].set_flag(&file, false);
    joined.nodes[0].set_flag(&format!("--cluster-feed={}", directory.display()), true);
    joined.run(|joined| kill_at_each_point(joined, &directory.join("feed.sock")))?.end()
}
