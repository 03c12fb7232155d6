//! `--routing auto` probes direct paths: some networks drop packets with addresses of containers.

use std::{fs, net::IpAddr};

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Node,
    cluster::{Container, Nodes, address, await_routes, component, pool, routes, to as native, with},
    echo,
    process::{command_in, ip, run},
    stream::UdpStream,
    wait,
};

/// In the place of such a network: the node receives no packet from a container by its uplink.
const STRICT: &str = "table inet between {
    chain received {
        type filter hook prerouting priority -300;
        iifname up0 ip saddr 10.87.0.0/16 drop
        iifname up0 ip6 saddr fd87::/32 drop
    }
}
";

/// Counts echo requests to the router addresses of node b.
const COUNT: &str = "table inet probes {
    chain received {
        type filter hook input priority 0;
        ip daddr 10.87.1.1 icmp type echo-request counter
        ip6 daddr fd87:0:0:2::1 icmpv6 type echo-request counter
    }
}
";

fn nft(node: &Node, arguments: &[&str], rules: &str) -> Result<String> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(arguments);
    run(command, rules.as_bytes(), wait::PATIENCE)?.ok()
}

/// Node `n` in the file, with its router addresses.
fn row(n: usize) -> Result<String> {
    let routers: [IpAddr; 2] = [format!("10.87.{n}.1").parse()?, format!("fd87:0:0:{}::1", n + 1).parse()?];
    Ok(with(n, "router-addresses", &routers))
}

/// Routes of node `n` to the other one of two.
fn by_overlay(n: usize) -> Vec<String> {
    let (own, other) = (address(n, false), address(1 - n, false));
    [false, true].map(|v6| format!("{} overlay to {other} from {own} mtu 1450", pool(1 - n, v6))).to_vec()
}

#[test]
fn packets_take_the_overlay_where_the_network_drops_addresses_of_containers() -> Result<()> {
    Nodes::join(2, "auto")?.run(packets_take_the_overlay)?.end()
}

fn packets_take_the_overlay(joined: &mut Nodes) -> Result<()> {
    joined.write(&[row(0)?, row(1)?].concat())?;
    for node in &mut joined.nodes {
        nft(node, &["-f", "-"], STRICT)?;
        node.start_agent()?;
    }
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    for node in [a, b] {
        let is_refused = || Ok(component(node)?.1.contains("to 1 near node because").then_some(()));
        wait::until("the verdict", is_refused)?;
    }
    await_routes(a, by_overlay(0))?;
    await_routes(b, by_overlay(1))?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    for (near, far) in [(&one, &two), (&two, &one)] {
        for address in far.end.both()? {
            echo::tcp(near.space()?, far.echo.tcp_at(address), 10_000)?;
        }
    }
    let (health, message) = component(a)?;
    ensure!(health == "ok" && message.contains("2 by the overlay, to 1 near node because"), "{health}: {message}");
    a_verdict_survives_a_restart(joined, &one, &two)?;
    joined.nodes[0].detach(&one.end)?;
    joined.nodes[1].detach(&two.end)?;
    Ok(())
}

/// Of node a, which has refused the path to node b.
fn a_verdict_survives_a_restart(joined: &mut Nodes, one: &Container, two: &Container) -> Result<()> {
    let mut expected = by_overlay(0);
    expected.sort();
    let a = &mut joined.nodes[0];
    let kept = a.dirs().state.join("paths.json");
    let is_kept = || Ok(fs::read_to_string(&kept).is_ok_and(|text| text.contains("198.51.100.2")).then_some(()));
    wait::until("the file of refused paths", is_kept)?;
    // A direct route loses packets.
    let stream = UdpStream::start(one.space()?, two.space()?, two.end.v4()?.into(), 200)?;
    a.kill_agent()?;
    a.start_agent()?;
    ensure!(routes(a)? == expected, "{:?}", routes(a)?);
    await_runs(a, 3)?;
    ensure!(routes(a)? == expected, "{:?}", routes(a)?);
    stream.await_more(100)?;
    stream.stop()?.must_be_perfect()?;
    // As after a boot: no route is there.
    a.stop_agent()?;
    ip(a.space(), "-4 route flush proto 88")?;
    ip(a.space(), "-6 route flush proto 88")?;
    a.start_agent()?;
    ensure!(routes(a)? == expected, "{:?}", routes(a)?);
    let (_, message) = component(a)?;
    ensure!(message.contains("to 1 near node because"), "{message}");
    Ok(())
}

/// Packets of each rule of [`COUNT`].
fn probes(node: &Node) -> Result<Vec<u64>> {
    let listed = nft(node, &["list", "table", "inet", "probes"], "")?;
    let words: Vec<&str> = listed.split_whitespace().collect();
    let counts = words.windows(2).filter(|pair| pair.first() == Some(&"packets"));
    counts.map(|pair| pair.last().context("a count")?.parse::<u64>().context("parse a count")).collect()
}

/// Waits until the node's agent has ended so many further runs of the probes.
fn await_runs(node: &Node, further: u64) -> Result<()> {
    let runs = || -> Result<u64> {
        let status = node.ask(async |client| client.status().await)?;
        let probes = status.controllers.into_iter().find(|controller| controller.name == "direct-paths");
        Ok(probes.context("no controller of the probes")?.successes)
    };
    let first = runs()?;
    wait::until("runs of the probes", || Ok((runs()? >= first + further).then_some(())))
}

#[test]
fn packets_keep_the_direct_path_to_a_node_whose_agent_is_killed() -> Result<()> {
    let mut joined = Nodes::start(2, "auto")?;
    await_routes(&joined.nodes[0], native(1))?;
    await_routes(&joined.nodes[1], native(0))?;
    joined.nodes[1].kill_agent()?;
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    nft(b, &["-f", "-"], COUNT)?;
    // Without router addresses, there was no probe.
    joined.write(&[row(0)?, row(1)?].concat())?;
    wait::until("a probe of each family", || Ok(probes(b)?.iter().all(|count| *count > 0).then_some(())))?;
    await_runs(a, 2)?;
    let answered = probes(b)?;
    // A path without an answer would be probed again.
    await_runs(a, 3)?;
    ensure!(probes(b)? == answered, "{answered:?}, then {:?}", probes(b)?);
    let mut expected = native(1);
    expected.sort();
    ensure!(routes(a)? == expected, "{:?}", routes(a)?);
    joined.nodes[1].start_agent()?;
    joined.end()
}
