//! What two containers on different nodes get out of a wire: Wharf's routes and overlay beside those of the kernel.

use std::{fs, net::Ipv4Addr, time::Duration};

use anyhow::{Context, Result, ensure};

use super::{
    findings::{Better, Group, Mark, Part},
    traffic::{Traffic, bulk, paired, side_by_side, tcp_round_trips, udp_round_trips},
    wires::Wire,
};
use crate::{
    Node, Sandbox,
    cluster::{Nodes, address, pool, routes},
    process::{command_in, ip, run},
    space::Space,
    wait,
};

const NATIVE: [&str; 2] = ["wharf, native", "plain routing"];
const OVERLAY: [&str; 2] = ["wharf, overlay", "plain VXLAN"];
/// A time of at most 1.05.
const LEAST: f64 = 1.0 / 1.05;

const TRAFFIC: [Traffic; 3] = [
    ("TCP request/response between nodes, 1 byte, two processes on one CPU", "transactions/s", tcp_round_trips),
    ("UDP request/response between nodes, 1 byte, two processes on one CPU", "transactions/s", udp_round_trips),
    ("TCP bulk between nodes, each end on a CPU of its own", "Gbit/s", bulk),
];

/// All kinds of traffic on all wires, `span` each time, in rounds whose order rotates. The kernel's ways have the
/// nftables table of Wharf, too.
///
/// # Errors
/// When a wire cannot be made or breaks.
pub fn measure(rounds: usize, span: Duration) -> Result<Part> {
    let native = wharf(NATIVE[0], "native")?;
    let table = native.1;
    let wires = [
        Wire::direct()?,
        native.0,
        plain(NATIVE[1], false, &table)?,
        wharf(OVERLAY[0], "overlay")?.0,
        plain(OVERLAY[1], true, &table)?,
    ];
    let pairs = [(NATIVE[0], NATIVE[1]), (OVERLAY[0], OVERLAY[1])];
    let groups: Vec<Group> = TRAFFIC
        .into_iter()
        .map(|traffic| side_by_side(traffic, &wires, rounds, span, &pairs))
        .collect::<Result<_>>()?;
    let mut marks = Vec::new();
    for group in groups.iter().take(2) {
        for (ours, base) in pairs {
            if let Some(spread) = paired(group, ours, base) {
                let target = format!("{}: {ours} at least {LEAST:.3} of {base}", group.title);
                marks.push(Mark::judge(&target, "x", Better::Higher, spread.median, LEAST));
            }
        }
    }
    wires.into_iter().try_for_each(Wire::finish)?;
    Ok((groups, marks))
}

/// An endpoint on each of two nodes, and the nftables table of the first.
fn wharf(name: &'static str, routing: &str) -> Result<(Wire, String)> {
    let joined = Nodes::start(2, routing)?;
    let [a, b] = joined.nodes.as_slice() else { anyhow::bail!("{} nodes", joined.nodes.len()) };
    wait::until("routes of both nodes", || {
        let both = [routes(a)?, routes(b)?];
        Ok((both.iter().all(|routes| routes.len() == 2)).then_some(()))
    })?;
    let by_overlay = routes(a)?.iter().all(|route| route.contains("overlay"));
    ensure!(by_overlay == (routing == "overlay"), "{:?}", routes(a)?);
    let (left, right) = (a.sandbox("left")?, b.sandbox("right")?);
    a.attach(&left)?;
    let address = b.attach(&right)?.v4()?.into();
    let table = nft(a.space(), &["list", "table", "inet", "wharf"], "")?;
    Ok((Wire::of_nodes(name, [left, right], address, joined, true), table))
}

/// The same without an agent.
fn plain(name: &'static str, overlay: bool, table: &str) -> Result<Wire> {
    let joined = Nodes::join(2, "native")?;
    let mut containers = Vec::new();
    for (n, node) in joined.nodes.iter().enumerate() {
        containers.push(container(node, n)?);
        let (own, other) = (address(n, false), address(1 - n, false));
        let hop = if overlay {
            let link = format!("link add vx0 type vxlan id 88 local {own} remote {other} dstport 4789 nolearning");
            ip(node.space(), &link)?;
            ip(node.space(), "link set vx0 mtu 1450 up")?;
            ip(node.space(), &format!("addr add 10.99.0.{}/24 dev vx0", n + 1))?;
            format!("10.99.0.{}", 2 - n)
        } else {
            other
        };
        ip(node.space(), &format!("route add {} via {hop}", pool(1 - n, false)))?;
        nft(node.space(), &["-f", "-"], table)?;
    }
    let [left, right] = <[Sandbox; 2]>::try_from(containers).map_err(|_| anyhow::anyhow!("not two containers"))?;
    Ok(Wire::of_nodes(name, [left, right], Ipv4Addr::new(10, 87, 1, 2).into(), joined, false))
}

/// A container with the address that Wharf would give it, behind a veth pair of the node, which forwards. The rules of
/// the table know containers by the name of their link.
fn container(node: &Node, n: usize) -> Result<Sandbox> {
    let (sandbox, gateway) = (node.sandbox(if n == 0 { "left" } else { "right" })?, format!("10.87.{n}.1"));
    let to = sandbox.path().display().to_string();
    ip(node.space(), &format!("link add wh0 type veth peer name eth0 netns {to}"))?;
    ip(node.space(), &format!("addr add {gateway}/24 dev wh0"))?;
    ip(node.space(), "link set wh0 up")?;
    ip(sandbox.space()?, &format!("addr add 10.87.{n}.2/24 dev eth0"))?;
    ip(sandbox.space()?, "link set eth0 up")?;
    ip(sandbox.space()?, &format!("route add default via {gateway}"))?;
    node.space().run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?.context("let the node forward")?;
    Ok(sandbox)
}

fn nft(space: &Space, arguments: &[&str], input: &str) -> Result<String> {
    let mut command = command_in(space, "nft")?;
    command.args(arguments);
    run(command, input.as_bytes(), wait::PATIENCE)?.ok()
}
