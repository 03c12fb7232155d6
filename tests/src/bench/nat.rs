//! What masquerading and published ports cost: an ADD, and the first packet of a flow to a port.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    findings::{Better, Group, Part},
    plugin::Plugin,
};
use crate::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    world::{NODE, World},
};

const ON: &str = "masquerade on";
const OFF: &str = "masquerade off";
const PORTS: &str = "masquerade on, two ports";
const PORTMAP: &str = "ptp with ipMasq, portmap with two ports";
/// Ports of the container that publishes many.
const MANY: u16 = 1_000;

/// ADD with and without each, and the first packet to one port of one and of many.
///
/// # Errors
/// When a plugin fails.
pub fn measure(agent: &NodeConfig, rounds: usize, packets: usize) -> Result<Part> {
    let adds = adds(agent, rounds)?;
    let first = first_packets(agent, packets)?;
    Ok((vec![adds, first], Vec::new()))
}

fn mapping(port: u16, to: u16, protocol: &str) -> Value {
    json!({"hostPort": port, "containerPort": to, "protocol": protocol})
}

fn adds(agent: &NodeConfig, rounds: usize) -> Result<Group> {
    let two = json!([mapping(8080, 80, "tcp"), mapping(8443, 443, "tcp")]);
    let none = json!([]);
    let mut plugins = vec![
        Plugin::wharf_as(ON, agent, &none)?,
        Plugin::wharf_as(OFF, &agent.clone().flags(&["--masquerade=off"]), &none)?,
        Plugin::wharf_as(PORTS, agent, &two)?,
    ];
    let portmap = Plugin::ptp_and_portmap(PORTMAP, &two)?;
    let lacks = portmap.is_none();
    plugins.extend(portmap);
    plugins.iter().try_for_each(Plugin::warm_up)?;
    let sandboxes = plugins.iter().map(|p| p.sandboxes("nat", rounds)).collect::<Result<Vec<_>>>()?;
    let mut samples = vec![Vec::new(); plugins.len()];
    for round in 0..rounds {
        for turn in 0..plugins.len() {
            let place = (round + turn) % plugins.len();
            let parts = plugins.get(place).zip(sandboxes.get(place).and_then(|s| s.get(round)));
            let ((plugin, sandbox), times) = parts.zip(samples.get_mut(place)).context("a place in turn")?;
            plugin.settle()?;
            let (took, added) = plugin.add(sandbox)?;
            plugin.del(sandbox, &added)?;
            // The next ADD publishes the same ports.
            plugin.settle()?;
            times.push(took.as_secs_f64() * 1_000.0);
        }
    }
    let mut group = Group::new("ADD with masquerading and ports", "ms", Better::Lower);
    for (plugin, samples) in plugins.iter().zip(samples) {
        group.add(plugin.name(), samples)?;
    }
    group.compare_to(ON)?;
    if lacks {
        group.note("not compared with ptp and portmap: portmap or iptables is not installed");
    }
    drop(sandboxes);
    plugins.into_iter().try_for_each(Plugin::finish)?;
    Ok(group)
}

/// Round trips of the first datagram of a flow from outside, in turn on a node with one published port and on one with
/// many.
fn first_packets(agent: &NodeConfig, packets: usize) -> Result<Group> {
    let (few, lots) = (Published::new(agent, 1)?, Published::new(agent, MANY)?);
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for _ in 0..packets {
        one.push(few.first_packet()?);
        many.push(lots.first_packet()?);
    }
    few.finish()?;
    lots.finish()?;
    let mut group = Group::new("first packet of a flow to a published port", "us", Better::Lower);
    group.add("1 port", one)?;
    group.add("1,000 ports", many)?;
    group.compare_to("1 port")?;
    Ok(group)
}

/// A node with a container whose ports all lead to one server.
struct Published {
    node: Node,
    world: World,
    end: Attached,
    _server: EchoServer,
    _sandbox: Sandbox,
}

impl Published {
    fn new(agent: &NodeConfig, ports: u16) -> Result<Self> {
        let node = Node::start(agent.clone())?;
        let world = World::join(&node)?;
        let sandbox = node.sandbox("server")?;
        let server = EchoServer::start(sandbox.space()?)?;
        let to = server.udp_at(NODE[0].parse()?).port();
        let list: Vec<_> = (0..ports).map(|n| mapping(8_000 + n, to, "udp")).collect();
        let conf = node.netconf().with("runtimeConfig", json!({ "portMappings": list }));
        let end = node.attach_with(&sandbox, "eth0", &conf)?;
        Ok(Self { node, world, end, _server: server, _sandbox: sandbox })
    }

    /// Microseconds.
    fn first_packet(&self) -> Result<f64> {
        let client = echo::udp_client(self.world.space()?, format!("{}:8000", NODE[0]).parse()?)?;
        let since = Instant::now();
        client.send(b"first").context("send")?;
        client.recv(&mut [0; 16]).context("no echo through the published port")?;
        Ok(since.elapsed().as_secs_f64() * 1e6)
    }

    fn finish(mut self) -> Result<()> {
        self.node.detach(&self.end)?;
        self.node.finish()
    }
}
