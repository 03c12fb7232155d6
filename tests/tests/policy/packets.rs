//! Packets that have no ports of their own: fragments, errors, echoes; and SCTP.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recv, sendto, setsockopt, socket,
    sockopt,
};
use wharf_tests::{
    Node, NodeConfig,
    echo::{self, EchoServer},
    frame,
    icmp::{Ping, internet_checksum},
    scenario,
    sctp::SctpSocket,
    space::Space,
    world::World,
};

use crate::pods::{Ask, DENIED, Pod, document, import, network_policy};

/// More than two packets of an MTU of 1,500 hold.
const FRAGMENTED: usize = 4_000;

/// A client and a server, which takes nothing but what the policy allows.
fn pair(node: &Node) -> Result<[Pod; 2]> {
    Ok([Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?])
}

#[test]
fn fragments_share_the_verdict_of_their_packet() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        let (open, closed) = (EchoServer::start(db.space()?)?, EchoServer::start(db.space()?)?);
        let [v4, v6] = db.end.both()?;
        import(
            node,
            &network_policy(
                "db",
                &format!(
                    "{{podSelector: {{matchLabels: {{app: db}}}},
                      ingress: [{{ports: [{{protocol: UDP, port: {}}}]}}]}}",
                    open.udp_at(v4).port()
                ),
            ),
        )?;
        for address in [v4, v6] {
            echo::udp(web.space()?, open.udp_at(address), FRAGMENTED).context("an open port")?;
            let sender = echo::udp_client(web.space()?, closed.udp_at(address))?;
            for _ in 0..5 {
                sender.send(&[7; FRAGMENTED])?;
            }
            // Packets keep their order.
            echo::udp(web.space()?, open.udp_at(address), FRAGMENTED).context("the open port again")?;
        }
        ensure!(closed.datagrams() == 0, "{} datagrams came to a closed port", closed.datagrams());
        for address in [v4, v6] {
            let report = Ping { to: address, count: 1, payload: FRAGMENTED }.run(web.space()?)?;
            ensure!(report.answered == 0, "{report:?}");
        }
        import(node, &network_policy("db", "{podSelector: {matchLabels: {app: db}}, ingress: [{}]}"))?;
        for address in [v4, v6] {
            Ping { to: address, count: 2, payload: FRAGMENTED }.run(web.space()?)?.must_answer()?;
            echo::udp(web.space()?, closed.udp_at(address), FRAGMENTED)?;
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

/// Whether the error of a port that nobody has comes back.
fn is_told(from: &Pod, to: SocketAddr) -> Result<bool> {
    let socket = echo::udp_client(from.space()?, to)?;
    socket.set_read_timeout(Some(DENIED))?;
    socket.send(b"anybody?")?;
    match socket.recv(&mut [0; 16]) {
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
        other => bail!("{to}: {other:?}"),
    }
}

#[test]
fn errors_about_an_allowed_flow_pass() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        // Each isolated in the direction that the error takes: nothing lets ICMP pass.
        import(
            node,
            &[
                network_policy("web", "{podSelector: {matchLabels: {app: web}}}"),
                network_policy(
                    "db",
                    "{podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress, Egress],
                      ingress: [{ports: [{protocol: UDP, port: 9}]}]}",
                ),
            ]
            .concat(),
        )?;
        for address in db.end.both()? {
            ensure!(is_told(&web, SocketAddr::new(address, 9))?, "{address}: of an allowed port");
            ensure!(!is_told(&web, SocketAddr::new(address, 10))?, "{address}: of another port");
            ensure!(!web.reaches(address, Ask::Echo)?, "{address}: an echo, which is no error");
        }
        for address in web.end.both()? {
            ensure!(!is_told(&db, SocketAddr::new(address, 9))?, "{address}: from the database");
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

/// A packet of a port that is closed, and one of a port that is open; only the latter comes.
fn passes_port_80_alone(web: &Pod, db: &Pod, address: IpAddr) -> Result<()> {
    let [client, server] = [web, db].map(|pod| anyhow::Ok(SctpSocket::open(pod.space()?, address.is_ipv4())?));
    let (client, server) = (client?, server?);
    for port in [81, 80] {
        client.init(5_000, SocketAddr::new(address, port))?;
    }
    let (from, port) = server.receive(false)?;
    ensure!(port == 80, "{address}: an association at port {port}");
    server.acknowledge(80, from)?;
    client.receive(true).context("the answer").map(drop)
}

#[test]
fn ports_of_sctp() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        import(
            node,
            &network_policy(
                "db",
                "{podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{protocol: SCTP, port: 80}]}]}",
            ),
        )?;
        for address in db.end.both()? {
            passes_port_80_alone(&web, &db, address)?;
            ensure!(!web.reaches(address, Ask::Tcp(80))?, "{address}: TCP");
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn an_answer_to_an_echo_is_no_flow_of_its_own() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        // The database may answer, and not ask.
        import(node, &network_policy("db", "{podSelector: {matchLabels: {app: db}}, policyTypes: [Egress]}"))?;
        for (to, from) in db.end.both()?.into_iter().zip(web.end.both()?) {
            ensure!(web.reaches(to, Ask::Echo)?, "{to} answers");
            ensure!(!db.reaches(from, Ask::Echo)?, "{to} asks");
            // A datagram from where nobody was asked.
            let (one, other) =
                (echo::udp_client(db.space()?, SocketAddr::new(from, 7))?, EchoServer::start(web.space()?)?);
            one.connect(other.udp_at(from))?;
            one.send(b"unasked")?;
            one.set_read_timeout(Some(Duration::from_millis(300)))?;
            ensure!(one.recv(&mut [0; 16]).is_err() && other.datagrams() == 0, "{to} begins a flow");
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

/// A raw socket that sends and gets ICMP messages.
fn raw(space: &Space, v4: bool) -> Result<OwnedFd> {
    let (family, protocol) =
        if v4 { (AddressFamily::Inet, SockProtocol::Icmp) } else { (AddressFamily::Inet6, SockProtocol::IcmpV6) };
    let made = space.run(|| socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol))?;
    let made = made.context("make a raw socket")?;
    setsockopt(&made, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(1, 0))?;
    Ok(made)
}

/// Port unreachable (RFC 792, RFC 4443), about a datagram.
fn unreachable(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let datagram = frame::udp(from.ip(), to.ip(), (from.port(), to.port()), b"ahoy");
    let about = frame::ip(from.ip(), to.ip(), 17, &datagram);
    let (kind, code) = if to.is_ipv4() { (3, 3) } else { (1, 4) };
    let mut message = [&[kind, code, 0, 0, 0, 0, 0, 0][..], &about].concat();
    if to.is_ipv4() {
        // The kernel writes that of ICMPv6.
        let sum = internet_checksum(&message).to_be_bytes();
        message[2..4].copy_from_slice(&sum);
    }
    message
}

#[test]
fn an_error_passes_to_the_ends_of_its_flow_alone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        let other = Pod::container(node, "other", "other")?;
        import(
            node,
            &network_policy(
                "db",
                "{podSelector: {matchLabels: {app: db}},
                  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
            ),
        )?;
        let echo = EchoServer::start(web.space()?)?;
        for (number, address) in web.end.both()?.into_iter().enumerate() {
            // A flow that policy lets pass, with an answer.
            let (server, asks) = (echo.udp_at(address), echo::udp_client(other.space()?, echo.udp_at(address))?);
            asks.set_read_timeout(Some(Duration::from_secs(5)))?;
            asks.send(b"ahoy")?;
            asks.recv(&mut [0; 4])?;
            let message = unreachable(server, asks.local_addr()?);
            let (sends, v4) = (raw(other.space()?, address.is_ipv4())?, address.is_ipv4());
            let victim = db.end.both()?[number];
            for (pod, to, arrives) in [(&web, address, true), (&db, victim, false)] {
                let gets = raw(pod.space()?, v4)?;
                let to = SockaddrStorage::from(SocketAddr::new(to, 0));
                sendto(sends.as_raw_fd(), &message, &to, MsgFlags::empty()).context("send an error")?;
                let mut got = [0; 1_500];
                let mut found = false;
                // Neighbour discovery comes here, too.
                while let Ok(length) = recv(gets.as_raw_fd(), &mut got, MsgFlags::empty()) {
                    let message = &got[if v4 { 20 } else { 0 }..length];
                    found |= message[0] == if v4 { 3 } else { 1 };
                    if found {
                        break;
                    }
                }
                ensure!(found == arrives, "{to}: the error arrived: {found}");
            }
        }
        [web, db, other].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

/// Whether datagrams that are too large for the path arrive in the end: the router's error tells what it takes.
fn learns_the_mtu(client: &UdpSocket) -> Result<bool> {
    client.set_read_timeout(Some(Duration::from_millis(200)))?;
    for _ in 0..10 {
        // Refused where the error came.
        let _ = client.send(&[7; 1_400]);
        if client.recv(&mut [0; 1_500]).is_ok_and(|length| length == 1_400) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[test]
fn an_isolated_container_learns_the_mtu_of_its_path() -> Result<()> {
    for keeps in ["off", "on"] {
        scenario(NodeConfig::default().flags(&[&format!("--policy-keep-flows={keeps}")]), |node| {
            let world = World::behind_router(node, 1_300)?;
            let web = Pod::container(node, "web", "web")?;
            import(
                node,
                &network_policy(
                    "web",
                    "{podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress, Egress],
                      egress: [{ports: [{protocol: UDP}]}]}",
                ),
            )?;
            let mut flows = Vec::new();
            for address in world.addresses() {
                let client = echo::udp_client(web.space()?, world.echo().udp_at(address))?;
                client.set_read_timeout(Some(Duration::from_secs(5)))?;
                for _ in 0..2 {
                    client.send(b"ahoy")?;
                    client.recv(&mut [0; 4]).context("to begin with")?;
                }
                flows.push(client);
            }
            // A change that is about none of them.
            import(node, &network_policy("none", "{podSelector: {matchLabels: {app: nobody}}}"))?;
            for client in &flows {
                ensure!(learns_the_mtu(client)?, "keep flows {keeps}: {client:?}");
            }
            ensure!(!web.reaches(world.addresses()[0], Ask::Tcp(9))?, "TCP");
            node.detach(&web.end)
        })?;
    }
    Ok(())
}

/// An ICMP message with this type and identifier.
fn message(v4: bool, kind: u8, identifier: u16) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0][..], &identifier.to_be_bytes(), &[0, 1], &[0; 12]].concat();
    if v4 {
        let sum = internet_checksum(&message).to_be_bytes();
        message[2..4].copy_from_slice(&sum);
    }
    message
}

/// A policy that lets the database be asked for an echo, and nothing else.
fn echo_alone() -> String {
    document(
        "cilium.io/v2",
        "CiliumNetworkPolicy",
        "{name: db}",
        "{endpointSelector: {matchLabels: {app: db}}, ingress: [
          {icmps: [{fields: [{type: EchoRequest, family: IPv4}, {type: EchoRequest, family: IPv6}]}]}]}",
    )
}

/// The later fragments show neither protocol nor type.
#[test]
fn an_allowed_echo_may_come_in_fragments() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        import(node, &echo_alone())?;
        for address in db.end.both()? {
            Ping { to: address, count: 2, payload: FRAGMENTED }.run(web.space()?)?.must_answer()?;
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn an_allowed_echo_opens_no_other_type_of_icmp() -> Result<()> {
    /// Timestamp (RFC 792); one for experiments (RFC 4443).
    const OTHER: [u8; 2] = [13, 200];
    scenario(NodeConfig::default(), |node| {
        let [web, db] = pair(node)?;
        import(node, &echo_alone())?;
        for (address, other) in db.end.both()?.into_iter().zip(OTHER) {
            let (v4, to) = (address.is_ipv4(), SockaddrStorage::from(SocketAddr::new(address, 0)));
            let (sends, gets) = (raw(web.space()?, v4)?, raw(db.space()?, v4)?);
            let echo = if v4 { 8 } else { 128 };
            // Zero is what a message without an identifier has.
            for (kind, identifier) in [(other, 0), (echo, 0), (other, 0), (echo, 9), (other, 9), (echo, 10)] {
                sendto(sends.as_raw_fd(), &message(v4, kind, identifier), &to, MsgFlags::empty())?;
            }
            let (mut kinds, mut got) = (Vec::new(), [0; 1_500]);
            while let Ok(length) = recv(gets.as_raw_fd(), &mut got, MsgFlags::empty()) {
                let kind = got[if v4 { 20 } else { 0 }..length][0];
                if kind == echo || kind == other {
                    kinds.push(kind);
                }
            }
            ensure!(kinds == [echo; 3], "{address}: these types arrived: {kinds:?}");
        }
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
