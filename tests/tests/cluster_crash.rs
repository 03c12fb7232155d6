//! The agent is killed at each crash point of a change of the cluster feed (routes, the overlay, policy, and the file
//! of the rows), of starts (another overlay, the feed's socket, kept files) and of `wharf-agent cleanup`. The next
//! start and the producer complete the change. A run may take a share of the points ([`wharf_tests::crash::share`]).

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use wharf_feed::v1;
use wharf_tests::{
    Node, NodeConfig,
    cluster::{
        Container, DEVICE, FAR, NAMES, Nodes, THREE, address, await_routes, cleanup, pool, routes, set_pools, to,
        unreachable,
    },
    crash,
    feed::{self, Producer},
    process::{Finished, crash_bin, ip, run},
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

/// Points of a write of a kept file.
const KEPT: &[&str] =
    &["kept/after-create", "kept/after-write", "kept/after-sync", "kept/after-rename", "kept/after-directory-sync"];
/// Points of the change to [`Large`].
const TO_LARGE: &[&str] = &[
    "datapath/overlay/after-row",
    "datapath/overlay/after-device",
    "datapath/overlay/after-mark",
    "datapath/overlay/after-filter",
    "datapath/overlay/after-up",
    "datapath/overlay/after-addresses",
    "datapath/peers/before",
    "datapath/peers/after-unreachable",
    "datapath/peers/after-routes",
    "datapath/peers/after",
];
/// Points of the change to [`Small`].
const TO_SMALL: &[&str] = &[
    "datapath/overlay/after-removal",
    "datapath/peers/before",
    "datapath/peers/after-left",
    "datapath/peers/after-left-unreachable",
    "datapath/peers/after",
];
/// Points of a start that makes the overlay's device again. Its routes go with the device, but not the unreachable
/// routes.
const OTHER_PORT: &[&str] = &[
    "datapath/overlay/after-row",
    "datapath/overlay/after-removal",
    "datapath/overlay/after-device",
    "datapath/overlay/after-mark",
    "datapath/overlay/after-filter",
    "datapath/overlay/after-up",
    "datapath/overlay/after-addresses",
    "datapath/peers/before",
    "datapath/peers/after-routes",
    "datapath/peers/after",
];
/// Points of a start that finds the overlay's device with another MTU.
const OTHER_MTU: &[&str] = &["datapath/overlay/after-settings"];
/// Points of `wharf-agent cleanup`.
const CLEANUP: &[&str] = &["datapath/peers/after-removal", "datapath/overlay/after-removal"];
/// Points of a start without the directory of the feed's socket, and with a damaged file of rows.
const FIRST_FEED: &[&str] = &[
    "socket/after-directory",
    "socket/after-directory-mode",
    "socket/after-directory-group",
    "socket/after-bind",
    "socket/after-mode",
    "socket/after-group",
    "kept/after-set-aside",
];
/// Points of a start that finds the socket of a killed agent.
const NEXT_FEED: &[&str] = &["socket/after-stale", "socket/after-bind", "socket/after-mode", "socket/after-group"];
/// Files with points of these rooms, each of which is in one of the lists.
const SOURCES: [&str; 5] = [
    include_str!("../../crates/kit/src/kept.rs"),
    include_str!("../../crates/kit/src/socket.rs"),
    include_str!("../../crates/datapath/src/bpf/overlay.rs"),
    include_str!("../../crates/datapath/src/overlay.rs"),
    include_str!("../../crates/datapath/src/peers.rs"),
];
const LISTED: [&str; 4] = ["kept/", "socket/", "datapath/overlay/", "datapath/peers/"];

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
        for point in KEPT.iter().chain(if next == Large { TO_LARGE } else { TO_SMALL }) {
            ensure!(points.iter().any(|passed| passed == point), "{next:?}: {point} is not passed: {points:?}");
        }
        let has_policy = points.iter().any(|point| point.starts_with("datapath/policy/"));
        ensure!(has_policy, "{next:?}: no point of policy: {points:?}");
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

/// Kills the agent at each of the points of a start. `prepare`: makes the state before the start, without an agent.
/// `check`: of a complete start.
fn kill_starts(
    node: &mut Node,
    what: &str,
    points: &[&str],
    prepare: &dyn Fn(&mut Node) -> Result<()>,
    check: &dyn Fn(&Node) -> Result<()>,
) -> Result<()> {
    prepare(node)?;
    crash::forget_trace(node.dirs())?;
    ensure!(node.start_armed_agent()?, "a kill without a wish");
    let trace = crash::trace(node.dirs())?;
    check(node).with_context(|| format!("{what}, without a kill"))?;
    node.kill_agent()?;
    let mut wishes = Vec::new();
    for point in points {
        let passes = trace.iter().filter(|passed| passed.as_str() == *point).count();
        ensure!(passes > 0, "{what}: {point} is not passed: {trace:?}");
        // Each kept file has these points. The agent's own socket is bound before the feed's.
        let all = match point.split_once('/').map(|(room, _)| room) {
            Some("kept") => 1..=passes,
            Some("socket") => passes..=passes,
            _ => 1..=1,
        };
        wishes.extend(all.map(|pass| format!("{point}:{pass}")));
    }
    for wish in crash::share(wishes)? {
        let at = || format!("{what}, killed at {wish}");
        prepare(node).with_context(at)?;
        crash::wish(node.dirs(), &wish)?;
        let is_killed = !node.start_armed_agent().with_context(at)?;
        crash::forget_wish(node.dirs())?;
        ensure!(is_killed, "{}: no kill", at());
        node.start_agent().with_context(at)?;
        check(node).with_context(at)?;
        node.kill_agent()?;
    }
    Ok(())
}

/// The routes of [`Large`] are in force, and nothing is amiss.
fn check_routes(node: &Node) -> Result<()> {
    await_routes(node, Large.routes())?;
    wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())
}

/// Runs `wharf-agent cleanup --force` with crash points.
fn armed_cleanup(node: &Node) -> Result<Finished> {
    let mut command = node.command(crash_bin("wharf-agent")?)?;
    command.args(["cleanup", "--force"]).args(node.dirs().flags()).env("NO_COLOR", "1");
    command.envs(crash::environment(node.dirs()));
    run(command, b"", wait::PATIENCE)
}

fn is_removed(node: &Node) -> Result<()> {
    let (routes, unreachable) = (routes(node)?, unreachable(node)?);
    ensure!(routes.is_empty() && unreachable.is_empty(), "{routes:?} {unreachable:?}");
    ensure!(!node.space().links()?.iter().any(|name| name == DEVICE), "{DEVICE} is there");
    Ok(())
}

/// Kills a cleanup at each of its points. The next one completes it.
fn kill_cleanups(node: &mut Node) -> Result<()> {
    let prepare = |node: &mut Node| -> Result<()> {
        node.start_agent()?;
        await_routes(node, Large.routes())?;
        node.kill_agent()
    };
    prepare(node)?;
    crash::forget_trace(node.dirs())?;
    armed_cleanup(node)?.ok()?;
    is_removed(node)?;
    let trace = crash::trace(node.dirs())?;
    for point in CLEANUP {
        ensure!(trace.iter().any(|passed| passed == point), "cleanup: {point} is not passed: {trace:?}");
    }
    for point in crash::share(CLEANUP.iter().map(|point| (*point).to_owned()).collect())? {
        let at = || format!("cleanup, killed at {point}");
        prepare(node).with_context(at)?;
        crash::wish(node.dirs(), &point)?;
        let ended = armed_cleanup(node)?;
        crash::forget_wish(node.dirs())?;
        ensure!(ended.status.signal() == Some(Signal::SIGKILL as i32), "{}: {}", at(), ended.describe());
        cleanup(node, &["--force"])?.ok().with_context(at)?;
        is_removed(node).with_context(at)?;
    }
    Ok(())
}

#[test]
fn a_start_with_another_overlay_or_a_cleanup_that_is_killed_at_any_point_is_completed() -> Result<()> {
    const PORT: &str = "4790";
    let joined = Nodes::join(THREE, "auto")?;
    let mut joined = joined.run(|joined| {
        let node = &mut joined.nodes[0];
        node.start_agent()?;
        check_routes(node)?;
        node.kill_agent()?;
        let is_other = Cell::new(false);
        let prepare = |node: &mut Node| -> Result<()> {
            is_other.set(!is_other.get());
            node.set_flag(&format!("--overlay-port={PORT}"), is_other.get());
            Ok(())
        };
        let check = |node: &Node| -> Result<()> {
            check_routes(node)?;
            let device = ip(node.space(), &format!("-d link show {DEVICE}"))?;
            let has_other = device.contains(&format!("dstport {PORT}"));
            ensure!(has_other == is_other.get(), "another port {}: {device}", is_other.get());
            Ok(())
        };
        kill_starts(node, "another port", OTHER_PORT, &prepare, &check)?;
        let prepare =
            |node: &mut Node| -> Result<()> { ip(node.space(), &format!("link set {DEVICE} mtu 1300")).map(drop) };
        kill_starts(node, "another MTU", OTHER_MTU, &prepare, &check)?;
        kill_cleanups(node)
    })?;
    joined.nodes[0].start_agent()?;
    joined.end()
}

fn remove_if_there(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e).with_context(|| format!("remove {}", path.display())),
        _ => Ok(()),
    }
}

#[test]
fn a_start_with_a_feed_that_is_killed_at_any_point_is_completed() -> Result<()> {
    let flags = ["--node-name=a", "--prepared-programs=4", "--health-interval-ms=0", "--cluster-feed-group=daemon"];
    let mut node = Node::without_agent(NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None })?;
    let directory = node.dirs().root.join("feed");
    node.set_flag(&format!("--cluster-feed={}", directory.display()), true);
    let (socket, rows) = (directory.join("feed.sock"), node.dirs().state.join("feed.json"));
    let damaged = rows.with_file_name("feed.json.damaged");
    let check = |node: &Node| -> Result<()> {
        let mode = |path: &Path| fs::metadata(path).map(|meta| meta.permissions().mode() & 0o777);
        ensure!(mode(&directory)? == 0o750 && mode(&socket)? == 0o660, "{:?} {:?}", mode(&directory), mode(&socket));
        ensure!(fs::read_to_string(&damaged).context("the damaged file")? == "{");
        drop(produce(&socket, Small)?);
        wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())
    };
    let prepare = |_: &mut Node| -> Result<()> {
        remove_if_there(&directory)?;
        remove_if_there(&damaged)?;
        fs::write(&rows, "{").context("write a damaged file")
    };
    let outcome = kill_starts(&mut node, "the first start", FIRST_FEED, &prepare, &check)
        .and_then(|()| kill_starts(&mut node, "a later start", NEXT_FEED, &|_| Ok(()), &check))
        .and_then(|()| node.start_agent())
        .and_then(|()| node.finish());
    if outcome.is_err() {
        eprintln!("---- log of the agent\n{}---- end of the log", node.log());
    }
    outcome
}

#[test]
fn a_start_that_keeps_pools_and_nodes_and_is_killed_at_any_point_is_completed() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    set_pools(&mut joined.nodes[0], NAMES.len());
    joined.nodes[0].set_flag("--pools-from-cluster", true);
    let mut joined = joined.run(|joined| {
        let file = joined.file.clone();
        let node = &mut joined.nodes[0];
        let kept = ["pools.json", "cluster.json"].map(|name| node.dirs().state.join(name));
        let check = |node: &Node| -> Result<()> {
            check_routes(node)?;
            for path in &kept {
                ensure!(path.exists() && !path.with_extension("json.new").exists(), "{}", path.display());
            }
            Ok(())
        };
        let prepare = |_: &mut Node| -> Result<()> { kept.iter().try_for_each(|path| remove_if_there(path)) };
        kill_starts(node, "a start without kept files", KEPT, &prepare, &check)?;
        // What is kept is enough for a start.
        let away = file.with_extension("away");
        fs::rename(&file, &away).context("move the cluster file away")?;
        node.start_agent()?;
        await_routes(node, Large.routes()).context("without the cluster file")?;
        node.stop_agent()?;
        fs::rename(&away, &file).context("move the cluster file back")
    })?;
    joined.nodes[0].start_agent()?;
    joined.end()
}

#[test]
fn each_crash_point_of_the_cluster_is_in_the_list_of_a_scenario() -> Result<()> {
    let lists = [KEPT, TO_LARGE, TO_SMALL, OTHER_PORT, OTHER_MTU, CLEANUP, FIRST_FEED, NEXT_FEED];
    let listed: BTreeSet<&str> = lists.concat().into_iter().collect();
    let is_point = |text: &&str| LISTED.iter().any(|room| text.starts_with(room));
    let points: BTreeSet<&str> = SOURCES.iter().flat_map(|source| source.split('"')).filter(is_point).collect();
    ensure!(points == listed, "{:?}", points.symmetric_difference(&listed));
    Ok(())
}
