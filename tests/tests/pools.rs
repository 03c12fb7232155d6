//! `--pools-from-cluster`: the pools follow the pod CIDRs of this node's row.

use std::{fs, net::IpAddr, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use redb::{Database, TableDefinition};
use wharf_feed::v1;
use wharf_tests::{
    Attached, Node, NodeConfig,
    feed::{Producer, begin, complete, delete, node as row, opening},
    icmp,
    process::ip,
    stream::UdpStream,
    wait,
};

/// Name of the node, as of [`NodeConfig::default`].
const OWN: &str = "quay";
const KINDS: [&str; 2] = ["node", "pod"];
const FIRST: [&str; 2] = ["10.91.0.0/24", "fd91::/64"];
const SECOND: [&str; 2] = ["10.92.0.0/24", "fd92::/64"];
/// Two restarts have 30 s between them.
const RESTARTS: Duration = Duration::from_secs(90);
/// More than two comparisons of row and pools.
const LOOKS: Duration = Duration::from_secs(5);
/// Between two questions, so that they do not disturb the packets.
const PAUSE: Duration = Duration::from_millis(50);
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

/// A node whose agent has `--pools-from-cluster` and another flag.
fn following(flag: impl FnOnce(&Node) -> Result<String>, body: impl FnOnce(&mut Node) -> Result<()>) -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let flag = flag(&node)?;
    node.set_flag("--pools-from-cluster", true);
    node.set_flag(&flag, true);
    let outcome = node.start_agent().and_then(|()| body(&mut node)).and_then(|()| node.finish());
    if outcome.is_err() {
        eprintln!("---- log of the agent\n{}---- end of the log", node.log());
    }
    outcome
}

/// A producer whose row of this node has these pod CIDRs.
fn report(node: &Node, pod_cidrs: &[&str]) -> Result<Producer> {
    let socket = node.dirs().root.join("feed/feed.sock");
    let mut producer = Producer::opened(&socket, opening("kube", "one", OWN, &KINDS))?;
    let begins = KINDS.into_iter().map(begin);
    let rows = [row(OWN, &["198.51.100.1"], pod_cidrs)];
    let changes = begins.chain(rows).chain(KINDS.into_iter().map(complete)).collect();
    // Fails if the agent restarts before it answers.
    let _ = producer.send(changes);
    Ok(producer)
}

fn await_pools(node: &Node, expected: [&str; 2]) -> Result<()> {
    wait::until_within(RESTARTS, "the pools of the row", || {
        thread::sleep(PAUSE);
        // No answer while the agent restarts.
        let view = node.ask(async |client| client.ipam().await).ok();
        let cidrs: Vec<String> = view.into_iter().flat_map(|view| view.pools).flat_map(|pool| pool.cidrs).collect();
        Ok((cidrs == expected).then_some(()))
    })?;
    let status = node.ask(async |client| client.status().await)?;
    ensure!(status.pid == node.agent_pid()?, "another process: {}", status.pid);
    Ok(())
}

/// Message of the component `ipam`.
fn ipam(node: &Node) -> Result<String> {
    let status = node.ask(async |client| client.status().await)?;
    let row = status.components.into_iter().find(|row| row.name == "ipam").context("no component ipam")?;
    Ok(row.message)
}

fn is_in(end: &Attached, networks: [&str; 2]) -> Result<bool> {
    let inside = |(ip, net): (IpAddr, &str)| {
        // Networks of whole bytes.
        let (base, length) = net.split_once('/').context("a network")?;
        let octets = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let bytes = length.parse::<usize>()? / 8;
        anyhow::Ok(octets(ip).get(..bytes) == octets(base.parse()?).get(..bytes))
    };
    let all: Result<Vec<bool>> = end.both()?.into_iter().zip(networks).map(inside).collect();
    Ok(all?.into_iter().all(|inside| inside))
}

#[test]
fn the_pools_follow_the_row_and_running_containers_lose_no_packet() -> Result<()> {
    let feed =
        |node: &Node| -> Result<String> { Ok(format!("--cluster-feed={}", node.dirs().root.join("feed").display())) };
    following(feed, |node| {
        let (one, two, three) = (node.sandbox("one")?, node.sandbox("two")?, node.sandbox("three")?);
        let refused = node.cni("ADD").of("one", one.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(refused.code == 11 && refused.text().contains("no pod CIDRs yet"), "{refused:?}");
        let status = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
        ensure!(status.code == 50, "{status:?}");
        ensure!(node.wharf(&["status", "--ready"])?.code() != 0, "ready without pools");

        let producer = report(node, &FIRST)?;
        await_pools(node, FIRST)?;
        drop(producer);
        let ends = [node.attach(&one)?, node.attach(&two)?];
        ensure!(is_in(&ends[0], FIRST)? && is_in(&ends[1], FIRST)?, "{ends:?}");
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()?;

        // At most one restart in 30 s.
        let stream = UdpStream::start(one.space()?, two.space()?, ends[1].v4()?.into(), 200)?;
        let producer = report(node, &SECOND)?;
        wait::until("the change is shown", || Ok(ipam(node)?.contains("10.92.0.0/24, fd92::/64").then_some(())))?;
        await_pools(node, SECOND)?;
        node.await_rebuilt()?;
        stream.await_more(100)?;
        stream.stop()?.must_be_perfect()?;
        drop(producer);

        let third = node.attach(&three)?;
        ensure!(is_in(&third, SECOND)?, "{third:?}");
        for (end, before) in [&one, &two].into_iter().zip(&ends) {
            ensure!(node.endpoint(before)?.ipv4 == Some(before.v4()?), "{before:?}");
            for (address, gateway) in before.both()?.into_iter().zip(before.gateways()?) {
                icmp::ping(three.space()?, address)?.must_answer()?;
                icmp::ping(end.space()?, gateway)?.must_answer().context("the former gateway")?;
            }
            for address in third.both()? {
                icmp::ping(end.space()?, address)?.must_answer()?;
            }
        }
        let message = ipam(node)?;
        ensure!(message.contains("4 leased addresses are in no pool today"), "{message}");

        // A boot without a producer.
        for end in ends.iter().chain([&third]) {
            node.detach(end)?;
        }
        node.await_released()?;
        node.kill_agent()?;
        let database = Database::open(node.dirs().run.join("state.redb")).context("open the store")?;
        let txn = database.begin_write()?;
        txn.open_table(META)?.insert("boot-id", b"11111111-2222-3333-4444-555555555555".as_slice())?;
        txn.commit().context("write the boot id")?;
        drop(database);
        node.start_agent()?;
        await_pools(node, SECOND)?;
        let third = node.attach(&three)?;
        ensure!(is_in(&third, SECOND)?, "{third:?}");
        node.detach(&third)
    })
}

#[test]
fn no_container_gets_an_address_that_another_node_has_and_the_pools_stay() -> Result<()> {
    let feed =
        |node: &Node| -> Result<String> { Ok(format!("--cluster-feed={}", node.dirs().root.join("feed").display())) };
    following(feed, |node| {
        drop(report(node, &FIRST)?);
        await_pools(node, FIRST)?;
        let (one, two) = (node.sandbox("one")?, node.sandbox("two")?);
        let end = node.attach(&one)?;
        let mut producer = report(node, &FIRST)?;
        let other = |pod_cidrs: &[&str]| row("other", &["198.51.100.2"], pod_cidrs);
        let is_refused = |why: &str| -> Result<()> {
            let refused = node.cni("ADD").of("two", two.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
            ensure!(refused.code == 11 && refused.text().contains(why), "{refused:?}");
            Ok(())
        };
        // Both rows claim a network. A restart would lose it.
        producer.send(vec![other(&FIRST[1..])])?;
        producer.settle()?;
        is_refused("pod CIDRs 10.91.0.0/24")?;
        thread::sleep(LOOKS);
        let message = ipam(node)?;
        ensure!(!message.contains("are used in"), "{message}");
        let is_unready = |report: &v1::Report| {
            report.conditions.iter().any(|c| c.name == "Ready" && !c.holds && c.message.contains("10.91.0.0/24"))
        };
        while !producer.report().is_some_and(is_unready) {
            producer.answer()?.context("the stream has ended")?;
        }
        // An update of this node's row is refused, so the other row has the network. Then this node has no row.
        producer.send(vec![row(OWN, &[], &FIRST)])?;
        producer.settle()?;
        is_refused("fd91::/64 of node other")?;
        producer.send(vec![delete("node", OWN)])?;
        producer.settle()?;
        is_refused("fd91::/64 of node other")?;
        producer.send(vec![row(OWN, &["198.51.100.1"], &FIRST), other(&[])])?;
        producer.settle()?;
        let second = node.attach(&two)?;
        ensure!(is_in(&end, FIRST)? && is_in(&second, FIRST)?, "{end:?} {second:?}");
        node.detach(&end)?;
        node.detach(&second)
    })
}

#[test]
fn the_entry_of_the_cluster_file_has_the_pools_and_pod_cidrs_that_cannot_be_pools_change_nothing() -> Result<()> {
    let entry = |pod_cidrs: &[&str]| {
        format!("[[node]]\nname = {OWN:?}\naddresses = [\"198.51.100.1\"]\npod-cidrs = {pod_cidrs:?}\n")
    };
    let file = |node: &Node| -> Result<String> {
        let file = node.dirs().root.join("nodes.toml");
        fs::write(&file, entry(&FIRST)).context("write the cluster file")?;
        Ok(format!("--cluster-file={}", file.display()))
    };
    following(file, |node| {
        await_pools(node, FIRST)?;
        let one = node.sandbox("one")?;
        let end = node.attach(&one)?;
        ensure!(is_in(&end, FIRST)?, "{end:?}");
        fs::write(node.dirs().root.join("nodes.toml"), entry(&["10.92.0.1/32"]))?;
        wait::until("the refusal", || {
            let message = ipam(node)?;
            Ok((message.contains("10.92.0.1/32 of this node's row") && message.contains("too small")).then_some(()))
        })?;
        await_pools(node, FIRST)?;

        // Rows that change while the agent is stopped, and do not fit.
        ip(node.space(), "link add other type veth peer name other0")?;
        ip(node.space(), "link set other up")?;
        ip(node.space(), "addr add 10.93.0.7/32 dev other")?;
        let taken = format!("{}/31", end.v4()?);
        for (row, why) in [(taken.as_str(), "router address"), ("10.93.0.0/24", "10.93.0.7")] {
            node.stop_agent()?;
            fs::write(node.dirs().root.join("nodes.toml"), entry(&[row]))?;
            node.start_agent().context("with the pools of before")?;
            await_pools(node, FIRST)?;
            let log = node.log();
            let mut lines = log.lines().filter(|line| line.contains("the pools that were last in use, 10.91.0.0/24"));
            ensure!(lines.any(|line| line.contains(row)), "the log does not name {row}");
            let message = ipam(node)?;
            ensure!(message.contains(row) && message.contains(why), "{message}");
            let status = node.wharf(&["cluster", "status"])?;
            ensure!(status.code() == 1 && status.stdout.contains(row), "{}", status.describe());
        }
        icmp::ping(one.space()?, end.gateways()?[0])?.must_answer()?;
        fs::write(node.dirs().root.join("nodes.toml"), entry(&SECOND))?;
        await_pools(node, SECOND)?;
        wait::until("the end of the start", || {
            let kept = fs::read_to_string(node.dirs().state.join("pools.json"))?;
            Ok((kept.contains(SECOND[0]) && !kept.contains(FIRST[0])).then_some(()))
        })?;
        let both = node.run_agent_to_end(&["--ipv4-pool=10.1.0.0/24", "--check-config"])?;
        ensure!(both.code() == 3 && both.stderr.contains("on beside ipv4-pool"), "{}", both.describe());
        node.detach(&end)
    })
}
