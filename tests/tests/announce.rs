//! `--announce`: pools that are a part of the network of an uplink, whose neighbours look for containers on the link.

use std::fs;

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Node, NodeConfig, icmp,
    process::{Finished, bin, ip, run},
    wait,
    world::World,
};

/// Parts of the world's networks.
const POOLS: [&str; 2] = ["--ipv4-pool=198.51.100.128/25", "--ipv6-pool=2001:db8:7:0:1::/80"];
/// The other proxy entry on the uplink, which somebody else made.
const THEIRS: &str = "198.51.100.77";
const ANNOUNCE: &str = "--announce";

fn node() -> Result<(Node, World)> {
    let node =
        Node::without_agent(NodeConfig::default().flags(&POOLS).flags(&["--masquerade-exclude=198.51.100.0/24"]))?;
    let world = World::join(&node)?;
    ip(node.space(), &format!("neigh add proxy {THEIRS} dev up0"))?;
    Ok((node, world))
}

/// The addresses that the node answers for; everybody's, by their command's order.
fn announced(node: &Node) -> Result<Vec<String>> {
    let mut all = ip(node.space(), "-4 neigh show proxy")?;
    all.push_str(&ip(node.space(), "-6 neigh show proxy")?);
    let mut addresses: Vec<String> = all.lines().filter_map(|l| l.split(' ').next().map(str::to_owned)).collect();
    addresses.sort();
    Ok(addresses)
}

fn proxies_ndp(node: &Node) -> Result<bool> {
    let path = "/proc/sys/net/ipv6/conf/up0/proxy_ndp";
    Ok(node.space().run(|| fs::read_to_string(path))?.context(path)?.trim() == "1")
}

fn cleanup(node: &Node) -> Result<Finished> {
    let mut command = node.command(bin("wharf-agent")?)?;
    command.args(["cleanup", "--force"]).args(node.dirs().flags()).env("NO_COLOR", "1");
    run(command, b"", wait::PATIENCE)
}

#[test]
fn neighbours_find_containers_on_their_link_when_asked_for_and_nothing_outlives_them() -> Result<()> {
    let (mut node, world) = node()?;
    let refused = node.run_agent_to_end(&[])?;
    ensure!(refused.code() == 1 && refused.stderr.contains("198.51.100.128/25"), "{}", refused.describe());
    ensure!(!proxies_ndp(&node)? && announced(&node)? == [THEIRS], "a refused start changed the node");

    node.set_flag(ANNOUNCE, true);
    node.start_agent()?;
    let (one, two) = (node.sandbox("one")?, node.sandbox("two")?);
    let reached = |who: &wharf_tests::Attached| -> Result<()> {
        who.both()?.into_iter().try_for_each(|address| icmp::ping(world.space()?, address)?.must_answer().map(drop))
    };
    let expected = |ends: &[&wharf_tests::Attached]| -> Result<Vec<String>> {
        let mut all: Vec<String> = ends.iter().flat_map(|e| e.addresses()).map(|a| a.to_string()).collect();
        all.push(THEIRS.to_owned());
        all.sort();
        Ok(all)
    };
    let (first, second) = (node.attach(&one)?, node.attach(&two)?);
    reached(&first).context("the first container")?;
    reached(&second).context("the second container")?;
    ensure!(proxies_ndp(&node)? && announced(&node)? == expected(&[&first, &second])?, "{:?}", announced(&node)?);
    let findings = node.audit()?.findings;
    ensure!(findings.is_empty(), "{findings:?}");
    let status = node.wharf(&["status"])?.stdout;
    ensure!(status.contains("net.ipv6.conf.up0.proxy_ndp"), "what was set is not told: {status}");

    node.detach(&first)?;
    ensure!(announced(&node)? == expected(&[&second])?, "after DEL: {:?}", announced(&node)?);

    // Entries outlive the agent, as the containers do.
    node.kill_agent()?;
    ip(world.space()?, "neigh flush all")?;
    reached(&second).context("without an agent")?;
    node.detach(&second)?;
    node.start_agent()?;
    ensure!(announced(&node)? == [THEIRS], "after a DEL without an agent: {:?}", announced(&node)?);

    // What nobody explains is taken away.
    node.kill_agent()?;
    ip(node.space(), "neigh add proxy 198.51.100.200 dev up0 protocol 87")?;
    node.start_agent()?;
    ensure!(announced(&node)? == [THEIRS], "a stray entry outlived a start: {:?}", announced(&node)?);
    ip(node.space(), "neigh add proxy 198.51.100.200 dev up0 protocol 87")?;
    wait::until("a stray entry goes", || Ok((announced(&node)? == [THEIRS]).then_some(())))?;
    let findings = node.audit()?.findings;
    ensure!(findings.is_empty(), "{findings:?}");

    let third = node.attach(&one)?;
    node.kill_agent()?;
    let done = cleanup(&node)?.ok()?;
    for part in [format!("announcement of {}", third.v4()?), "net.ipv6.conf.up0.proxy_ndp".to_owned()] {
        ensure!(done.contains(&part), "{part} is not in:\n{done}");
    }
    ensure!(!proxies_ndp(&node)? && announced(&node)? == [THEIRS], "{:?}", announced(&node)?);
    Ok(())
}

#[test]
fn neighbours_that_know_another_for_an_address_learn_of_the_node_and_off_takes_everything_back() -> Result<()> {
    let (mut node, world) = node()?;
    node.set_flag(ANNOUNCE, true);
    node.start_agent()?;
    let sandbox = node.sandbox("one")?;
    let end = node.attach(&sandbox)?;
    let of_uplink = ip(node.space(), "-o link show up0")?;
    let mac = of_uplink.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next()).context("no MAC")?;
    for address in end.addresses() {
        ip(world.space()?, &format!("neigh replace {address} lladdr 02:00:00:00:00:99 dev eth0 nud reachable"))?;
        ip(node.space(), &format!("neigh del proxy {address} dev up0"))?;
    }
    for address in end.addresses() {
        wait::until("the neighbour knows the node's link for it", || {
            Ok(ip(world.space()?, &format!("neigh show {address}"))?.contains(mac).then_some(()))
        })?;
    }
    // The pools were served before, so that a start goes on with them.
    node.stop_agent()?;
    node.set_flag(ANNOUNCE, false);
    node.start_agent()?;
    ensure!(!proxies_ndp(&node)? && announced(&node)? == [THEIRS], "{:?}", announced(&node)?);
    ensure!(!node.dirs().run.join("settings.announce.json").exists(), "a record of what was taken back");
    node.detach(&end)?;
    node.stop_agent()?;
    cleanup(&node)?.ok().map(drop)
}
