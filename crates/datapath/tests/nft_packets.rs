//! What becomes of packets with the node's nftables table: real sockets in a container, on the node, and in the world.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use support::{nft_of_thread as nft, sctp::Sctp, uplink::*, *};
use wharf_common::policy::MARK_PROXIED_EGRESS;
use wharf_core::nat::{Masquerade, Nat, PortMapping, Protocol};

/// Published port of the node, port of the container.
const HOST_PORT: u16 = 8080;
const CONTAINER_PORT: u16 = 80;

fn masquerade() -> Masquerade {
    let pools = vec!["10.77.0.0/16".parse().unwrap(), "fd77::/64".parse().unwrap()];
    Masquerade { pools, ..Masquerade::default() }
}

fn mapping(protocol: Protocol, host_ip: Option<IpAddr>, container: IpAddr) -> PortMapping {
    let (host_port, container_port) = (HOST_PORT.try_into().unwrap(), CONTAINER_PORT.try_into().unwrap());
    PortMapping { protocol, host_ip, host_port, container, container_port }
}

/// Every protocol of the first container.
fn published(host_ip: [Option<IpAddr>; 2]) -> Vec<PortMapping> {
    let of = |p| [mapping(p, host_ip[0], container4(0)), mapping(p, host_ip[1], container6(0))];
    Protocol::ALL.into_iter().flat_map(of).collect()
}

fn nat(mappings: Vec<PortMapping>) -> Nat {
    Nat { masquerade: Some(masquerade()), mappings, ..Nat::default() }
}

/// Runs a test in a world with this table.
fn with(nat: Nat, test: impl FnOnce(&Uplink) + Send + 'static) {
    in_namespaces(move |dir| {
        let uplink = Uplink::new(dir);
        nft::ensure(&nat).expect("table");
        test(&uplink);
    });
}

fn saw(answers: [io::Result<IpAddr>; 2]) -> [Result<IpAddr, String>; 2] {
    answers.map(|answer| answer.map_err(|e| e.to_string()))
}

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

#[test]
fn what_leaves_the_pools_has_the_nodes_address() {
    with(nat(Vec::new()), |w| {
        for (container, world, node) in [(container4(0), WORLD4, NODE4), (container6(0), WORLD6, NODE6)] {
            let answers = w.converse(container, at(world, 7700), at(world, 7700));
            assert_eq!(saw(answers), [Ok(node), Ok(node)], "{container} to the world");
            assert_eq!(w.ping(container, world).map_err(|e| e.to_string()), Ok(()), "{container}");
            // The ICMP error of a closed port comes back through the translation.
            assert_eq!(w.closed_port(container, at(world, 9)).unwrap(), io::ErrorKind::ConnectionRefused);
        }
        for (one, other) in [(container4(0), container4(1)), (container6(0), container6(1))] {
            let answers = w.converse(one, at(other, 7700), at(other, 7700));
            assert_eq!(saw(answers), [Ok(one), Ok(one)], "between containers");
        }
        for (container, node) in [(container4(0), NODE4), (container6(0), NODE6)] {
            let answers = w.converse(container, at(node, 7700), at(node, 7700));
            assert_eq!(saw(answers), [Ok(container), Ok(container)], "to the node");
        }
    });
}

/// A network behind a container: the link has a name as a container's.
#[test]
fn what_leaves_by_a_containers_link_keeps_its_address() {
    with(nat(Vec::new()), |w| {
        for arguments in ["link set up0 down", "link set up0 name wh9", "link set wh9 up"] {
            run("ip", &arguments.split(' ').collect::<Vec<_>>());
        }
        // The kernel removed it with the link's state.
        run("ip", &["addr", "add", "2001:db8::1/64", "dev", "wh9", "nodad"]);
        w.at(WORLD4, || {
            run("ip", &["route", "add", "10.77.0.0/16", "via", "192.0.2.1"]);
            run("ip", &["-6", "route", "add", "fd77::/64", "via", "2001:db8::1"]);
        });
        for (container, world) in [(container4(0), WORLD4), (container6(0), WORLD6)] {
            let answers = w.converse(container, at(world, 7700), at(world, 7700));
            assert_eq!(saw(answers), [Ok(container), Ok(container)], "{container}");
        }
    });
}

#[test]
fn a_chosen_source_is_taken_and_an_excluded_destination_sees_the_container() {
    let masquerade = Masquerade {
        excluded: vec!["2001:db8::2/128".parse().unwrap()],
        source4: Some(Ipv4Addr::new(192, 0, 2, 77)),
        ..masquerade()
    };
    with(Nat { masquerade: Some(masquerade), mappings: Vec::new(), ..Nat::default() }, |w| {
        run("ip", &["addr", "add", "192.0.2.77/32", "dev", "up0"]);
        let answers = w.converse(container4(0), at(WORLD4, 7700), at(WORLD4, 7700));
        let chosen: IpAddr = Ipv4Addr::new(192, 0, 2, 77).into();
        assert_eq!(saw(answers), [Ok(chosen), Ok(chosen)]);
        w.at(WORLD6, || run("ip", &["-6", "route", "add", "fd77::/64", "via", "2001:db8::1"]));
        let answers = w.converse(container6(0), at(WORLD6, 7700), at(WORLD6, 7700));
        assert_eq!(saw(answers), [Ok(container6(0)), Ok(container6(0))]);
    });
}

#[test]
fn without_masquerade_sources_stay_and_ports_are_published() {
    with(Nat { masquerade: None, mappings: published([None, None]), ..Nat::default() }, |w| {
        w.at(WORLD4, || run("ip", &["route", "add", "10.77.0.0/16", "via", "192.0.2.1"]));
        let answers = w.converse(container4(0), at(WORLD4, 7700), at(WORLD4, 7700));
        assert_eq!(saw(answers), [Ok(container4(0)), Ok(container4(0))]);
        let answers = w.converse(WORLD4, at(NODE4, HOST_PORT), at(container4(0), CONTAINER_PORT));
        assert_eq!(saw(answers), [Ok(WORLD4), Ok(WORLD4)]);
        let answers = w.converse(container4(0), at(NODE4, HOST_PORT), at(container4(0), CONTAINER_PORT));
        assert!(answers.iter().all(Result::is_ok), "hairpin: {answers:?}");
    });
}

/// The published port from everywhere, each time with the source that the container must see.
fn from_everywhere(w: &Uplink) {
    for (container, other, node, world) in
        [(container4(0), container4(1), NODE4, WORLD4), (container6(0), container6(1), NODE6, WORLD6)]
    {
        let server = at(container, CONTAINER_PORT);
        let ask = |from, to| saw(w.converse(from, at(to, HOST_PORT), server));
        assert_eq!(ask(world, node), [Ok(world), Ok(world)], "from the world");
        assert_eq!(ask(node, node), [Ok(node), Ok(node)], "from the node");
        assert_eq!(ask(other, node), [Ok(other), Ok(other)], "from another container, which keeps its source");
        // It sees an address of the node: which one is the kernel's choice.
        let hairpin = ask(container, node);
        assert!(hairpin.iter().all(|saw| saw.as_ref().is_ok_and(|ip| *ip != container)), "hairpin: {hairpin:?}");
    }
}

#[test]
fn a_published_port_is_reached_from_everywhere() {
    with(nat(published([None, None])), |w| {
        from_everywhere(w);
        let server = at(container4(0), CONTAINER_PORT);
        let loopback = w.converse(NODE4, at(Ipv4Addr::LOCALHOST.into(), HOST_PORT), server);
        assert!(loopback.iter().all(Result::is_ok), "from the node's loopback: {loopback:?}");
        // The kernel routes nothing from ::1 to another interface: a client learns at once that it must try 127.0.0.1.
        let loopback6 = w.tcp(NODE6, at(Ipv6Addr::LOCALHOST.into(), HOST_PORT), at(container6(0), CONTAINER_PORT));
        assert_eq!(loopback6.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    });
}

/// A socket of the proxy's on the node, with a source of its choice or the node's, that asks the published port.
fn of_the_proxy(source: Option<IpAddr>, mark: u32) -> UdpSocket {
    let made = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::empty(), None).expect("socket");
    setsockopt(&made, sockopt::IpTransparent, &true).expect("transparent");
    setsockopt(&made, sockopt::Mark, &mark).expect("mark");
    if let Some(source) = source {
        bind(made.as_raw_fd(), &SockaddrStorage::from(at(source, 0))).expect("bind");
    }
    connect(made.as_raw_fd(), &SockaddrStorage::from(at(NODE4, HOST_PORT))).expect("connect");
    let socket = UdpSocket::from(made);
    socket.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
    socket
}

#[test]
fn what_the_proxy_asks_in_the_nodes_name_reaches_no_published_port() {
    with(nat(published([None, None])), |w| {
        let server = w.at(container4(0), || UdpSocket::bind(at(container4(0), CONTAINER_PORT)).expect("server"));
        server.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
        let mut bytes = [0; 8];
        // Of the node itself, and of the proxy in a container's name.
        for (source, mark, seen) in [(None, 0, NODE4), (Some(container4(1)), MARK_PROXIED_EGRESS, container4(1))] {
            of_the_proxy(source, mark).send(b"ask").expect("sent");
            let (length, from) = server.recv_from(&mut bytes).expect("the server");
            assert_eq!((&bytes[..length], from.ip()), (&b"ask"[..], seen));
        }
        let refused = of_the_proxy(None, MARK_PROXIED_EGRESS);
        refused.send(b"no").expect("sent");
        let why = refused.recv(&mut bytes).expect_err("nobody of the node has the port");
        assert_eq!(why.kind(), io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_port_of_one_address_is_reached_by_that_address_alone() {
    with(nat(published([Some(NODE4), Some(NODE6)])), |w| {
        from_everywhere(w);
        run("ip", &["addr", "add", "192.0.2.77/32", "dev", "up0"]);
        let elsewhere = at(Ipv4Addr::new(192, 0, 2, 77).into(), HOST_PORT);
        let tcp = w.tcp(WORLD4, elsewhere, at(container4(0), CONTAINER_PORT));
        assert_eq!(tcp.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        // One address's mapping comes before every address's.
        nft::add_mappings(&[mapping(Protocol::Tcp, None, container4(1))]).unwrap();
        assert_eq!(w.tcp(WORLD4, elsewhere, at(container4(1), CONTAINER_PORT)).unwrap(), WORLD4);
        assert_eq!(w.tcp(WORLD4, at(NODE4, HOST_PORT), at(container4(0), CONTAINER_PORT)).unwrap(), WORLD4);
    });
}

#[test]
fn sctp_is_masqueraded_and_published() {
    const PORT: u16 = 5_000;
    with(nat(published([None, None])), |w| {
        for (container, node, world) in [(container4(0), NODE4, WORLD4), (container6(0), NODE6, WORLD6)] {
            let v4 = container.is_ipv4();
            let inside = w.at(container, move || Sctp::open(v4));
            let outside = w.at(world, move || Sctp::open(v4));

            inside.init(PORT, at(world, PORT));
            let seen = outside.receive(false).expect("INIT in the world");
            assert_eq!((seen.from, seen.destination_port), (node, PORT));
            outside.acknowledge(PORT, at(node, seen.source_port));
            let answer = inside.receive(true).expect("INIT ACK in the container");
            assert_eq!((answer.from, answer.source_port, answer.destination_port), (world, PORT, PORT));

            outside.init(PORT + 1, at(node, HOST_PORT));
            let seen = inside.receive(false).expect("INIT in the container");
            assert_eq!((seen.from, seen.source_port, seen.destination_port), (world, PORT + 1, CONTAINER_PORT));
            inside.acknowledge(CONTAINER_PORT, at(world, PORT + 1));
            let answer = outside.receive(true).expect("INIT ACK in the world");
            assert_eq!((answer.from, answer.source_port, answer.destination_port), (node, HOST_PORT, PORT + 1));
        }
    });
}

#[test]
fn flows_from_two_containers_with_the_same_ports_all_get_through() {
    with(nat(Vec::new()), |w| {
        // 56,000 flows to one destination, of 64,512 ports. Two processors may still choose one port at once; the
        // datagram that is lost then is sent again, as every client does.
        let (late, lost) = w.flows(at(WORLD4, 7700), 28_000);
        assert_eq!(lost, 0, "flows without an answer");
        assert!(late < 10, "{late} flows lost their first datagram");
    });
}
