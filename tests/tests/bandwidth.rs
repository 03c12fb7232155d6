//! Limits of bandwidth. What passes is compared with the burst and with what the rate gives in the time that passed, so
//! that a slow machine makes no difference.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use serde_json::{Value, json};
use wharf_common::Bucket;
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, echo, scenario, space::Space};

/// Bits a second: a packet in a second, so that little comes beside the burst.
const RATE: u64 = 8_000;
/// Bits: 20 packets.
const BURST: u64 = 160_000;
/// Bytes of a packet's payload; its frame has 1,000.
const PAYLOAD: usize = 958;
const PAYLOAD6: usize = 938;
const PACKET: u64 = 8_000;
const SENT: u64 = 100;

fn limited(node: &Node, sandbox: &Sandbox, bandwidth: Value) -> Result<Attached> {
    node.attach_with(sandbox, "eth0", &node.netconf().with("runtimeConfig", json!({ "bandwidth": bandwidth })))
}

/// Sends packets and counts those that arrive; compares them with what `limit` of the endpoint lets pass.
fn flood(node: &Node, from: &Space, to: &Space, address: IpAddr, end: &Attached, direction: &str) -> Result<()> {
    let id = node.endpoint(end)?.id;
    let dropped = || node.packets(id, direction, "bandwidth-exceeded");
    let before = dropped()?;
    let receiver = to.run(|| UdpSocket::bind(SocketAddr::new(address, 0)))??;
    receiver.set_nonblocking(true)?;
    let sender = echo::udp_client(from, receiver.local_addr()?)?;
    let start = Instant::now();
    let payload = vec![7; if address.is_ipv4() { PAYLOAD } else { PAYLOAD6 }];
    for _ in 0..SENT {
        // A sender of the node's own is told of the drop.
        sender.send(&payload).ok();
    }
    // The programs run before a send returns, but for the receiver's backlog.
    let mut arrived = 0;
    wharf_tests::wait::until("every packet is counted or has arrived", || {
        while receiver.recv(&mut [0; 2_000]).is_ok() {
            arrived += 1;
        }
        Ok((arrived + dropped()? - before >= SENT).then_some(()))
    })?;
    let bits = u128::from(RATE) * start.elapsed().as_nanos() / 1_000_000_000;
    let given = u128::from(BURST) + bits + u128::from(PACKET);
    ensure!(u128::from(arrived * PACKET) <= given, "{direction}: {arrived} packets arrived, {given} bits were given");
    ensure!(arrived > 0, "{direction}: nothing arrived");
    Ok(())
}

#[test]
fn a_limit_holds_in_its_direction_between_containers_and_to_the_node() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        let (sb, sn) = (b.space()?, node.space());
        let limit = json!({"egressRate": RATE, "egressBurst": BURST, "ingressRate": RATE, "ingressBurst": BURST});
        for (way, direction) in
            ["egress to a container", "ingress from a container", "egress to the node", "ingress from the node"]
                .into_iter()
                .zip(["egress", "ingress", "egress", "ingress"])
        {
            for family in [0, 1] {
                // A new container: its bucket is full.
                let a = node.sandbox(&format!("a{}{family}", way.replace(' ', "-")))?;
                let ea = limited(node, &a, limit.clone())?;
                let sa = a.space()?;
                let (from, to, address) = match way {
                    "egress to a container" => (sa, sb, eb.both()?[family]),
                    "ingress from a container" => (sb, sa, ea.both()?[family]),
                    "egress to the node" => (sa, sn, ea.gateways()?[family]),
                    _ => (sn, sa, ea.both()?[family]),
                };
                flood(node, from, to, address, &ea, direction).context(way)?;
                let other = if direction == "egress" { "ingress" } else { "egress" };
                ensure!(node.packets(node.endpoint(&ea)?.id, other, "bandwidth-exceeded")? == 0, "{way}: {other}");
                node.detach(&ea)?;
            }
        }
        ensure!(node.packets(node.endpoint(&eb)?.id, "ingress", "bandwidth-exceeded")? == 0, "a neighbour is limited");
        node.detach(&eb)
    })
}

#[test]
fn a_limit_is_told_and_outlives_kills_and_regenerations() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--selfcheck-interval-ms=100"]), |node| {
        let a = node.sandbox("a")?;
        let ea = limited(node, &a, json!({"egressRate": RATE, "egressBurst": BURST, "ingressRate": 8_000_000}))?;
        let id = node.endpoint(&ea)?.id.to_string();
        let told = node.wharf(&["endpoint", "get", &id])?.ok()?;
        ensure!(told.contains("8 Mbit/s, burst 2 Mbit") && told.contains("8 kbit/s, burst 160 kbit"), "{told}");
        let rows = || -> Result<Value> {
            let text = node.wharf(&["bpf", "map", "get", &format!("{id}/BANDWIDTH"), "-o", "json"])?.ok()?;
            Ok(serde_json::from_str::<Value>(&text)?["rows"].clone())
        };
        let gateway = ea.gateways()?[0];
        flood(node, a.space()?, node.space(), gateway, &ea, "egress")?;
        let used = rows()?;
        ensure!(used[1]["empty_at_ns"] != "0", "{used}");
        node.wharf(&["endpoint", "regenerate", &id])?.ok()?;
        ensure!(rows()? == used, "a regeneration, or a test packet, changed {used}: {}", rows()?);
        node.detach(&ea)
    })?;
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = limited(node, &a, json!({"egressRate": RATE, "egressBurst": BURST}))?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        flood(node, a.space()?, node.space(), ea.gateways()?[0], &ea, "egress")?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        // The network's own limit goes before the runtime's.
        let b = node.sandbox("b")?;
        let conf = node.netconf().with("egressRate", json!(RATE)).with("egressBurst", json!(BURST));
        let asks = json!({"bandwidth": {"egressRate": 1_000_000_000}});
        let eb = node.attach_with(&b, "eth0", &conf.with("runtimeConfig", asks))?;
        flood(node, b.space()?, node.space(), eb.gateways()?[0], &eb, "egress")?;
        node.detach(&eb)?;
        node.detach(&ea)
    })
}

#[test]
fn large_packets_pass_a_small_burst_one_after_another() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        // Less than one GSO packet of 64 KiB.
        let ea = limited(node, &a, json!({"egressRate": 80_000_000, "egressBurst": 8_000}))?;
        let server = echo::EchoServer::start(node.space())?;
        echo::tcp(a.space()?, server.tcp_at(ea.gateways()?[0]), 200_000)?;
        node.detach(&ea)
    })
}

#[test]
fn a_limit_that_somebody_changes_is_found_and_mended() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = limited(node, &a, json!({"egressRate": RATE, "egressBurst": BURST}))?;
        let endpoint = node.endpoint(&ea)?;
        let pin = node.dirs().endpoint_pins().join(endpoint.id.to_string()).join("BANDWIDTH");
        let mut rows: Array<MapData, Bucket> = Map::Array(MapData::from_pin(&pin)?).try_into()?;
        rows.set(1, Bucket::default(), 0)?;
        let found = node.wharf(&["audit"])?.stdout;
        ensure!(found.contains("egress limit"), "{found}");
        node.wharf(&["audit", "--repair"])?;
        flood(node, a.space()?, node.space(), ea.gateways()?[0], &ea, "egress")?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        node.detach(&ea)
    })
}
