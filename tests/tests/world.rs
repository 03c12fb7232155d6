//! What containers meet on the way to other networks: a smaller MTU, routers that answer probes, many flows to one
//! place, firewalls of other tools on the node.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    NodeConfig, echo,
    icmp::{self, Ping, Probe},
    process::{command_in, ip, run},
    scenario, wait,
    world::{ROUTER, World},
};

/// Least MTU of IPv6 (RFC 8200, section 5).
const NARROW: u32 = 1_280;

#[test]
fn a_smaller_mtu_on_the_way_is_learned_by_the_container() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::behind_router(node, NARROW)?;
        let inside = node.sandbox("inside")?;
        let end = node.attach(&inside)?;
        let space = inside.space()?;
        for to in world.addresses() {
            let family = if to.is_ipv6() { "-6" } else { "-4" };
            let knows =
                || anyhow::Ok(ip(space, &format!("{family} route get {to}"))?.contains(&format!("mtu {NARROW}")));
            for what in ["ping", "UDP"] {
                ip(space, &format!("{family} route flush cache"))?;
                ensure!(!knows()?, "{to}: the MTU is known before anything was sent");
                // More than passes; the first one is answered by the router.
                match what {
                    "ping" => drop(Ping { to, count: 1, payload: 1_400 }.run(space)?),
                    _ => drop(echo::udp_client(space, world.echo().udp_at(to))?.send(&[0; 1_400])?),
                }
                wait::until(&format!("the MTU of the way to {to}, by {what}"), || Ok(knows()?.then_some(())))?;
            }
            Ping { to, count: 2, payload: 1_400 }.run(space)?.must_answer()?;
            echo::udp(space, world.echo().udp_at(to), 8_000).context("UDP in fragments")?;
            ip(space, &format!("{family} route flush cache"))?;
            echo::tcp(space, world.echo().tcp_at(to), 1 << 20).with_context(|| format!("TCP to {to}"))?;
        }
        node.detach(&end)
    })
}

#[test]
fn probes_find_every_router_on_the_way() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::behind_router(node, 1_500)?;
        let inside = node.sandbox("inside")?;
        let end = node.attach(&inside)?;
        for ((to, gateway), router) in world.addresses().into_iter().zip(end.gateways()?).zip(ROUTER) {
            let way = [gateway, router.parse::<IpAddr>()?, to];
            for probe in [Probe::Echo, Probe::Udp] {
                for (hops, expected) in (1..).zip(way) {
                    let answered = icmp::trace(inside.space()?, to, probe, hops)?;
                    ensure!(answered == Some(expected), "{probe:?} to {to}, hop {hops}: {answered:?}, not {expected}");
                }
            }
        }
        node.detach(&end)
    })
}

#[test]
fn one_container_has_28000_flows_to_one_port() -> Result<()> {
    /// Linux's own range of client ports has as many.
    const FLOWS: u16 = 28_000;
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let inside = node.sandbox("inside")?;
        let end = node.attach(&inside)?;
        let [to, _] = world.addresses();
        let server = world.space()?.run(|| UdpSocket::bind(SocketAddr::new(to, 0)))??;
        server.set_read_timeout(Some(Duration::from_secs(5)))?;
        let to = server.local_addr()?;
        let mut sources = HashSet::new();
        let mut buffer = [0; 8];
        inside.space()?.run(|| {
            for flow in 0..FLOWS {
                let client = UdpSocket::bind(("0.0.0.0", 32_768 + flow)).with_context(|| format!("flow {flow}"))?;
                client.set_read_timeout(Some(Duration::from_secs(5)))?;
                client.connect(to)?;
                client.send(&flow.to_be_bytes()).with_context(|| format!("flow {flow}"))?;
                let (n, from) = server.recv_from(&mut buffer).with_context(|| format!("flow {flow} is lost"))?;
                ensure!(
                    buffer.get(..n) == Some(&flow.to_be_bytes()) && sources.insert(from),
                    "flow {flow} from {from}"
                );
                server.send_to(&flow.to_be_bytes(), from)?;
                client.recv(&mut buffer).with_context(|| format!("the answer of flow {flow} is lost"))?;
            }
            anyhow::Ok(())
        })??;
        // All are tracked at once: none took another's place.
        let tracked = node.space().run(|| std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count"))??;
        ensure!(tracked.trim().parse::<u32>()? >= u32::from(FLOWS), "{tracked} of {FLOWS} are tracked");
        node.detach(&end)
    })
}

/// A firewall as its tool writes it, and the chain that the status must name.
const FIREWALLS: [(&str, &str); 2] = [
    (
        "table ip filter {
            chain DOCKER-USER { return; }
            chain DOCKER-FORWARD { iifname docker0 counter accept; }
            chain FORWARD { type filter hook forward priority filter; policy drop; jump DOCKER-USER; jump DOCKER-FORWARD; }
        }
        table ip6 filter { chain FORWARD { type filter hook forward priority filter; policy drop; }; }",
        "ip filter FORWARD",
    ),
    (
        "table inet firewalld {
            chain filter_FORWARD {
                type filter hook forward priority filter + 10; policy accept;
                ct state established,related accept
                iifname lo accept
                ct state invalid drop
                reject with icmpx admin-prohibited
            }
        }",
        "inet firewalld filter_FORWARD",
    ),
];

#[test]
fn a_firewall_that_refuses_forwarded_packets_is_named_with_the_command_that_mends_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let inside = node.sandbox("inside")?;
        let end = node.attach(&inside)?;
        let nft = |argument: &str| -> Result<String> {
            let mut command = command_in(node.space(), "nft")?;
            command.arg(argument);
            run(command, b"", Duration::from_secs(10))?.ok()
        };
        let row = || -> Result<String> {
            let status: serde_json::Value = serde_json::from_str(&node.wharf(&["status", "-o", "json"])?.stdout)?;
            let row = status["components"].as_array().into_iter().flatten().find(|c| c["name"] == "masquerade");
            Ok(row.and_then(|row| row["message"].as_str()).context("no row of masquerading")?.to_owned())
        };
        let reaches = || -> Result<Vec<bool>> {
            world
                .addresses()
                .map(|to| Ok(Ping { to, count: 1, payload: 56 }.run(inside.space()?)?.must_answer().is_ok()))
                .into_iter()
                .collect()
        };
        // A chain that refuses packets by a mark may do so; nobody can tell.
        let harmless = "table inet theirs { chain f { type filter hook forward priority 0; meta mark 7 drop; }; }";
        nft(harmless)?;
        for (firewall, chain) in FIREWALLS {
            nft(firewall)?;
            let said = wait::until("the firewall is named", || Ok(Some(row()?).filter(|said| said.contains(chain))))?;
            ensure!(said.contains("theirs f may refuse"), "{said}");
            ensure!(reaches()? == [false, false], "{chain} lets containers through");
            let before = nft("list ruleset")?;
            let tables: Vec<_> = firewall.split("table ").skip(1).filter_map(|t| t.split(" {").next()).collect();
            // What the message says is done as it stands there.
            for mend in said.split("`nft '").skip(1).filter_map(|rest| rest.split("'`").next()) {
                nft(mend)?;
            }
            ensure!(reaches()? == [true, true], "{chain}: {said}");
            ensure!(before.contains(tables[0]) && nft("list ruleset")?.contains(tables[0]));
            for table in tables {
                nft(&format!("delete table {table}"))?;
            }
        }
        node.detach(&end)
    })
}
