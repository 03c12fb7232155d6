//! Upgrade to another ABI version, and downgrade from it, while containers talk. The other version is the next one: the
//! same agent with another layout of `CONFIG` ([`wharf_common::abi`]).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use wharf_api::{EndpointState, MetricRow};
use wharf_common::ABI_VERSION;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, crash, echo, programs, scenario,
    stream::{TcpFlow, UdpStream},
    wait,
};

/// Name of the pin tree of this version, or of the next.
fn tree(next: bool) -> String {
    format!("v{}", ABI_VERSION + u32::from(next))
}

fn attach(node: &Node, count: usize) -> Result<Vec<(Sandbox, Attached)>> {
    let one = |n| {
        let sandbox = node.sandbox(&format!("c{n}"))?;
        let attached = node.attach(&sandbox)?;
        Ok((sandbox, attached))
    };
    (0..count).map(one).collect()
}

fn all_ready(node: &Node) -> Result<()> {
    wait::until("every endpoint to be ready", || {
        Ok(node.endpoints()?.iter().all(|e| e.state == EndpointState::Ready).then_some(()))
    })
}

/// Packets by endpoint, direction and reason.
type Counters = BTreeMap<(u16, String, String), u64>;

fn counters(node: &Node) -> Result<Counters> {
    let rows: Vec<MetricRow> = node.ask(async |client| client.metrics_rows().await)?;
    let of_endpoint = |r: MetricRow| Some(((r.endpoint?, r.direction, r.reason), r.packets));
    Ok(rows.into_iter().filter_map(of_endpoint).collect())
}

/// Every counter is at least what it was.
fn none_went_backward(before: &Counters, now: &Counters) -> Result<()> {
    for (row, packets) in before {
        let is = now.get(row).copied().unwrap_or(0);
        ensure!(is >= *packets, "the counter {row:?} went from {packets} to {is}");
    }
    Ok(())
}

/// Traffic between endpoints, in both families, and with the node.
struct Traffic {
    udp: Vec<UdpStream>,
    tcp: Vec<TcpFlow>,
}

impl Traffic {
    /// Between each two of `ends` that follow each other.
    fn start(node: &Node, ends: &[&(Sandbox, Attached)], rate: u32) -> Result<Self> {
        let (mut udp, mut tcp) = (Vec::new(), Vec::new());
        for pair in ends.windows(2) {
            let [(a, ea), (b, eb)] = pair else { continue };
            let (sa, sb) = (a.space()?, b.space()?);
            udp.push(UdpStream::start(sa, sb, eb.v4()?.into(), rate)?);
            udp.push(UdpStream::start(sb, sa, ea.v6()?.into(), rate)?);
            udp.push(UdpStream::start(node.space(), sb, eb.v4()?.into(), rate)?);
            udp.push(UdpStream::start(sa, node.space(), ea.gateways()?[0], rate)?);
            tcp.push(TcpFlow::start(sa, sb, eb.v4()?.into())?);
            tcp.push(TcpFlow::start(node.space(), sa, ea.v6()?.into())?);
        }
        Ok(Self { udp, tcp })
    }

    fn goes_on(&self) -> Result<()> {
        self.udp.iter().try_for_each(|stream| stream.await_more(20))?;
        self.tcp.iter().try_for_each(|flow| flow.await_more(5))
    }

    /// Ends it; nothing was lost.
    fn stop(self) -> Result<u64> {
        let mut received = 0;
        for stream in self.udp {
            let report = stream.stop()?;
            report.must_be_perfect()?;
            received += report.received;
        }
        self.tcp.into_iter().try_for_each(|flow| flow.stop()?.must_be_whole())?;
        Ok(received)
    }
}

/// One version has everything, and nothing is amiss.
fn is_whole(node: &Node, next: bool) -> Result<()> {
    all_ready(node)?;
    let trees = node.dirs().version_trees()?;
    ensure!(trees == BTreeSet::from([tree(next)]), "pin trees: {trees:?}");
    let left = node.audit()?.findings;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

#[test]
fn fifty_endpoints_are_upgraded_and_downgraded_under_load() -> Result<()> {
    const ENDPOINTS: usize = 50;
    for mode in ["clsact", "tcx"] {
        scenario(NodeConfig::default().flags(&["--attach-mode", mode]), |node| {
            let all = attach(node, ENDPOINTS)?;
            let ends: Vec<_> = [0, 1, ENDPOINTS / 2, ENDPOINTS - 1].iter().filter_map(|n| all.get(*n)).collect();
            for next in [true, false, true, false] {
                let traffic = Traffic::start(node, &ends, 300)?;
                let link = node.endpoint(&ends[0].1)?.host_ifname;
                let (before, programs) = (counters(node)?, programs::attached(node.space(), &link)?);
                if next {
                    node.stop_agent()?;
                } else {
                    node.kill_agent()?;
                }
                node.set_next_version(next);
                node.start_agent()?;
                traffic.goes_on()?;
                is_whole(node, next).with_context(|| format!("next version {next}, {mode}"))?;
                ensure!(programs::attached(node.space(), &link)? != programs, "the programs of before are in force");
                none_went_backward(&before, &counters(node)?)?;
                println!("{mode}: {}", node.log().lines().rfind(|l| l.contains("upgraded from")).unwrap_or_default());
                println!("{mode}: {} UDP packets, none lost", traffic.stop()?);
            }
            all.iter().try_for_each(|(_, attached)| node.detach(attached))
        })?;
    }
    Ok(())
}

/// The last thing that an upgrade does.
const LAST: &str = "datapath/upgrade/after-removal";

/// Points that a start which upgrades passes, up to the end of the upgrade: each once; those of the swap and the
/// removal, which come for each endpoint, once more, so that an endpoint in the middle is met too.
fn points(node: &mut Node) -> Result<Vec<String>> {
    crash::forget_trace(node.dirs())?;
    ensure!(node.start_armed_agent()?, "the agent died at a crash point that nobody wished for");
    let trace = crash::trace(node.dirs())?;
    let end = trace.iter().position(|point| point == LAST).context("the start did not upgrade")?;
    let mut points = Vec::new();
    let mut passed = BTreeMap::new();
    for name in trace.iter().take(end + 1) {
        let times = passed.entry(name).or_insert(0_u32);
        *times += 1;
        let of_each = name.starts_with("datapath/upgrade/") || name.starts_with("datapath/attach/");
        if *times <= 1 + u32::from(of_each) {
            points.push(format!("{name}:{times}"));
        }
    }
    Ok(points)
}

/// Kills an upgrade (or a downgrade) at each of its points, then starts the version `then`.
fn killed_at_each_point(mode: &str, to_next: bool, then_next: bool) -> Result<()> {
    scenario(NodeConfig::default().flags(&["--attach-mode", mode]), |node| {
        let all = attach(node, 3)?;
        let ends: Vec<_> = all.iter().collect();
        let is_of = |node: &mut Node, next: bool| {
            if node.has_agent() {
                node.kill_agent()?;
            }
            node.set_next_version(next);
            anyhow::Ok(())
        };
        is_of(node, !to_next)?;
        node.start_agent()?;
        is_of(node, to_next)?;
        let points = points(node)?;
        ensure!(points.len() > 20, "only {points:?}");
        let points = crash::share(points)?;
        for point in &points {
            let what = || {
                format!("{mode}, to the next version {to_next}, killed at {point}, then the next version {then_next}")
            };
            is_of(node, !to_next)?;
            node.start_agent()?;
            is_whole(node, !to_next).with_context(what)?;
            let before = counters(node)?;
            let traffic = Traffic::start(node, &ends, 300)?;
            is_of(node, to_next)?;
            crash::wish(node.dirs(), point)?;
            ensure!(!node.start_armed_agent()?, "{}: it was not killed", what());
            crash::forget_wish(node.dirs())?;
            traffic.goes_on().context("while no agent runs").with_context(what)?;
            is_of(node, then_next)?;
            node.start_agent().with_context(what)?;
            traffic.goes_on().with_context(what)?;
            is_whole(node, then_next).with_context(what)?;
            none_went_backward(&before, &counters(node)?).with_context(what)?;
            traffic.stop().with_context(what)?;
        }
        println!("{mode}: killed at each of {} points", points.len());
        is_of(node, false)?;
        node.start_agent()?;
        all.iter().try_for_each(|(_, attached)| node.detach(attached))
    })
}

#[test]
fn an_upgrade_killed_at_each_point_is_finished_by_the_next_start() -> Result<()> {
    killed_at_each_point("clsact", true, true)
}

#[test]
fn an_upgrade_killed_at_each_point_is_taken_back_by_the_old_version() -> Result<()> {
    killed_at_each_point("clsact", true, false)
}

#[test]
fn an_upgrade_with_tcx_killed_at_each_point_is_finished_by_the_next_start() -> Result<()> {
    killed_at_each_point("tcx", true, true)
}

#[test]
fn an_upgrade_with_tcx_killed_at_each_point_is_taken_back_by_the_old_version() -> Result<()> {
    killed_at_each_point("tcx", true, false)
}

#[test]
fn a_downgrade_killed_at_each_point_is_finished_by_the_next_start() -> Result<()> {
    killed_at_each_point("clsact", false, false)
}

#[test]
fn an_upgrade_that_fails_in_the_middle_leaves_the_old_version_in_force() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let all = attach(node, 5)?;
        let ends: Vec<_> = all.iter().collect();
        let traffic = Traffic::start(node, &ends, 300)?;
        let third = node.endpoint(&all[2].1)?;
        let in_force = programs::attached(node.space(), &third.host_ifname)?;
        node.stop_agent()?;
        // A directory in the place of a pin: the third endpoint's programs load, and cannot be pinned.
        let endpoints = node.dirs().bpffs.join("wharf").join(tree(true)).join("endpoints");
        let in_the_way = endpoints.join(third.id.to_string()).join("deliver");
        std::fs::create_dir_all(&in_the_way).context("make a directory in a pin's place")?;
        node.set_next_version(true);
        let refused = node.run_agent_to_end(&[])?;
        ensure!(refused.code() > 0, "it was to refuse: {}", refused.describe());
        for part in
            ["upgrade endpoints", "deliver", "in force as before", &format!("the version that uses {}", tree(false))]
        {
            ensure!(refused.stderr.contains(part), "{part} is missing: {}", refused.describe());
        }
        traffic.goes_on()?;
        ensure!(programs::attached(node.space(), &third.host_ifname)? == in_force, "other programs are in force");
        let left: Vec<_> = std::fs::read_dir(&endpoints).context("read the pins")?.collect();
        ensure!(left.len() == 1, "left of the attempt: {left:?}");
        // The old version starts, and says what is in its way.
        node.set_next_version(false);
        node.start_agent()?;
        all_ready(node)?;
        ensure!(node.log().contains("it holds what is not ours"), "{}", node.log());
        traffic.goes_on()?;
        node.stop_agent()?;
        std::fs::remove_dir(&in_the_way).context("remove the directory")?;
        for next in [true, false] {
            node.set_next_version(next);
            node.start_agent()?;
            is_whole(node, next)?;
            traffic.goes_on()?;
            node.stop_agent()?;
        }
        node.start_agent()?;
        traffic.stop()?;
        all.iter().try_for_each(|(_, attached)| node.detach(attached))
    })
}

/// Without records nothing can be taken over: the containers keep the old version's programs until they are deleted.
#[test]
fn containers_without_records_keep_their_network_through_an_upgrade() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let all = attach(node, 2)?;
        let ends: Vec<_> = all.iter().collect();
        let traffic = Traffic::start(node, &ends, 300)?;
        node.kill_agent()?;
        std::fs::remove_file(node.dirs().run.join("state.redb")).context("lose the store")?;
        node.set_next_version(true);
        for start in 0..2 {
            node.start_agent()?;
            traffic.goes_on()?;
            let trees = node.dirs().version_trees()?;
            ensure!(trees == BTreeSet::from([tree(false), tree(true)]), "start {start}: {trees:?}");
            let named: Vec<_> =
                node.audit()?.findings.into_iter().map(|f| format!("{} {}", f.object, f.subject)).collect();
            for link in node.endpoint_links()? {
                ensure!(named.iter().any(|f| f.contains(&link)), "start {start}: {link} is not named: {named:?}");
            }
            if start == 0 {
                node.kill_agent()?;
            }
        }
        // Their addresses are not given out again, and a new container reaches them.
        let later = node.sandbox("later")?;
        let attached = node.attach(&later)?;
        let taken: Vec<_> = all.iter().map(|(_, e)| e.v4()).collect::<Result<_>>()?;
        ensure!(!taken.contains(&attached.v4()?), "{} is an address that is in use", attached.v4()?);
        let stream = UdpStream::start(later.space()?, all[0].0.space()?, all[0].1.v4()?.into(), 300)?;
        stream.await_more(20)?;
        stream.stop()?.must_be_perfect()?;
        traffic.stop()?;
        for (_, attached) in &all {
            node.detach(attached)?;
        }
        let trees = node.dirs().version_trees()?;
        ensure!(trees == BTreeSet::from([tree(true)]), "after the last of the old version: {trees:?}");
        let server = echo::EchoServer::start(node.space())?;
        echo::udp(later.space()?, server.udp_at(attached.gateways()?[0]), 10)?;
        drop(server);
        node.detach(&attached)
    })
}
