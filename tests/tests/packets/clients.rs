//! The share of a client in the connections of the node's proxies: what counts, and what is dropped.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, MapData, lpm_trie::Key};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt};
use wharf_common::{
    CellKey, CellRow,
    Direction::Egress,
    DropReason::ProxyShareSpent,
    EndpointKey, FlowKey, PeerRow, PolicyState, ProxyUse, SetsRow,
    flow::{FLOW_ADMITTED, FLOW_RESET, TCP},
    map,
    policy::{Hit, MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, redirect},
};

use crate::{
    fixture::{A, ELSEWHERE4, Endpoint, FROM_CONTAINER, OK, SHOT, TO_CONTAINER, pair, udp},
    flows::{ACK, FIN, RST, SYN, Sent, now, row, table},
};

/// Connections that a client may open here.
const SHARE: u32 = 3;
/// The server's port.
const PORT: u16 = 443;
/// Ticks. An emulated processor verifies the programs for more than a minute.
const HOUR: u32 = 3_600;

/// A connection of A's from this port.
const fn from(port: u16) -> Sent {
    Sent::new(IpAddr::V4(ELSEWHERE4), TCP, (port, PORT))
}

/// A's rules redirect all that it sends to a listening socket in the test's network namespace. Limits hold until
/// `until`.
fn redirected(limit: u32, until: u32) -> Result<(Endpoint, TcpListener)> {
    const SET: u32 = 1;
    let (mut a, _b) = pair()?;
    // The first run of a thread enters the network namespace.
    a.run(FROM_CONTAINER, &udp(A.v4, ELSEWHERE4))?;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("listen as the proxy")?;
    let hit = Hit { rank: 1, rule: 1, ruling: redirect(listener.local_addr()?.port(), false) };
    let node = &mut a.node;
    let mut peers: LpmTrie<&mut MapData, EndpointKey, PeerRow> =
        node.map_mut(map::IPCACHE).context("peers")?.try_into()?;
    peers.insert(&Key::new(0, EndpointKey::default()), PeerRow { identity: 2, class: 0 }, 0)?;
    let mut cells: HashMap<&mut MapData, CellKey, CellRow> =
        node.map_mut(map::POLICY_CELLS).context("cells")?.try_into()?;
    let cell = CellRow { admin: Hit::NONE, rest: hit, packets: 0, bytes: 0 };
    cells.insert(CellKey { set: SET, class: 0, port: 0 }, cell, 0)?;
    let mut sets: Array<&mut MapData, SetsRow> = node.map_mut(map::POLICY_SETS).context("sets")?.try_into()?;
    sets.set(A.id, SetsRow { ingress: 0, egress: SET }, 0)?;
    let mut state: Array<&mut MapData, PolicyState> = node.map_mut(map::POLICY_STATE).context("state")?.try_into()?;
    state.set(0, PolicyState { generation: 1, flags: 0 }, 0)?;
    let mut uses = uses(&mut a)?;
    uses.set(0, ProxyUse { opened: 0, limit: until }, 0)?;
    uses.set(A.id, ProxyUse { opened: 0, limit }, 0)?;
    Ok((a, listener))
}

fn uses(a: &mut Endpoint) -> Result<Array<&mut MapData, ProxyUse>> {
    Ok(a.node.map_mut(map::PROXY_USE).context("uses")?.try_into()?)
}

/// A sends a packet, or the proxy answers. Returns whether it passed.
fn passes(a: &Endpoint, sent: Sent) -> Result<bool> {
    let (before, packet) = (a.counters()?, sent.packet());
    let (program, came_by) = if sent.by_a { (FROM_CONTAINER, A.ifindex) } else { (TO_CONTAINER, 0) };
    let (action, _) = a.run_marked(program, &packet, 0, came_by)?;
    let counted = a.counters()?.since(&before)?;
    match action {
        SHOT => {
            let length = u64::try_from(packet.len())?;
            ensure!(counted == [(Egress, ProxyShareSpent, 1, length)], "{sent:?}: counted {counted:?}");
            Ok(false)
        }
        OK => Ok(true),
        other => anyhow::bail!("{sent:?}: verdict {other}, counted {counted:?}"),
    }
}

/// First packet and answer of a connection.
fn begins(a: &Endpoint, port: u16) -> Result<bool> {
    Ok(passes(a, from(port).with(SYN))? && passes(a, from(port).back().with(SYN | ACK))?)
}

fn opened(a: &mut Endpoint) -> Result<[u32; 2]> {
    let uses = uses(a)?;
    Ok([uses.get(&A.id, 0)?.opened, uses.get(&0, 0)?.opened])
}

#[test]
fn a_client_opens_its_share_of_connections_and_no_more() -> Result<()> {
    let (mut a, _listener) = redirected(SHARE, now()? + HOUR)?;
    // Handshakes that are under way at once do not pass the share either.
    for port in 1..=5 {
        ensure!(begins(&a, port)?, "{port}: nothing is open yet");
    }
    ensure!(opened(&mut a)? == [0, 0], "a first packet opens nothing");
    for port in 1..=5_u16 {
        ensure!(passes(&a, from(port))? == (u32::from(port) <= SHARE), "{port}: the packet that opens the connection");
    }
    ensure!(opened(&mut a)? == [SHARE, SHARE], "{:?}", opened(&mut a)?);
    ensure!(!passes(&a, from(6).with(SYN))? && row(&mut a, &from(6).key())?.is_none(), "one more, without a row");
    // No packet gives a place back: a reset or an end that the client causes proves nothing.
    for flags in [RST, FIN | ACK] {
        ensure!(passes(&a, from(1).back().with(flags))?, "the proxy's {flags}");
        ensure!(!passes(&a, from(6).with(SYN))?, "after the proxy's {flags}");
    }
    // A packet from elsewhere with the client's address, which nobody checked, counts for nobody.
    for port in 8..=9 {
        let (action, _) = a.run_marked(FROM_CONTAINER, &from(port).packet(), 0, A.ifindex + 1)?;
        ensure!(action == OK && opened(&mut a)? == [SHARE, SHARE], "{port}: forged elsewhere");
    }
    // The agent's next count does.
    uses(&mut a)?.set(A.id, ProxyUse { opened: SHARE, limit: SHARE + 1 }, 0)?;
    ensure!(begins(&a, 6)? && passes(&a, from(6))? && !passes(&a, from(7).with(SYN))?, "one more");
    Ok(())
}

#[test]
fn a_packet_counts_until_the_proxy_has_the_connection() -> Result<()> {
    let (mut a, _listener) = redirected(SHARE, now()? + HOUR)?;
    ensure!(begins(&a, 1)?, "begun");
    // Each of them may be the one that opens it: what is dropped behind the hook proves nothing.
    for count in 1..=SHARE {
        ensure!(passes(&a, from(1))? && opened(&mut a)? == [count, count], "{count}");
    }
    ensure!(!passes(&a, from(1))?, "the share is spent");
    // The same without a row, which a flood may have evicted.
    for name in [map::FLOWS, map::FLOWS_NEW] {
        let _ = table(&mut a, name)?.remove(&from(1).key());
    }
    ensure!(!passes(&a, from(1))?, "without a row");
    Ok(())
}

#[test]
fn a_connection_that_the_proxy_has_goes_on_beyond_the_share() -> Result<()> {
    let (mut a, _listener) = redirected(SHARE, now()? + HOUR)?;
    let first = from(4000);
    ensure!(begins(&a, 4000)? && passes(&a, first)? && opened(&mut a)? == [1, 1], "opened");
    let connection = connection()?;
    uses(&mut a)?.set(A.id, ProxyUse { opened: SHARE, limit: SHARE }, 0)?;
    let is_admitted = |a: &mut Endpoint| {
        let (row, _) = row(a, &first.key())?.context("a row")?;
        anyhow::Ok(row.flags & FLOW_ADMITTED != 0)
    };
    for _ in 0..3 {
        ensure!(passes(&a, first)? && is_admitted(&mut a)?, "with its socket");
    }
    ensure!(!passes(&a, from(4001).with(SYN))?, "another one");
    // An end makes the next packet prove it again: with a SYN cookie, that alone would open another connection.
    ensure!(
        passes(&a, first.with(RST))? && passes(&a, first)? && is_admitted(&mut a)?,
        "a reset that the socket did not take"
    );
    drop(connection);
    ensure!(passes(&a, first)?, "no end was seen");
    // The proxy's socket lives on: what the client still acknowledges is an answer.
    for _ in 0..3 {
        ensure!(passes(&a, first.with(FIN | ACK))? && passes(&a, first)?, "after the client's own end");
    }
    ensure!(passes(&a, first.with(RST))? && !passes(&a, first)?, "after a reset");
    ensure!(passes(&a, first.with(RST))?, "a reset opens nothing");
    Ok(())
}

#[test]
fn a_packet_goes_to_the_listener_until_the_proxy_has_the_connection() -> Result<()> {
    let (mut a, listener) = redirected(100, now()? + HOUR)?;
    let port = listener.local_addr()?.port();
    let listeners_port = |a: &Endpoint, sent: Sent| {
        let (action, mark) = a.run_marked(FROM_CONTAINER, &sent.packet(), 0, A.ifindex)?;
        ensure!(action == OK, "{sent:?}: verdict {action}");
        let given = u16::from_be((mark >> MARK_PORT_SHIFT) as u16);
        ensure!([0, port].contains(&given), "{sent:?}: port {given}");
        anyhow::Ok(given == port)
    };
    let first = from(4000);
    // With SYN cookies, the listener knows nothing of a connection until its handshake is complete.
    ensure!(listeners_port(&a, first.with(SYN))? && begins(&a, 4000)?, "a first packet");
    ensure!(listeners_port(&a, first)? && listeners_port(&a, first)?, "before the socket");
    let without_row = |a: &mut Endpoint| {
        for name in [map::FLOWS, map::FLOWS_NEW] {
            let _ = table(a, name)?.remove(&first.key());
        }
        anyhow::Ok(())
    };
    without_row(&mut a)?;
    ensure!(listeners_port(&a, first)?, "a flood evicted the row");

    let connection = connection()?;
    ensure!(!listeners_port(&a, first)?, "the socket takes it");
    drop(connection);
    ensure!(!listeners_port(&a, first)?, "a known connection");
    Ok(())
}

#[test]
fn limits_hold_no_longer_than_an_agent_counts() -> Result<()> {
    let (mut a, _listener) = redirected(0, now()? - 1)?;
    for port in 1..=5 {
        ensure!(begins(&a, port)? && passes(&a, from(port))?, "{port}");
    }
    ensure!(opened(&mut a)? == [5, 5], "they count all the same");
    Ok(())
}

/// The proxy's sockets are gone with the proxy; their ports may be the client's own.
#[test]
fn a_reset_of_the_stacks_ends_the_connection_of_the_proxy() -> Result<()> {
    let (mut a, _listener) = redirected(100, now()? + HOUR)?;
    // A is the server here.
    let first = from(4000).back();
    let to_a = |a: &Endpoint, flags, mark| a.run_marked(TO_CONTAINER, &first.with(flags).packet(), mark, 0);
    ensure!(to_a(&a, SYN, MARK_PROXIED_EGRESS)?.0 == OK, "the proxy's first packet");
    let of_proxy = FlowKey { upstream: 1, ..first.key() };
    let ended = |a: &mut Endpoint| {
        let (row, _) = row(a, &of_proxy)?.context("a row of the proxy's connection")?;
        anyhow::Ok(row.flags & FLOW_RESET != 0)
    };
    ensure!(!ended(&mut a)?, "it has begun");
    ensure!(to_a(&a, RST, 0)?.0 == OK, "the reset passes");
    ensure!(ended(&mut a)?, "and ends it");
    ensure!(row(&mut a, &first.key())?.is_none(), "it begins no flow of the client's");
    Ok(())
}

/// A connection that the node's stack has, from the client's port 4000 to the server, made without a packet.
fn connection() -> Result<OwnedFd> {
    let commands =
        ["addr add 192.0.2.7/24 dev wh0", "link set wh0 up", "link set eth0 up", "route add 10.200.0.0/24 dev wh0"];
    for command in commands {
        let ran = Command::new("ip").args(command.split(' ')).output().context("run ip")?;
        ensure!(ran.status.success(), "ip {command}: {}", String::from_utf8_lossy(&ran.stderr));
    }
    let made = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&made, sockopt::TcpRepair, &1).context("TCP_REPAIR")?;
    bind(made.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(ELSEWHERE4, PORT))).context("bind")?;
    connect(made.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(A.v4, 4000))).context("connect")?;
    Ok(made)
}
