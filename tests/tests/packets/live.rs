//! The same programs on veth pairs with packets under way: what a test run of the kernel's cannot make.
//!
//! Three namespaces: a node, and A and B as containers. Nothing but the programs joins them: the node has no addresses
//! and forwards nothing.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType, tc::qdisc_add_clsact};
use wharf_common::{
    Direction::{Egress, Ingress},
    DropReason::{self, *},
    EndpointConfig,
};
use wharf_tests::{
    Sandbox,
    frame::{self, IPV4, IPV6, PacketSocket},
    process::ip,
    scratch,
    space::Space,
    wait,
};

use crate::fixture::{A, B, Change, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, TO_CONTAINER, Who, udp, with};

/// Room for packets that no single page holds.
const MTU: u32 = 9_000;

struct Attached {
    endpoint: Endpoint,
    sandbox: Sandbox,
}

struct Stage {
    a: Attached,
    b: Attached,
    // After the endpoints: their links live in it.
    _node: Space,
}

fn stage() -> Result<Stage> {
    let dir = scratch::fresh_dir("packets")?;
    let node = Space::create()?;
    let mut a = attached(&dir, &node, A, "a")?;
    let mut b = attached(&dir, &node, B, "b")?;
    a.endpoint.knows(&b.endpoint.who)?;
    a.endpoint.reaches(&b.endpoint)?;
    b.endpoint.knows(&a.endpoint.who)?;
    b.endpoint.reaches(&a.endpoint)?;
    Ok(Stage { a, b, _node: node })
}

fn attached(dir: &Path, node: &Space, who: Who, name: &str) -> Result<Attached> {
    let sandbox = Sandbox::create(dir, name)?;
    let container = sandbox.space()?;
    let host = format!("wh{name}");
    let (mac, host_mac) = (text(who.mac), text(who.host_mac));
    ip(
        node,
        &format!(
            "link add {host} mtu {MTU} address {host_mac} type veth peer name eth0 mtu {MTU} address {mac} netns {}",
            sandbox.path().display()
        ),
    )?;
    ip(node, &format!("link set {host} arp off addrgenmode none"))?;
    let ifindex = node.run(|| nix::net::if_::if_nametoindex(host.as_str()))??;
    let mut endpoint = Endpoint::load(Who { ifindex, ..who })?;
    node.run(|| {
        // Without tcx (before Linux 6.6) a program is a filter, and needs the queueing discipline to be one of.
        qdisc_add_clsact(&host).with_context(|| format!("add clsact to {host}"))?;
        endpoint.attach(FROM_CONTAINER, &host, TcAttachType::Ingress)?;
        endpoint.attach(TO_CONTAINER, &host, TcAttachType::Egress)
    })??;
    ip(node, &format!("link set {host} up"))?;
    ip(container, &format!("addr add {}/32 dev eth0", who.v4))?;
    ip(container, &format!("addr add {}/128 dev eth0 nodad", who.v6))?;
    ip(container, "link set eth0 addrgenmode none")?;
    ip(container, "link set eth0 up")?;
    for (gateway, family) in [(IpAddr::from(GATEWAY4), "-4"), (IpAddr::from(GATEWAY6), "-6")] {
        ip(container, &format!("{family} route add {gateway} dev eth0"))?;
        ip(container, &format!("{family} route add default via {gateway} dev eth0"))?;
    }
    Ok(Attached { endpoint, sandbox })
}

fn text(mac: frame::Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

impl Endpoint {
    fn attach(&mut self, program: &str, interface: &str, at: TcAttachType) -> Result<()> {
        let program: &mut SchedClassifier = self.program_mut(program)?;
        program.attach(interface, at).with_context(|| format!("attach to {interface}"))?;
        Ok(())
    }
}

/// A socket of the endpoint's that waits for datagrams.
fn listener(at: &Attached, address: impl Into<IpAddr>) -> Result<UdpSocket> {
    let address = SocketAddr::from((address.into(), 53));
    let socket = at.sandbox.space()?.run(|| UdpSocket::bind(address))??;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(socket)
}

fn addresses() -> [(IpAddr, IpAddr, IpAddr); 2] {
    [(A.v4.into(), B.v4.into(), GATEWAY4.into()), (A.v6.into(), B.v6.into(), GATEWAY6.into())]
}

fn count_of(changes: &[Change], direction: wharf_common::Direction, reason: DropReason) -> u64 {
    changes.iter().filter(|(d, r, ..)| (*d, *r) == (direction, reason)).map(|(_, _, packets, _)| packets).sum()
}

#[test]
fn a_stack_that_knows_no_one_finds_its_gateway_and_its_peer() -> Result<()> {
    let stage = stage()?;
    let before = (stage.a.endpoint.counters()?, stage.b.endpoint.counters()?);
    for (from, to, gateway) in addresses() {
        let receiver = listener(&stage.b, to)?;
        let container = stage.a.sandbox.space()?;
        let sender = container.run(|| UdpSocket::bind((from, 4000)))??;
        sender.send_to(b"hello", (to, 53))?;
        let mut buffer = [0; 16];
        let (bytes, source) = receiver.recv_from(&mut buffer).with_context(|| format!("from {from} to {to}"))?;
        ensure!(buffer.get(..bytes) == Some(b"hello") && source == SocketAddr::from((from, 4000)));
        // An answer, not a rumour: what is merely heard is stale.
        let neighbours = ip(container, &format!("neigh show {gateway} dev eth0"))?;
        ensure!(neighbours.contains(&text(A.host_mac)) && neighbours.contains("REACHABLE"), "{neighbours}");
    }
    let at_a = stage.a.endpoint.counters()?.since(&before.0)?;
    let at_b = stage.b.endpoint.counters()?.since(&before.1)?;
    ensure!(count_of(&at_a, Egress, NeighbourAnswered) == 2, "{at_a:?}");
    ensure!(count_of(&at_a, Egress, ForwardedLocal) == 2, "{at_a:?}");
    ensure!(count_of(&at_b, Ingress, ForwardedLocal) == 2, "{at_b:?}");
    Ok(())
}

/// Sends frames from A's interface as they are, and checks that all of them have the verdict.
fn refused(stage: &Stage, what: &str, frames: &[Vec<u8>], reason: DropReason) -> Result<()> {
    let socket = PacketSocket::open(stage.a.sandbox.space()?, "eth0")?;
    let before = stage.a.endpoint.counters()?;
    for frame in frames {
        socket.send(frame).with_context(|| what.to_owned())?;
    }
    let expected = u64::try_from(frames.len())?;
    let mut seen = Vec::new();
    wait::until(what, || {
        seen = stage.a.endpoint.counters()?.since(&before)?;
        Ok((seen.iter().map(|(_, _, packets, _)| packets).sum::<u64>() >= expected).then_some(()))
    })?;
    ensure!(count_of(&seen, Egress, reason) == expected, "{what}: {seen:?}");
    Ok(())
}

#[test]
fn frames_too_short_for_their_protocol_are_dropped() -> Result<()> {
    let stage = stage()?;
    for (what, whole, header) in [("v4", udp(A.v4, B.v4), 34), ("v6", udp(A.v6, B.v6), 54)] {
        let frames: Vec<_> = (14..header).filter_map(|length| whole.get(..length).map(<[u8]>::to_vec)).collect();
        refused(&stage, what, &frames, Malformed)?;
    }
    Ok(())
}

#[test]
fn a_tag_that_the_kernel_took_off_the_frame_still_counts() -> Result<()> {
    let stage = stage()?;
    for (tag, kind) in [([0, 5], "VLAN 5"), ([0, 0], "a priority only")] {
        for (inner, ethertype) in [(udp(A.v4, B.v4), IPV4), (udp(A.v6, B.v6), IPV6)] {
            let payload = [&tag[..], &ethertype.to_be_bytes(), inner.get(14..).unwrap_or(&[])].concat();
            let frame = frame::ethernet(A.host_mac, A.mac, 0x8100, &payload);
            refused(&stage, kind, &[frame], UnsupportedL2)?;
        }
    }
    Ok(())
}

/// A packet socket's frame of more than a page has nothing but its Ethernet header in its first piece.
fn large(from: impl Into<IpAddr>, to: impl Into<IpAddr>) -> Vec<u8> {
    let (from, to) = (from.into(), to.into());
    let datagram = frame::udp(from, to, (4000, 53), &[b'w'; 8_000]);
    let ethertype = if from.is_ipv4() { IPV4 } else { IPV6 };
    frame::ethernet(A.host_mac, A.mac, ethertype, &frame::ip(from, to, 17, &datagram))
}

#[test]
fn headers_in_another_piece_of_the_packet_are_found() -> Result<()> {
    let stage = stage()?;
    for (from, to, _) in addresses() {
        let receiver = listener(&stage.b, to)?;
        PacketSocket::open(stage.a.sandbox.space()?, "eth0")?.send(&large(from, to))?;
        let mut buffer = vec![0; MTU as usize];
        let (bytes, source) = receiver.recv_from(&mut buffer).with_context(|| format!("8000 bytes to {to}"))?;
        ensure!(bytes == 8_000 && source == SocketAddr::from((from, 4000)), "{bytes} bytes from {source}");
    }
    refused(&stage, "a lie in another piece, v4", &[large(B.v4, B.v4)], InvalidSourceIp)?;
    refused(&stage, "a lie in another piece, v6", &[large(B.v6, B.v6)], InvalidSourceIp)?;
    // A solicitation that is padded to more than a page: its option lies in another piece too.
    let question = frame::neighbour(135, A.v6, GATEWAY6, GATEWAY6, B.mac);
    let padded = [frame::ethernet(A.host_mac, A.mac, IPV6, &question), vec![0; 8_000]].concat();
    refused(&stage, "a stolen MAC in another piece", &[padded], NeighbourSpoof)?;
    // And one that is answered has to shrink to the answer.
    let question = frame::neighbour(135, A.v6, GATEWAY6, GATEWAY6, A.mac);
    let padded = [frame::ethernet(A.host_mac, A.mac, IPV6, &question), vec![0; 8_000]].concat();
    let socket = PacketSocket::open(stage.a.sandbox.space()?, "eth0")?;
    socket.send(&padded)?;
    let answer = socket.await_frame(Duration::from_secs(5), |frame| {
        frame.get(12..14) == Some(&[0x86, 0xdd]) && frame.get(54) == Some(&136)
    })?;
    ensure!(answer.is_some_and(|frame| frame.len() == 86), "no answer of 86 bytes");
    Ok(())
}

/// A neighbour message to another endpoint, hidden behind an extension header where it is not looked for, arrives with
/// a hop limit that no stack accepts in one.
#[test]
fn a_hidden_neighbour_message_arrives_too_old() -> Result<()> {
    let stage = stage()?;
    let message = frame::neighbour(136, A.v6, B.v6, GATEWAY6, A.mac);
    let payload = [&[58, 0, 1, 4, 0, 0, 0, 0][..], message.get(40..).unwrap_or(&[])].concat();
    let packet = frame::ethernet(A.host_mac, A.mac, IPV6, &frame::ipv6(A.v6, B.v6, 60, 255, &payload));
    let watcher = PacketSocket::open(stage.b.sandbox.space()?, "eth0")?;
    PacketSocket::open(stage.a.sandbox.space()?, "eth0")?.send(&packet)?;
    let arrived = watcher
        .await_frame(Duration::from_secs(5), |frame| frame.get(22..38) == Some(&A.v6.octets()))?
        .context("it does not arrive")?;
    assert_eq!(arrived, with(with(packet, 0, &[B.mac, B.host_mac].concat()), 21, &[254]));
    // B's stack has learnt nothing of its gateway.
    let neighbours = ip(stage.b.sandbox.space()?, &format!("neigh show {GATEWAY6} dev eth0"))?;
    ensure!(!neighbours.contains(&text(A.mac)), "{neighbours}");
    Ok(())
}

/// The row of an endpoint that is no longer live stops packets that are already on their way.
#[test]
fn a_closed_gate_lets_nothing_through() -> Result<()> {
    let mut stage = stage()?;
    let who = stage.b.endpoint.who;
    stage.b.endpoint.configure(EndpointConfig { flags: 0, ..who.config() })?;
    let receiver = listener(&stage.b, Ipv6Addr::UNSPECIFIED)?;
    receiver.set_nonblocking(true)?;
    let before = stage.b.endpoint.counters()?;
    let socket = PacketSocket::open(stage.a.sandbox.space()?, "eth0")?;
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6)] {
        socket.send(&packet)?;
    }
    wait::until_equal("both refused", &2, || {
        Ok(count_of(&stage.b.endpoint.counters()?.since(&before)?, Ingress, EndpointNotReady))
    })?;
    let received = receiver.recv(&mut [0; 64]);
    ensure!(received.is_err(), "received {received:?}");
    Ok(())
}
