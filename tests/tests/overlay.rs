//! `--routing`: containers of nodes that share no network reach each other by the overlay.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use wharf_api::PolicyImport;
use wharf_feed::v1;
use wharf_tests::{
    Node,
    cluster::{
        Container, DEVICE, FAR, NAMES, Nodes, THREE, address, await_routes, cleanup, component, own_row, pool, port,
        routes, row, seen_by, set_routing, to as native, unreachable,
    },
    crash,
    echo::{self, EchoServer},
    feed::{self, Producer},
    frame::{self, ARP, BROADCAST, IPV4, IPV6, Mac, PacketSocket},
    icmp,
    process::{command_in, ip, run},
    programs,
    space::Space,
    stream::{TcpFlow, UdpStream},
    wait,
};

/// Defaults of `--overlay-port` and `--overlay-vni`.
const PORT: u16 = 4_789;
const VNI: u32 = 88;
/// Link-layer addresses of frames that no node made.
const STRANGER: Mac = [2, 0, 0, 0, 0xbe, 0xef];
const ELSEWHERE: Mac = [2, 0, 0, 0, 0, 7];
/// How long a connection that must not be made is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

fn has_device(node: &Node) -> Result<bool> {
    Ok(node.space().links()?.iter().any(|name| name == DEVICE))
}

/// The overlay's routes to node `n` at an address of it, from an address of this node.
fn tunnel(n: usize, from: &str, at: &str) -> Vec<String> {
    let mtu = if at.contains(':') { 1_430 } else { 1_450 };
    [false, true].map(|v6| format!("{} overlay to {at} from {from} mtu {mtu}", pool(n, v6))).to_vec()
}

/// All routes of node `n` with `--routing auto`.
fn all_routes(n: usize) -> Vec<String> {
    let to = |other: usize| match [n, other].contains(&FAR) {
        true => tunnel(other, &address(n, false), &address(other, false)),
        false => native(other),
    };
    (0..THREE).filter(|other| *other != n).flat_map(to).collect()
}

/// Three nodes with `--routing auto`, of which these run an agent and have their routes.
fn started(running: &[usize]) -> Result<Nodes> {
    let mut joined = Nodes::join(THREE, "auto")?;
    for n in running {
        joined.nodes[*n].start_agent()?;
    }
    for n in running {
        await_routes(&joined.nodes[*n], all_routes(*n)).with_context(|| format!("node {}", NAMES[*n]))?;
    }
    Ok(joined)
}

/// Every protocol, in both families and directions, with the containers' own addresses. TCP is first: it learns the MTU
/// of the path.
fn reach_each_other(x: &Container, y: &Container) -> Result<()> {
    for (near, far) in [(x, y), (y, x)] {
        for (own, address) in near.end.both()?.into_iter().zip(far.end.both()?) {
            let both = || format!("{own} to {address}");
            echo::tcp(near.space()?, far.echo.tcp_at(address), 200_000).with_context(both)?;
            icmp::ping(near.space()?, address)?.must_answer().with_context(both)?;
            echo::udp(near.space()?, far.echo.udp_at(address), 100).with_context(both)?;
            echo::udp(near.space()?, far.echo.udp_at(address), 4_000).with_context(both).context("fragments")?;
            let seen = seen_by(far.space()?, near.space()?, address).with_context(both)?;
            ensure!(seen == own, "{own} is masqueraded to {address}: {seen}");
        }
    }
    Ok(())
}

/// TCP in both families.
fn connect(near: &Container, far: &Container) -> Result<()> {
    far.end.both()?.into_iter().try_for_each(|address| echo::tcp(near.space()?, far.echo.tcp_at(address), 10_000))
}

fn can_connect(from: &Container, to: SocketAddr) -> Result<bool> {
    Ok(from.space()?.run(|| TcpStream::connect_timeout(&to, DENIED))?.is_ok())
}

fn ethertype(address: IpAddr) -> u16 {
    if address.is_ipv4() { IPV4 } else { IPV6 }
}

/// MTU in an ICMP error about a packet that is too big (RFC 1191, RFC 4443 section 3.2).
fn too_big(frame: &[u8]) -> Option<u32> {
    let (kind, packet) = (frame.get(12..14)?, frame.get(14..)?);
    if kind == IPV4.to_be_bytes() && packet.get(9) == Some(&1) {
        let icmp = packet.get(usize::from(packet.first()? & 15) * 4..)?;
        let mtu = icmp.get(6..)?.first_chunk::<2>()?;
        return icmp.starts_with(&[3, 4]).then(|| u32::from(u16::from_be_bytes(*mtu)));
    }
    if kind == IPV6.to_be_bytes() && packet.get(6) == Some(&58) {
        let icmp = packet.get(40..)?;
        let mtu = icmp.get(4..)?.first_chunk::<4>()?;
        return icmp.starts_with(&[2]).then(|| u32::from_be_bytes(*mtu));
    }
    None
}

/// Packets of `mtu` bytes that must not be cut arrive at an echo server. For larger ones, the container's node reports
/// that MTU.
fn must_carry(node: &Node, from: &Container, to: SocketAddr, mtu: u16) -> Result<()> {
    let family = usize::from(to.is_ipv6());
    let (source, headers) = (from.end.both()?[family], [28, 48][family]);
    let view = node.endpoint(&from.end)?;
    let (own, gateway) = (frame::mac(&view.container_mac)?, frame::mac(&view.host_mac)?);
    let socket = PacketSocket::open(from.space()?, "eth0")?;
    let send = |bytes: u16| {
        let payload = vec![7; usize::from(bytes) - headers];
        let datagram = frame::udp(source, to.ip(), (40_000, to.port()), &payload);
        let packet = frame::ip(source, to.ip(), 17, &datagram);
        socket.send(&frame::ethernet(gateway, own, ethertype(source), &packet))
    };
    for bytes in [1_500, mtu + 1] {
        send(bytes)?;
        let answer = socket.await_frame(wait::PATIENCE, |frame| too_big(frame).is_some())?;
        let answer = answer.with_context(|| format!("no error about {bytes} bytes to {to}"))?;
        ensure!(too_big(&answer) == Some(u32::from(mtu)), "{to}: {:?}, expected {mtu}", too_big(&answer));
    }
    send(mtu)?;
    let is_echo = |frame: &[u8]| frame.len() == 14 + usize::from(mtu) && frame.starts_with(&own);
    let echo = socket.await_frame(wait::PATIENCE, is_echo)?;
    echo.map(drop).with_context(|| format!("{mtu} bytes do not arrive at {to}"))
}

fn must_be_healthy(node: &Node) -> Result<()> {
    let audit = node.wharf(&["audit"])?;
    ensure!(audit.code() == 0, "{}", audit.describe());
    wait::until_equal("exit code of `wharf status`", &0, || Ok(node.wharf(&["status"])?.code()))
}

#[test]
fn containers_of_different_subnets_reach_each_other_by_the_overlay() -> Result<()> {
    let joined = started(&[0, 1, FAR])?;
    let [a, b, c] = [&joined.nodes[0], &joined.nodes[1], &joined.nodes[FAR]];
    let (one, two, three) = (Container::start(a, "one")?, Container::start(b, "two")?, Container::start(c, "three")?);
    reach_each_other(&one, &three)?;
    reach_each_other(&two, &three)?;
    reach_each_other(&one, &two).context("without the overlay")?;
    for address in three.end.both()? {
        echo::tcp(one.space()?, three.echo.tcp_at(address), 8 << 20).context("8 MiB")?;
        must_carry(a, &one, three.echo.udp_at(address), 1_450)?;
    }
    // A node to another node's container, and a container to another node.
    let of_c = EchoServer::start(c.space())?;
    for ((v6, router), address_of_three) in [false, true].into_iter().zip(one.end.gateways()?).zip(three.end.both()?) {
        echo::tcp(a.space(), three.echo.tcp_at(address_of_three), 100_000).context("from the node")?;
        let seen = seen_by(three.space()?, a.space(), address_of_three)?;
        ensure!(seen == router, "the node's own packets to {address_of_three} come from {seen}, not from {router}");
        echo::tcp(one.space()?, of_c.tcp_at(node_address(FAR, v6)?), 10_000).context("to another node")?;
    }

    let table = a.wharf(&["cluster", "nodes"])?.ok()?;
    ensure!(table.contains("overlay to 203.0.113.2") && table.contains("via 198.51.100.2"), "{table}");
    let view: Value = serde_json::from_str(&a.wharf(&["cluster", "nodes", "-o", "json"])?.ok()?)?;
    for n in 0..THREE {
        let cidrs = view["nodes"][n]["pod_cidrs"].as_array().context("networks of a node")?;
        let by_overlay: Vec<bool> = cidrs.iter().map(|cidr| cidr["overlay"] == true).collect();
        ensure!(by_overlay == [n == FAR; 2], "{view}");
    }
    let status = a.wharf(&["cluster", "status"])?.ok()?;
    ensure!(status.contains("4 of 4 in force"), "{status}");
    let expected = ("ok".to_owned(), "3 nodes, 4 routes, 2 by the overlay".to_owned());
    ensure!(component(a)? == expected, "{:?}", component(a)?);
    let told = a.wharf(&["explain", &three.end.v4()?.to_string()])?.ok()?;
    ensure!(told.contains("of node c: packets to it go by overlay to 203.0.113.2"), "{told}");
    for node in [a, b, c] {
        must_be_healthy(node)?;
    }
    a.detach(&one.end)?;
    b.detach(&two.end)?;
    c.detach(&three.end)?;
    joined.end()
}

#[test]
fn the_overlay_carries_both_families_over_an_ipv6_network() -> Result<()> {
    let mut joined = Nodes::join(2, "overlay")?;
    let of_v6 = |n: usize| row(NAMES[n], &[address(n, true)], &[pool(n, false), pool(n, true)]);
    joined.write(&[of_v6(0), of_v6(1)].concat())?;
    for node in &mut joined.nodes {
        ip(node.space(), "-4 addr flush dev up0")?;
        node.start_agent()?;
    }
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, tunnel(1, &address(0, true), &address(1, true)))?;
    await_routes(b, tunnel(0, &address(1, true), &address(0, true)))?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    reach_each_other(&one, &two)?;
    for address in two.end.both()? {
        must_carry(a, &one, two.echo.udp_at(address), 1_430)?;
    }
    a.detach(&one.end)?;
    b.detach(&two.end)?;
    joined.end()
}

#[test]
fn nodes_of_different_routing_reach_each_other() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    set_routing(&mut joined.nodes[1], "overlay");
    for n in [0, 1] {
        joined.nodes[n].start_agent()?;
    }
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, all_routes(0))?;
    let by_overlay = |n: usize| tunnel(n, &address(1, false), &address(n, false));
    await_routes(b, [by_overlay(0), by_overlay(FAR)].concat())?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    reach_each_other(&one, &two)?;
    a.detach(&one.end)?;
    b.detach(&two.end)?;
    joined.end()
}

fn nft(space: &Space, rules: &str) -> Result<()> {
    let mut command = command_in(space, "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), wait::PATIENCE)?.ok().map(drop)
}

#[test]
fn translated_connections_to_a_container_behind_the_overlay_are_answered_by_the_overlay() -> Result<()> {
    let joined = started(&[0, FAR])?;
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    let three = Container::start(c, "three")?;
    // Like many networks, this one drops addresses of containers.
    let strict = "table inet between {
        chain forward {
            type filter hook forward priority 0;
            ip saddr 10.87.0.0/16 drop
            ip6 saddr fd87::/32 drop
        }
    }
    ";
    nft(joined.switch()?, strict)?;
    // In place of kube-proxy: a service, and its node port.
    let [to4, to6] = three.end.both()?.map(|address| three.echo.tcp_at(address));
    let [own4, own6] = [address(0, false), address(0, true)];
    let service = format!(
        "table inet service {{
            chain outside {{
                type nat hook prerouting priority -100;
                ip daddr {own4} tcp dport 30080 dnat ip to {to4}
                ip6 daddr {own6} tcp dport 30080 dnat ip6 to {to6}
            }}
            chain node {{
                type nat hook output priority -100;
                ip daddr 192.0.2.80 tcp dport 80 dnat ip to {to4}
                ip6 daddr 2001:db8:80::80 tcp dport 80 dnat ip6 to {to6}
            }}
            chain sources {{
                type nat hook postrouting priority 100;
                ct status dnat masquerade
            }}
        }}
        "
    );
    nft(a.space(), &service)?;
    for (from, to) in [
        (a.space(), "192.0.2.80:80"),
        (a.space(), "[2001:db8:80::80]:80"),
        (joined.switch()?, "198.51.100.1:30080"),
        (joined.switch()?, "[2001:db8:7::1]:30080"),
    ] {
        echo::tcp(from, to.parse()?, 1_000).with_context(|| format!("to {to}"))?;
    }
    must_be_healthy(a)?;
    c.detach(&three.end)?;
    joined.end()
}

fn node_address(n: usize, v6: bool) -> Result<IpAddr> {
    address(n, v6).parse().context("address of a node")
}

/// Address of a container that node `n` may have.
fn container_of(n: usize, v6: bool) -> Result<IpAddr> {
    let text = if v6 { format!("fd87:0:0:{}::77", n + 1) } else { format!("10.87.{n}.77") };
    text.parse().context("address of a container")
}

/// The router's link to the far node, for frames with any source.
struct Wire {
    socket: PacketSocket,
    to: Mac,
}

impl Wire {
    fn to_far(joined: &Nodes) -> Result<Self> {
        let to = PacketSocket::open(joined.nodes[FAR].space(), "up0")?.mac()?;
        Ok(Self { socket: PacketSocket::open(joined.switch()?, &port(FAR))?, to })
    }

    /// Sends a datagram to the far node's overlay.
    fn send(&self, from: IpAddr, payload: &[u8]) -> Result<()> {
        let to = node_address(FAR, from.is_ipv6())?;
        let packet = frame::ip(from, to, 17, &frame::udp(from, to, (50_000, PORT), payload));
        self.socket.send(&frame::ethernet(self.to, self.socket.mac()?, ethertype(from), &packet))
    }
}

/// RFC 7348, section 5: flags with a valid identifier, the identifier, the inner frame.
fn vxlan(vni: u32, frame: &[u8]) -> Vec<u8> {
    [&[8, 0, 0, 0][..], &(vni << 8).to_be_bytes(), frame].concat()
}

/// Inner frame with a text for a container.
fn inner(from: IpAddr, to: SocketAddr, text: &str) -> Vec<u8> {
    let datagram = frame::udp(from, to.ip(), (9, to.port()), text.as_bytes());
    frame::ethernet(ELSEWHERE, STRANGER, ethertype(from), &frame::ip(from, to.ip(), 17, &datagram))
}

/// A frame with another ethertype; `kept`: where its payload begins.
fn retyped(frame: &[u8], kind: &[u8], kept: usize) -> Vec<u8> {
    [&frame[..12], kind, &frame[kept..]].concat()
}

fn inbox(container: &Container) -> Result<UdpSocket> {
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    let socket = container.space()?.run(|| UdpSocket::bind(any))?.context("bind a receiver")?;
    socket.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
    Ok(socket)
}

/// The next datagram has this text: none of those that were sent before on the same path has arrived.
fn must_be_next(inbox: &UdpSocket, expected: &str) -> Result<()> {
    let mut buffer = [0; 2_048];
    let n = inbox.recv(&mut buffer).with_context(|| format!("{expected:?} does not arrive"))?;
    let text = String::from_utf8_lossy(&buffer[..n]);
    ensure!(text == expected, "{text:?} arrives before {expected:?}");
    Ok(())
}

/// A datagram that the far node must drop: name, outer source, payload.
type Bad = (&'static str, IpAddr, Vec<u8>);

/// Each differs in one point from a datagram of node b that arrives. Their text is `bad: NAME`. `router`: of node c.
fn bad(to: SocketAddr, neighbour: IpAddr, router: IpAddr, outer_v6: bool) -> Result<Vec<Bad>> {
    let v6 = to.is_ipv6();
    let (b, of_b, of_a) = (node_address(1, outer_v6)?, container_of(1, v6)?, container_of(0, v6)?);
    let text = |name: &str, from: IpAddr| inner(from, to, &format!("bad: {name}"));
    let outside: IpAddr = if v6 { "2001:db8:5::1" } else { "192.0.2.1" }.parse()?;
    let between: IpAddr = if outer_v6 { "2001:db8:9::1" } else { "203.0.113.1" }.parse()?;
    let mut all = Vec::new();
    for (name, from) in [
        ("a container of node a", of_a),
        ("another container of node c", neighbour),
        ("the router address of node c", router),
        ("node c", node_address(FAR, v6)?),
        ("node a", node_address(0, v6)?),
        ("an address outside the cluster", outside),
    ] {
        all.push((name, b, vxlan(VNI, &text(name, from))));
    }
    for (name, outer) in [("from the router", between), ("from a container of node b", container_of(1, outer_v6)?)] {
        all.push((name, outer, vxlan(VNI, &text(name, of_b))));
    }
    let name = "another network identifier";
    all.push((name, b, vxlan(VNI + 1, &text(name, of_b))));
    let name = "no network identifier";
    all.push((name, b, [&[0; 8][..], &text(name, of_b)].concat()));
    let name = "a VLAN";
    all.push((name, b, vxlan(VNI, &retyped(&text(name, of_b), &[0x81, 0, 0, 7], 12))));
    // The kernel passes on a frame with VLAN 0 as one without a tag.
    let name = "a container of node a, with VLAN 0";
    all.push((name, b, vxlan(VNI, &retyped(&text(name, of_a), &[0x81, 0, 0, 0], 12))));
    let name = "the other family's type";
    let other = if v6 { IPV4 } else { IPV6 };
    all.push((name, b, vxlan(VNI, &retyped(&text(name, of_b), &other.to_be_bytes(), 14))));
    let whole = text("half a frame", of_b);
    for (name, length) in [("half an IP header", 24), ("an Ethernet header", 14), ("half an Ethernet header", 7)] {
        all.push((name, b, vxlan(VNI, &whole[..length])));
    }
    all.push(("a VXLAN header", b, vxlan(VNI, &[])));
    all.push(("half a VXLAN header", b, vxlan(VNI, &[])[..4].to_vec()));
    all.push(("nothing", b, Vec::new()));
    let question = match (of_b, router) {
        (IpAddr::V4(asker), IpAddr::V4(target)) => {
            let arp = frame::arp(1, (STRANGER, asker), ([0; 6], target));
            frame::ethernet(BROADCAST, STRANGER, ARP, &arp)
        }
        (_, IpAddr::V6(target)) => {
            let asker = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
            frame::ethernet(ELSEWHERE, STRANGER, IPV6, &frame::neighbour(135, asker, target, target, STRANGER))
        }
        _ => bail!("{router} is not of the inner family"),
    };
    all.push(("a question for a link-layer address", b, vxlan(VNI, &question)));
    Ok(all)
}

#[test]
fn frames_that_no_known_node_may_send_are_dropped() -> Result<()> {
    let joined = started(&[1, FAR])?;
    let [b, c] = [&joined.nodes[1], &joined.nodes[FAR]];
    let (two, three, four) = (Container::start(b, "two")?, Container::start(c, "three")?, Container::start(c, "four")?);
    let (wire, inbox, of_c) = (Wire::to_far(&joined)?, inbox(&three)?, EchoServer::start(c.space())?);
    let port = inbox.local_addr().context("the receiver's port")?.port();
    let families = [(false, false), (false, true), (true, false), (true, true)];
    for (v6, outer_v6) in families {
        let family = usize::from(v6);
        let to = SocketAddr::new(three.end.both()?[family], port);
        let (outer, of_b) = (node_address(1, outer_v6)?, container_of(1, v6)?);
        for (name, from) in [("a container of node b", of_b), ("node b", node_address(1, v6)?)] {
            wire.send(outer, &vxlan(VNI, &inner(from, to, name)))?;
            must_be_next(&inbox, name).with_context(|| format!("from {outer}"))?;
        }
        for (name, from, payload) in bad(to, four.end.both()?[family], three.end.gateways()?[family], outer_v6)? {
            wire.send(from, &payload)?;
            wire.send(outer, &vxlan(VNI, &inner(of_b, to, name)))?;
            must_be_next(&inbox, name).with_context(|| format!("{name}, in a frame from {from} to {to}"))?;
        }

        // By a program on node b, which may send what node b may send.
        let far = SocketAddr::new(node_address(FAR, outer_v6)?, PORT);
        let claim = vxlan(VNI, &inner(of_b, to, "a claim"));
        let by_node = echo::udp_client(b.space(), far)?;
        by_node.send(&vxlan(VNI, &inner(container_of(0, v6)?, to, "bad: by a program"))).context("send")?;
        by_node.send(&claim).context("send")?;
        must_be_next(&inbox, "a claim").context("by a program on node b")?;

        // By a container of node b, which reaches all other ports of node c with its node's address.
        echo::udp(two.space()?, of_c.udp_at(far.ip()), 100).context("another port of node c")?;
        echo::udp_client(two.space()?, far)?.send(&claim).context("send")?;
        echo::udp_client(two.space()?, to)?.send(b"plain").context("send")?;
        must_be_next(&inbox, "plain").context("by a container of node b")?;
    }
    // At an address of node c that its row does not have, the overlay receives, too.
    ip(c.space(), "addr add 203.0.113.9/24 dev up0")?;
    let unlisted: IpAddr = "203.0.113.9".parse().context("address")?;
    let to = SocketAddr::new(three.end.v4()?.into(), port);
    let claim = vxlan(VNI, &inner(container_of(1, false)?, to, "a claim"));
    echo::tcp(two.space()?, of_c.tcp_at(unlisted), 100).context("another port at the unlisted address")?;
    echo::udp_client(b.space(), SocketAddr::new(unlisted, PORT))?.send(&claim).context("send")?;
    must_be_next(&inbox, "a claim").context("by a program on node b, to the unlisted address")?;
    echo::udp_client(two.space()?, SocketAddr::new(unlisted, PORT))?.send(&claim).context("send")?;
    echo::udp_client(two.space()?, to)?.send(b"plain").context("send")?;
    must_be_next(&inbox, "plain").context("by a container of node b, to the unlisted address")?;
    let neighbours = ip(c.space(), &format!("neigh show dev {DEVICE}"))?;
    ensure!(!neighbours.contains("02:00:00:00:be:ef"), "learned from a frame: {neighbours}");
    must_be_healthy(c)?;
    connect(&two, &three)?;

    // Without the chain in the node's firewall, the container's datagram arrives. The agent may restore the chain
    // before.
    let to = SocketAddr::new(three.end.v4()?.into(), port);
    let far = SocketAddr::new(node_address(FAR, false)?, PORT);
    let claim = vxlan(VNI, &inner(container_of(1, false)?, to, "a claim"));
    let by_container = echo::udp_client(two.space()?, far)?;
    inbox.set_read_timeout(Some(Duration::from_millis(20))).context("set a time limit")?;
    wait::until("a claim by a container", || {
        let mut flush = command_in(b.space(), "nft")?;
        flush.args(["flush", "chain", "inet", "wharf", "overlay"]);
        run(flush, b"", wait::PATIENCE)?.ok()?;
        by_container.send(&claim).context("send")?;
        Ok(must_be_next(&inbox, "a claim").is_ok().then_some(()))
    })?;
    b.wharf(&["audit", "--repair"])?;
    wait::until("the chain", || Ok(b.found_amiss()?.is_empty().then_some(())))?;
    b.detach(&two.end)?;
    c.detach(&three.end)?;
    c.detach(&four.end)?;
    joined.end()
}

#[test]
fn a_published_port_of_the_same_number_takes_no_frame() -> Result<()> {
    let mut joined = Nodes::join(2, "overlay")?;
    // Published before there is an overlay: nothing holds the port.
    joined.write(&own_row(1))?;
    joined.nodes[1].start_agent()?;
    let ports = json!({"portMappings": [{"hostPort": PORT, "containerPort": 7, "protocol": "udp"}]});
    let sandbox = joined.nodes[1].sandbox("published")?;
    let netconf = joined.nodes[1].netconf().with("runtimeConfig", ports);
    let published = joined.nodes[1].attach_with(&sandbox, "eth0", &netconf)?;
    joined.write(&[own_row(0), own_row(1)].concat())?;
    joined.nodes[0].start_agent()?;
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, tunnel(1, &address(0, false), &address(1, false)))?;
    await_routes(b, tunnel(0, &address(1, false), &address(0, false)))?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    reach_each_other(&one, &two)?;
    a.detach(&one.end)?;
    b.detach(&two.end)?;
    b.detach(&published)?;
    joined.end()
}

#[test]
fn the_overlay_follows_its_nodes() -> Result<()> {
    let joined = started(&[0, FAR])?;
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    let (one, three) = (Container::start(a, "one")?, Container::start(c, "three")?);
    connect(&one, &three)?;
    ensure!(has_device(a)?, "routes without {DEVICE}");

    // Node c refuses these texts, and keeps its routes.
    joined.write(&[own_row(0), own_row(1)].concat())?;
    await_routes(a, native(1))?;
    ensure!(has_device(a)?, "node b may use the overlay, although node a does not");
    joined.write(&own_row(0))?;
    wait::until_equal("the device goes with the last route", &false, || has_device(a))?;
    joined.write(&[own_row(0), own_row(1), own_row(FAR)].concat())?;
    await_routes(a, all_routes(0))?;
    connect(&one, &three).context("with the row again")?;

    let moved = "203.0.113.42";
    ip(c.space(), &format!("addr add {moved}/24 dev up0"))?;
    let with_moved = row(NAMES[FAR], &[moved.to_owned(), address(FAR, true)], &[pool(FAR, false), pool(FAR, true)]);
    joined.write(&[own_row(0), own_row(1), with_moved].concat())?;
    await_routes(a, [native(1), tunnel(FAR, &address(0, false), moved)].concat())?;
    await_routes(c, [0, 1].map(|n| tunnel(n, moved, &address(n, false))).concat())?;
    connect(&one, &three).context("at another address")?;
    connect(&three, &one).context("from another address")?;
    must_be_healthy(a)?;
    must_be_healthy(c)?;
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}

/// Damage to the overlay's interface by another program.
type Damage = (&'static str, fn(&Space) -> Result<()>);

const DAMAGE: [Damage; 4] = [
    ("a removed interface", |space| ip(space, &format!("link del {DEVICE}")).map(drop)),
    ("an interface that is down", |space| ip(space, &format!("link set {DEVICE} down")).map(drop)),
    ("a removed filter", |space| programs::take_off(space, DEVICE, "ingress")),
    ("a renamed interface", |space| {
        // Kernels before 6.2 rename only interfaces that are down.
        ip(space, &format!("link set {DEVICE} down"))?;
        ip(space, &format!("link set {DEVICE} name renamed"))?;
        ip(space, "link set renamed up").map(drop)
    }),
];

/// Repeats it until the audit names it: the agent may repair it before.
fn must_be_named(node: &Node, (what, damage): Damage) -> Result<()> {
    let mut refusal = None;
    let named = wait::until(&format!("the audit to name {what}"), || {
        refusal = damage(node.space()).err();
        let is_named = node.audit()?.findings.iter().any(|finding| finding.subject == "overlay");
        Ok((is_named && node.wharf(&["audit"])?.code() == 1).then_some(()))
    });
    named.with_context(|| format!("error of the last attempt: {refusal:?}"))
}

#[test]
fn traffic_goes_on_while_agents_are_killed_and_damage_is_repaired() -> Result<()> {
    let mut joined = started(&[0, FAR])?;
    let one = Container::start(&joined.nodes[0], "one")?;
    let three = Container::start(&joined.nodes[FAR], "three")?;
    let stream = UdpStream::start(one.space()?, three.space()?, three.end.v4()?.into(), 1_000)?;
    let flow = TcpFlow::start(one.space()?, three.space()?, three.end.v6()?.into())?;
    for n in [0, FAR] {
        joined.nodes[n].kill_agent()?;
        stream.await_more(300)?;
        flow.await_more(100)?;
        joined.nodes[n].start_agent()?;
        joined.nodes[n].await_rebuilt()?;
        stream.await_more(300)?;
        flow.await_more(100)?;
    }
    stream.stop()?.must_be_perfect()?;
    flow.stop()?.must_be_whole()?;

    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    for damage in DAMAGE {
        must_be_named(a, damage)?;
        a.wharf(&["audit", "--repair"])?;
        must_be_healthy(a).with_context(|| format!("after the repair of {}", damage.0))?;
        await_routes(a, all_routes(0))?;
        connect(&one, &three).with_context(|| format!("after the repair of {}", damage.0))?;
        connect(&three, &one).with_context(|| format!("after the repair of {}", damage.0))?;
    }
    must_be_named(a, DAMAGE[0])?;
    await_routes(a, all_routes(0)).context("the agent repairs it by itself")?;
    connect(&one, &three)?;
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}

/// Whether a frame has an IP packet for this address.
fn is_to(frame: &[u8], address: IpAddr) -> bool {
    let to = match address {
        IpAddr::V4(to) => (30, to.octets().to_vec()),
        IpAddr::V6(to) => (38, to.octets().to_vec()),
    };
    let is_there = frame.get(to.0..).is_some_and(|rest| rest.starts_with(&to.1));
    is_there && frame.get(12..14) == Some(&ethertype(address).to_be_bytes()[..])
}

#[test]
fn no_packet_to_another_nodes_container_takes_another_route_while_its_route_is_missing() -> Result<()> {
    const MARKER: &[u8] = b"all packets before this one are seen";
    let mut joined = started(&[0, FAR])?;
    let one = Container::start(&joined.nodes[0], "one")?;
    let three = Container::start(&joined.nodes[FAR], "three")?;
    connect(&one, &three)?;
    let mut others = [pool(1, false), pool(1, true), pool(FAR, false), pool(FAR, true)];
    others.sort();
    ensure!(unreachable(&joined.nodes[0])? == others, "{:?}", unreachable(&joined.nodes[0])?);

    joined.nodes[0].kill_agent()?;
    let a = &joined.nodes[0];
    ip(a.space(), &format!("link del {DEVICE}"))?;
    for (v6, family) in [(false, "-4"), (true, "-6")] {
        ip(a.space(), &format!("{family} route del {} via {}", pool(1, v6), address(1, v6)))?;
    }
    ensure!(routes(a)?.is_empty(), "{:?}", routes(a)?);
    let seen = PacketSocket::open(joined.switch()?, &port(0))?;
    for (v6, of_three) in [false, true].into_iter().zip(three.end.both()?) {
        for (address, space) in [(of_three, one.space()?), (of_three, a.space()), (container_of(1, v6)?, one.space()?)]
        {
            let to = three.echo.tcp_at(address);
            let error = space.run(|| TcpStream::connect_timeout(&to, wait::PATIENCE))?.err();
            let kind = error.with_context(|| format!("{to} answers"))?.kind();
            let is_unreachable = matches!(kind, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable);
            ensure!(is_unreachable, "{to}: {kind:?}");
            echo::udp_client(a.space(), SocketAddr::new(node_address(FAR, v6)?, 9))?.send(MARKER).context("send")?;
            let first = seen.await_frame(wait::PATIENCE, |frame| is_to(frame, address) || frame.ends_with(MARKER))?;
            let first = first.context("the marker does not arrive")?;
            ensure!(first.ends_with(MARKER), "a packet to {address} leaves by the default route");
        }
    }

    joined.nodes[0].start_agent()?;
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    await_routes(a, all_routes(0))?;
    connect(&one, &three)?;
    connect(&three, &one)?;
    must_be_healthy(a)?;
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}

#[test]
fn a_kill_amid_the_start_of_the_overlay_leaves_what_the_next_start_completes() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    let node = &mut joined.nodes[0];
    for point in ["overlay/after-row", "overlay/after-device", "overlay/after-filter", "peers/before"] {
        crash::wish(node.dirs(), &format!("datapath/{point}"))?;
        let survived = node.start_armed_agent()?;
        crash::forget_wish(node.dirs())?;
        ensure!(!survived, "no kill at {point}");
    }
    node.start_agent()?;
    await_routes(node, all_routes(0))?;
    must_be_healthy(node)?;
    joined.end()
}

#[test]
fn a_foreign_interface_stays_and_what_is_wharfs_goes() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    ip(joined.nodes[0].space(), &format!("link add {DEVICE} type bridge"))?;
    joined.nodes[0].start_agent()?;
    let is_foreign = |node: &Node| -> Result<()> {
        let link = ip(node.space(), &format!("-d link show {DEVICE}"))?;
        ensure!(link.contains("bridge"), "another interface has its name: {link}");
        Ok(())
    };
    let a = &joined.nodes[0];
    await_routes(a, native(1))?;
    a.wharf(&["audit", "--repair"])?;
    let audit = a.wharf(&["audit"])?;
    ensure!(audit.code() == 1 && audit.stdout.contains(DEVICE), "{}", audit.describe());
    let status = a.wharf(&["status"])?;
    ensure!(status.code() == 1, "{}", status.describe());
    let status = a.wharf(&["cluster", "status"])?;
    ensure!(status.code() == 1 && status.stdout.contains("2 of 4 in force"), "{}", status.describe());
    is_foreign(a)?;
    joined.nodes[0].kill_agent()?;
    cleanup(&joined.nodes[0], &["--force"])?.ok()?;
    is_foreign(&joined.nodes[0])?;
    ip(joined.nodes[0].space(), &format!("link del {DEVICE}"))?;
    joined.nodes[0].start_agent()?;
    await_routes(&joined.nodes[0], all_routes(0)).context("without the foreign interface")?;
    must_be_healthy(&joined.nodes[0])?;

    joined.nodes[0].kill_agent()?;
    let listed = cleanup(&joined.nodes[0], &["--dry-run"])?;
    for what in
        ["route 10.87.2.0/24 overlay to 203.0.113.2 from 198.51.100.1", "unreachable route 10.87.2.0/24", DEVICE]
    {
        ensure!(listed.stdout.contains(what), "{what}: {}", listed.describe());
    }
    ensure!(has_device(&joined.nodes[0])?, "a dry run removes {DEVICE}");
    cleanup(&joined.nodes[0], &["--force"])?.ok()?;
    ensure!(routes(&joined.nodes[0])?.is_empty(), "{:?}", routes(&joined.nodes[0])?);
    ensure!(unreachable(&joined.nodes[0])?.is_empty(), "{:?}", unreachable(&joined.nodes[0])?);
    ensure!(!has_device(&joined.nodes[0])?, "cleanup leaves {DEVICE}");

    joined.nodes[0].start_agent()?;
    await_routes(&joined.nodes[0], all_routes(0)).context("after the cleanup")?;
    joined.nodes[0].stop_agent()?;
    ensure!(has_device(&joined.nodes[0])?, "{DEVICE} goes with the agent");
    set_routing(&mut joined.nodes[0], "native");
    joined.nodes[0].start_agent()?;
    await_routes(&joined.nodes[0], native(1))?;
    wait::until_equal("the device goes without the setting", &false, || has_device(&joined.nodes[0]))?;
    joined.end()
}

/// A policy for the containers of an app. `direction`: `ingress` and `from`, or `egress` and `to`.
fn only(app: &str, direction: [&str; 2], cidrs: [String; 2]) -> PolicyImport {
    let [rules, peers] = direction;
    let kind = if rules == "ingress" { "Ingress" } else { "Egress" };
    let blocks = cidrs.map(|cidr| format!("{{ipBlock: {{cidr: '{cidr}'}}}}")).join(", ");
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {app}}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {app}}}}}, policyTypes: [{kind}], \
         {rules}: [{{{peers}: [{blocks}]}}]}}\n"
    );
    PolicyImport { file: format!("{app}.yaml"), text }
}

#[test]
fn policy_between_nodes_holds_over_the_overlay() -> Result<()> {
    let joined = started(&[0, FAR])?;
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    let (one, three) = (Container::start(a, "one")?, Container::start(c, "three")?);
    connect(&one, &three).context("without a policy")?;
    // Node c judges by the client's address, then node a by the server's.
    for (node, app, direction, peer) in [(c, "three", ["ingress", "from"], 0), (a, "one", ["egress", "to"], FAR)] {
        for (n, expected) in [(5, false), (peer, true)] {
            let import = only(app, direction, [pool(n, false), pool(n, true)]);
            node.ask(async |client| client.import_policy(&import).await)?;
            for address in three.end.both()? {
                let connected = can_connect(&one, three.echo.tcp_at(address))?;
                ensure!(connected == expected, "{address}, with {} {} {}", direction[0], direction[1], pool(n, false));
            }
        }
    }
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}

const KINDS: [&str; 4] = ["node", "pod", "namespace", "policy"];

fn feed_row(n: usize) -> v1::Change {
    let (addresses, cidrs) = ([address(n, false), address(n, true)], [pool(n, false), pool(n, true)]);
    feed::node(NAMES[n], &addresses.each_ref().map(String::as_str), &cidrs.each_ref().map(String::as_str))
}

#[test]
fn policy_selects_a_container_behind_the_overlay_by_its_labels() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    let file = format!("--cluster-file={}", joined.file.display());
    let directory = joined.nodes[FAR].dirs().root.join("feed");
    joined.nodes[FAR].set_flag(&file, false);
    joined.nodes[FAR].set_flag(&format!("--cluster-feed={}", directory.display()), true);
    for n in [0, FAR] {
        joined.nodes[n].start_agent()?;
    }
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    await_routes(a, all_routes(0))?;
    let (one, three) = (Container::start(a, "one")?, Container::start(c, "three")?);
    let addresses = one.end.both()?.map(|address| address.to_string());
    let pod = |app: &str| feed::pod("one", NAMES[0], &addresses.each_ref().map(String::as_str), &[("app", app)]);
    let policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: three, namespace: default}\n\
                  spec: {podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: one}}, \
                  namespaceSelector: {}}]}]}\n";
    let opening = feed::opening("kube", "one", NAMES[FAR], &KINDS);
    let mut producer = Producer::opened(&directory.join("feed.sock"), opening)?;
    let namespaces = [feed::namespace("default", &[]), feed::namespace("shop", &[])];
    let rows = [feed_row(0), feed_row(FAR), pod("other"), feed::policy("three", policy)].into_iter().chain(namespaces);
    let begins = KINDS.into_iter().map(feed::begin);
    let snapshot = begins.chain(rows).chain(KINDS.into_iter().map(feed::complete)).collect();
    let processed = producer.send(snapshot)?;
    ensure!(processed.refused.is_empty(), "{processed:?}");
    producer.settle()?;
    await_routes(c, tunnel(0, &address(FAR, false), &address(0, false)))?;
    for (app, expected) in [("other", false), ("one", true), ("other", false)] {
        producer.send(vec![pod(app)])?;
        producer.settle()?;
        for address in three.end.both()? {
            let connected = can_connect(&one, three.echo.tcp_at(address))?;
            ensure!(connected == expected, "{address}, with the label {app}");
        }
    }
    drop(producer);
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}
