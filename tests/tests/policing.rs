//! What a container may not send: another's address, another's MAC, another's neighbour messages. Each is dropped, with
//! its reason, and counted exactly.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    frame::{self, ARP, BROADCAST, IPV4, IPV6, Mac, PacketSocket, mac},
    scenario, wait,
};

/// Times each frame is sent.
const TIMES: u64 = 7;
const STRANGER: Mac = [2, 0, 0, 0, 0xbe, 0xef];

/// Two containers: `a` misbehaves, `b` must not notice.
struct Scene {
    a: Sandbox,
    ea: Attached,
    b: Sandbox,
    eb: Attached,
}

fn scene(node: &Node) -> Result<Scene> {
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok(Scene { a, ea, b, eb })
}

/// Every frame of the misbehaving container, with the reason it must be dropped for.
fn frames(node: &Node, s: &Scene, port: u16) -> Result<Vec<(&'static str, &'static str, Vec<u8>)>> {
    let own = node.endpoint(&s.ea)?;
    let (me, gateway) = (mac(&own.container_mac)?, mac(&own.host_mac)?);
    let (a4, a6, b4, b6) = (s.ea.v4()?, s.ea.v6()?, s.eb.v4()?, s.eb.v6()?);
    let g4 = own.gateway4.context("IPv4 gateway")?;
    let g6 = own.gateway6.context("IPv6 gateway")?;
    let stranger4 = Ipv4Addr::new(198, 51, 100, 1);
    let stranger6: Ipv6Addr = "2001:db8::bad".parse()?;
    let udp = |from: IpAddr, to: IpAddr| frame::ip(from, to, 17, &frame::udp(from, to, (4000, port), b"spoof"));
    let eth = |from: Mac, ethertype: u16, packet: &[u8]| frame::ethernet(gateway, from, ethertype, packet);
    let arp = |op: u16, sender: (Mac, Ipv4Addr), target: Ipv4Addr| {
        frame::ethernet(BROADCAST, me, ARP, &frame::arp(op, sender, ([0; 6], target)))
    };
    let good = udp(a4.into(), b4.into());
    let mut long_header = good.clone();
    if let Some(byte) = long_header.first_mut() {
        *byte = 0x4f; // claims 60 bytes of header
    }
    let mut tagged = vec![0, 7, 0x08, 0x00];
    tagged.extend(&good);
    let mac_and_ip = "invalid-source-mac";
    Ok(vec![
        ("stranger's MAC, own IPv4", mac_and_ip, eth(STRANGER, IPV4, &good)),
        ("stranger's MAC, own IPv6", mac_and_ip, eth(STRANGER, IPV6, &udp(a6.into(), b6.into()))),
        (
            "neighbour's MAC in an ARP frame",
            mac_and_ip,
            frame::ethernet(BROADCAST, STRANGER, ARP, &frame::arp(1, (STRANGER, a4), ([0; 6], g4))),
        ),
        ("neighbour's IPv4", "invalid-source-ip", eth(me, IPV4, &udp(b4.into(), b4.into()))),
        ("gateway's IPv4", "invalid-source-ip", eth(me, IPV4, &udp(g4.into(), b4.into()))),
        ("stranger's IPv4", "invalid-source-ip", eth(me, IPV4, &udp(stranger4.into(), b4.into()))),
        ("no IPv4", "invalid-source-ip", eth(me, IPV4, &udp(Ipv4Addr::UNSPECIFIED.into(), b4.into()))),
        ("loopback's IPv4", "invalid-source-ip", eth(me, IPV4, &udp(Ipv4Addr::LOCALHOST.into(), b4.into()))),
        ("stranger's IPv4 to the node", "invalid-source-ip", eth(me, IPV4, &udp(stranger4.into(), g4.into()))),
        ("neighbour's IPv6", "invalid-source-ip", eth(me, IPV6, &udp(b6.into(), b6.into()))),
        ("gateway's IPv6", "invalid-source-ip", eth(me, IPV6, &udp(g6.into(), b6.into()))),
        ("stranger's IPv6", "invalid-source-ip", eth(me, IPV6, &udp(stranger6.into(), b6.into()))),
        (
            "own IPv4 inside IPv6",
            "invalid-source-ip",
            eth(me, IPV6, &frame::ipv6(a4.to_ipv6_mapped(), b6, 17, 64, &[0; 16])),
        ),
        (
            "neighbour's IPv4 as an IPv6 destination",
            "invalid-destination-ip",
            eth(me, IPV6, &udp(a6.into(), b4.to_ipv6_mapped().into())),
        ),
        ("ARP answer for the gateway", "neighbour-spoof", arp(2, (me, g4), a4)),
        ("ARP question in the neighbour's name", "neighbour-spoof", arp(1, (me, b4), g4)),
        ("ARP question with a stranger's MAC inside", "neighbour-spoof", arp(1, (STRANGER, a4), g4)),
        ("gratuitous ARP for the neighbour", "neighbour-spoof", arp(1, (me, b4), b4)),
        (
            "neighbour advertisement for the gateway",
            "neighbour-spoof",
            eth(me, IPV6, &frame::neighbour(136, a6, b6, g6, me)),
        ),
        (
            "neighbour advertisement for the neighbour",
            "neighbour-spoof",
            eth(me, IPV6, &frame::neighbour(136, a6, g6, b6, me)),
        ),
        (
            "neighbour solicitation with a stranger's MAC",
            "neighbour-spoof",
            eth(me, IPV6, &frame::neighbour(135, a6, g6, g6, STRANGER)),
        ),
        ("ARP question for the neighbour", "neighbour-unknown-target", arp(1, (me, a4), b4)),
        (
            "neighbour solicitation for the neighbour",
            "neighbour-unknown-target",
            eth(me, IPV6, &frame::neighbour(135, a6, b6, b6, me)),
        ),
        ("LLDP", "unsupported-l2-protocol", eth(me, 0x88cc, &[0; 50])),
        ("VLAN tag", "unsupported-l2-protocol", eth(me, 0x8100, &tagged)),
        ("half an IPv4 header", "malformed", eth(me, IPV4, good.get(..10).unwrap_or_default())),
        ("IPv4 header longer than the packet", "malformed", eth(me, IPV4, long_header.get(..28).unwrap_or_default())),
        ("half an IPv6 header", "malformed", eth(me, IPV6, &[0x60; 20])),
        ("half an ARP message", "malformed", frame::ethernet(BROADCAST, me, ARP, &[0, 1, 8, 0, 6, 4, 0, 1])),
    ])
}

/// Drops of the endpoint going out, by reason.
fn drops(node: &Node, endpoint: u16, reason: &str) -> Result<u64> {
    node.packets(endpoint, "egress", reason)
}

#[test]
fn every_false_frame_is_dropped_for_its_reason_and_counted_exactly() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let server = EchoServer::start(s.b.space()?)?;
        let at_node = EchoServer::start(node.space())?;
        let port = server.udp_at(s.eb.v4()?.into()).port();
        let id = node.endpoint(&s.ea)?.id;
        let socket = PacketSocket::open(s.a.space()?, "eth0")?;
        let mut wrong = Vec::new();
        for (what, reason, bytes) in frames(node, &s, port)? {
            let before = drops(node, id, reason)?;
            for _ in 0..TIMES {
                socket.send(&bytes).context(what)?;
            }
            let counted = wait::until_equal(what, &(before + TIMES), || drops(node, id, reason));
            if let Err(error) = counted {
                wrong.push(format!("{error:#} ({reason})"));
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        ensure!(server.datagrams() == 0 && at_node.datagrams() == 0, "a false datagram arrived");
        // After all that the container's honest traffic flows as before.
        for address in s.eb.both()? {
            echo::udp(s.a.space()?, server.udp_at(address), 100)?;
        }
        node.detach(&s.ea)?;
        node.detach(&s.eb)
    })
}

#[test]
fn policing_and_traffic_go_on_without_the_agent() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let server = EchoServer::start(s.b.space()?)?;
        let port = server.udp_at(s.eb.v4()?.into()).port();
        let id = node.endpoint(&s.ea)?.id;
        let socket = PacketSocket::open(s.a.space()?, "eth0")?;
        let all = frames(node, &s, port)?;
        let reasons = ["invalid-source-mac", "invalid-source-ip", "neighbour-spoof"];
        let before: Vec<u64> = reasons.iter().map(|r| drops(node, id, r)).collect::<Result<_>>()?;

        node.kill_agent()?;
        let mut sent = [0; 3];
        for (what, reason, bytes) in &all {
            if let Some(slot) = reasons.iter().position(|r| r == reason).and_then(|n| sent.get_mut(n)) {
                socket.send(bytes).context(*what)?;
                *slot += 1;
            }
        }
        for address in s.eb.both()? {
            echo::udp(s.a.space()?, server.udp_at(address), 1000)?;
            echo::tcp(s.a.space()?, server.tcp_at(address), 1 << 20)?;
        }
        ensure!(server.datagrams() == 2, "{} datagrams arrived where 2 honest ones were sent", server.datagrams());

        node.start_agent()?;
        for ((reason, before), sent) in reasons.iter().zip(before).zip(sent) {
            ensure!(sent > 0);
            wait::until_equal(reason, &(before + sent), || drops(node, id, reason))?;
        }
        node.detach(&s.ea)?;
        node.detach(&s.eb)
    })
}

#[test]
fn questions_for_the_gateway_are_answered_by_the_program() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let own = node.endpoint(&s.ea)?;
        let (me, gateway) = (mac(&own.container_mac)?, mac(&own.host_mac)?);
        let (g4, g6) = (own.gateway4.context("gateway")?, own.gateway6.context("gateway")?);
        let socket = PacketSocket::open(s.a.space()?, "eth0")?;

        let before = node.packets(own.id, "egress", "neighbour-answered")?;
        let question = frame::arp(1, (me, s.ea.v4()?), ([0; 6], g4));
        socket.send(&frame::ethernet(BROADCAST, me, ARP, &question))?;
        let expected = frame::ethernet(me, gateway, ARP, &frame::arp(2, (gateway, g4), (me, s.ea.v4()?)));
        let answer = socket.await_frame(wait::PATIENCE, |f| f.starts_with(&expected))?;
        ensure!(answer.is_some(), "no ARP answer");

        let question = frame::neighbour(135, s.ea.v6()?, g6, g6, me);
        socket.send(&frame::ethernet(gateway, me, IPV6, &question))?;
        let is_answer =
            |f: &[u8]| f.get(..6) == Some(&me[..]) && f.get(12..14) == Some(&[0x86, 0xdd]) && f.get(54) == Some(&136);
        let answer = socket.await_frame(wait::PATIENCE, is_answer)?.context("no neighbour advertisement")?;
        let advertisement = frame::neighbour(136, g6, s.ea.v6()?, g6, gateway);
        // The flags may differ (router); the addresses and the option must not.
        ensure!(answer.get(62..86) == advertisement.get(48..72), "{answer:02x?}\n{advertisement:02x?}");
        let pseudo =
            [&g6.octets()[..], &s.ea.v6()?.octets(), &[0, 0, 0, 32, 0, 0, 0, 58], answer.get(54..86).context("short")?];
        ensure!(wharf_tests::icmp::internet_checksum(&pseudo.concat()) == 0, "the checksum is wrong: {answer:02x?}");
        let counted = node.packets(own.id, "egress", "neighbour-answered")?;
        ensure!(counted >= before + 2, "{before} then {counted}");
        node.detach(&s.ea)?;
        node.detach(&s.eb)
    })
}

#[test]
fn multicast_and_broadcast_are_not_carried() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let own = node.endpoint(&s.ea)?;
        let me = mac(&own.container_mac)?;
        let socket = PacketSocket::open(s.a.space()?, "eth0")?;
        let mdns = Ipv4Addr::new(224, 0, 0, 251);
        let all = Ipv4Addr::BROADCAST;
        let mdns6: Ipv6Addr = "ff02::fb".parse()?;
        let udp = |from: IpAddr, to: IpAddr| frame::ip(from, to, 17, &frame::udp(from, to, (5353, 5353), b"x"));
        let (a4, a6) = (s.ea.v4()?.into(), s.ea.v6()?.into());
        let sent = [
            frame::ethernet([1, 0, 0x5e, 0, 0, 0xfb], me, IPV4, &udp(a4, mdns.into())),
            frame::ethernet(BROADCAST, me, IPV4, &udp(a4, all.into())),
            frame::ethernet([0x33, 0x33, 0, 0, 0, 0xfb], me, IPV6, &udp(a6, mdns6.into())),
        ];
        let before = drops(node, own.id, "multicast-unsupported")?;
        sent.iter().try_for_each(|f| socket.send(f))?;
        // The container's kernel sends multicast of its own (router solicitations), so here only a lower bound is
        // exact.
        wait::until("multicast to be counted", || {
            Ok((drops(node, own.id, "multicast-unsupported")? >= before + 3).then_some(()))
        })?;
        node.detach(&s.ea)?;
        node.detach(&s.eb)
    })
}
