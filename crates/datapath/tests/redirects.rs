//! The node's part of redirects to the proxy: it is made, told, mended and taken away, and packets come to the proxy by
//! it.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    thread,
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket, sockopt,
};
use support::{uplink::*, *};
use wharf_common::policy::{MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_TO_PROXY, MARK_TURNED};
use wharf_core::{
    finding::NodeProblem,
    kernel::{NatKernel as _, NodeKernel as _, NodeSpec, PolicyKernel as _},
    nat::Masquerade,
};
use wharf_datapath::{
    LinuxKernel,
    leftovers::{self, Leftover},
};

/// Settings of the router's link.
const SETTINGS: [&str; 3] = ["src_valid_mark", "accept_local", "rp_filter"];

fn ask_sysctl(name: &str) -> String {
    run("sysctl", &[name])
}

/// Everything of the node's that redirects could change.
fn told() -> String {
    let ask = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
    let routing =
        ["-4 rule", "-6 rule", "-4 route show table all proto 87", "-6 route show table all proto 87"].map(ask);
    let settings = SETTINGS.map(|name| ask_sysctl(&format!("net.ipv4.conf.wharf0.{name}")));
    routing.concat() + &run("nft", &["list ruleset"]) + &settings.concat()
}

fn wanted(masquerade: bool) -> NodeSpec {
    let pools = node_spec().cidrs;
    let masquerade = masquerade.then(|| Masquerade { pools, ..Masquerade::default() });
    NodeSpec { redirects: true, masquerade, ..node_spec() }
}

async fn ensure(k: &LinuxKernel, spec: &NodeSpec) {
    k.ensure_node(spec).await.expect("node");
    k.ensure_way_to_proxy(spec.redirects).await.expect("way to the proxy");
    k.ensure_nat(spec).await.expect("table");
}

/// What is amiss, in words.
async fn amiss(k: &LinuxKernel, spec: &NodeSpec) -> Vec<String> {
    let problems = k.observe_node(spec).await.expect("observe");
    let in_words = |problem| match problem {
        NodeProblem::Outbound { what, .. } => what,
        NodeProblem::Setting { name, .. } => name,
        other => format!("{other:?}"),
    };
    problems.into_iter().map(in_words).collect()
}

#[test]
fn the_way_to_the_proxy_is_made_mended_and_taken_away() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        // Somebody else's rule and route look nearly the same.
        for theirs in ["rule add fwmark 0x80/0x80 lookup 99 pref 87", "route add local 192.0.2.0/24 dev lo table 99"] {
            run("ip", &theirs.split(' ').collect::<Vec<_>>());
        }
        let off = node_spec();
        k.ensure_node(&off).await.expect("node");
        k.ensure_nat(&off).await.expect("table");
        let before = told();
        // It stays until the link is removed: packets to services of other nodes need it too.
        let after = before.replace("wharf0.rp_filter = 0", "wharf0.rp_filter = 2");
        for masquerade in [false, true] {
            let on = wanted(masquerade);
            ensure(k, &on).await;
            assert_eq!(amiss(k, &on).await, [""; 0], "made");
            for stale in [NodeSpec { redirects: false, ..on.clone() }, on.clone()] {
                k.ensure_node(&stale).await.expect("node");
                k.ensure_nat(&stale).await.expect("table");
                assert_eq!(amiss(k, &stale).await, [""; 0], "the specification is older than the redirects");
                let foreign = k.observe_nat(&stale).await.expect("the table").foreign;
                assert!(foreign.is_empty(), "{foreign:?} are our own");
            }
            ensure(k, &on).await;
            assert_eq!(amiss(k, &on).await, [""; 0], "made twice");
            for (program, breaks) in [
                ("ip", "rule del pref 87 lookup 0x77680000"),
                ("ip", "-6 rule del pref 88"),
                ("ip", "-6 route flush table 0x77680000"),
                ("sysctl", "-w net.ipv4.conf.wharf0.accept_local=0"),
                ("nft", "flush chain inet wharf redirected"),
                ("nft", "flush chain inet wharf redirected-lost"),
            ] {
                run(program, &breaks.split(' ').collect::<Vec<_>>());
                assert_eq!(amiss(k, &on).await.len(), 1, "{breaks}: {:?}", amiss(k, &on).await);
                ensure(k, &on).await;
                assert_eq!(amiss(k, &on).await, [""; 0], "{breaks}: mended");
            }
            run("ip", &["link", "del", "wharf0"]);
            assert!(!amiss(k, &on).await.is_empty(), "without the router's link");
            ensure(k, &on).await;
            assert_eq!(amiss(k, &on).await, [""; 0], "with a new link");
            // Of the whole node, as a tunnel's tools set it: the agent leaves it and says so.
            for name in [
                "net.ipv4.conf.all.src_valid_mark",
                "net.ipv4.tcp_fwmark_accept",
                "net.ipv4.fwmark_reflect",
                "net.ipv6.fwmark_reflect",
            ] {
                run("sysctl", &["-w", &format!("{name}=1")]);
                assert_eq!(amiss(k, &on).await, [name]);
                run("sysctl", &["-w", &format!("{name}=0")]);
            }
            ensure(k, &off).await;
            assert_eq!(told(), after, "taken away");
            assert_eq!(amiss(k, &off).await, [""; 0]);
            k.ensure_node(&on).await.expect("node");
            k.ensure_nat(&NodeSpec { masquerade: None, ..on }).await.expect("table");
            assert_eq!(told(), after, "the specification is older than the end of redirects");
        }
        ensure(k, &wanted(false)).await;
        let next = open(&w.bpffs(), w.dir.path(), None).expect("open kernel");
        assert!(!amiss(&next, &off).await.is_empty(), "of an agent before, which redirected");
        next.ensure_node(&off).await.expect("node");
        next.ensure_nat(&off).await.expect("table");
        assert_eq!(told(), after, "taken away by the next agent");
        ensure(k, &wanted(false)).await;
        let found = leftovers::list(&w.dir.path().join("bpf"), w.dir.path()).expect("leftovers").ours;
        let ours = found.iter().find(|one| matches!(one, Leftover::Redirects(_))).expect("rules and routes");
        leftovers::remove(ours).expect("remove them");
        leftovers::remove(ours).expect("remove them again");
        let left = leftovers::list(&w.dir.path().join("bpf"), w.dir.path()).expect("leftovers").ours;
        assert!(!left.iter().any(|one| matches!(one, Leftover::Redirects(_))), "{left:?}");
    });
}

fn transparent(kind: SockType, at: SocketAddr) -> OwnedFd {
    let family = if at.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let made = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).expect("socket");
    setsockopt(&made, sockopt::IpTransparent, &true).expect("transparent");
    bind(made.as_raw_fd(), &SockaddrStorage::from(at)).expect("bind");
    made
}

/// Any port of a loopback address.
fn loopback(v4: bool) -> SocketAddr {
    let at: IpAddr = if v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    SocketAddr::new(at, 0)
}

/// A transparent listening socket.
fn listener(v4: bool) -> TcpListener {
    let made = transparent(SockType::Stream, loopback(v4));
    listen(&made, Backlog::new(8).expect("backlog")).expect("listen");
    TcpListener::from(made)
}

#[test]
fn marked_connections_come_to_the_listening_socket_with_their_own_addresses() {
    in_linux_world(None, |w| async move {
        ensure(&w.kernel, &wanted(true)).await;
        let world = new_netns(w.dir.path(), "world");
        let ip = |arguments: &str| drop(run("ip", &arguments.split(' ').collect::<Vec<_>>()));
        ip(&format!("link add up0 type veth peer name eth0 netns {}", world.display()));
        ip("addr add 192.0.2.1/24 dev up0");
        ip("addr add 2001:db8::1/64 dev up0 nodad");
        ip("link set up0 up");
        LinuxWorld::inside(&world, move || {
            ip("addr add 192.0.2.2/24 dev eth0");
            ip("addr add 2001:db8::2/64 dev eth0 nodad");
            ip("link set eth0 up");
            ip("route add default via 192.0.2.1");
            ip("-6 route add default via 2001:db8::1");
        });
        for (v4, server) in [(true, "203.0.113.9:80"), (false, "[2001:db8:9::9]:80")] {
            let (listener, server) = (listener(v4), server.parse::<SocketAddr>().expect("address"));
            let port = listener.local_addr().expect("address").port();
            let mark = MARK_TO_PROXY | u32::from(port.to_be()) << MARK_PORT_SHIFT;
            // In the place of the programs, which mark the first packet so.
            let family = if v4 { "ip" } else { "ip6" };
            run(
                "nft",
                &[&format!(
                    "add table inet programs; flush table inet programs;
                     add chain inet programs c {{ type filter hook prerouting priority -200; }};
                     add rule inet programs c iifname up0 {family} daddr {} tcp flags & (syn | ack) == syn meta mark set {mark:#x}",
                    server.ip()
                )],
            );
            let accepts = thread::spawn(move || {
                let (mut stream, client) = listener.accept().expect("accept");
                let mut got = [0; 4];
                stream.read_exact(&mut got).expect("read");
                stream.write_all(&got).expect("write");
                (client, stream.local_addr().expect("address"))
            });
            let client = LinuxWorld::inside(&world, move || {
                let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(5)).expect("connect");
                stream.set_read_timeout(Some(Duration::from_secs(5))).expect("time limit");
                stream.write_all(b"ahoy").expect("write");
                let mut got = [0; 4];
                stream.read_exact(&mut got).expect("read");
                assert_eq!(&got, b"ahoy");
                stream.local_addr().expect("address")
            });
            assert_eq!(accepts.join().expect("the proxy"), (client, server));
        }
    });
}

/// What is waited for comes within the first, what must not come would within the second.
const PATIENCE: Duration = Duration::from_secs(3);
const LOST: Duration = Duration::from_millis(300);

fn datagrams(socket: UdpSocket) -> UdpSocket {
    socket.set_read_timeout(Some(PATIENCE)).expect("time limit");
    socket
}

/// A socket of UDP in a namespace.
fn datagrams_in(netns: &Path, at: SocketAddr) -> UdpSocket {
    LinuxWorld::inside(netns, move || datagrams(UdpSocket::bind(at).expect("bind")))
}

fn any(v4: bool, port: u16) -> SocketAddr {
    let at: IpAddr = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(at, port)
}

/// The next datagram, and who sent it.
fn next(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 64];
    let (bytes, from) = socket.recv_from(&mut buffer).expect("a datagram");
    (buffer[..bytes].to_vec(), from)
}

fn gets_nothing(socket: &UdpSocket) {
    socket.set_read_timeout(Some(LOST)).expect("time limit");
    let got = socket.recv(&mut [0; 64]);
    assert!(got.is_err(), "{:?}: {got:?}", socket.local_addr());
}

#[test]
fn marked_datagrams_come_to_the_socket_of_their_port_and_to_no_other() {
    in_linux_world(None, |w| async move {
        ensure(&w.kernel, &wanted(true)).await;
        let uplink = Uplink::new(w.dir.path());
        for (v4, client, server) in
            [(true, container4(0), "203.0.113.9:53"), (false, container6(0), "[2001:db8:9::9]:53")]
        {
            let server = server.parse::<SocketAddr>().expect("address");
            let proxy = datagrams(transparent(SockType::Datagram, loopback(v4)).into());
            let port = proxy.local_addr().expect("address").port();
            let mark = MARK_TO_PROXY | u32::from(port.to_be()) << MARK_PORT_SHIFT;
            // In the place of the programs.
            let family = if v4 { "ip" } else { "ip6" };
            run(
                "nft",
                &[&format!(
                    "add table inet programs; flush table inet programs;
                     add chain inet programs c {{ type filter hook prerouting priority -200; }};
                     add rule inet programs c iifname c0 {family} daddr {} udp dport 53 meta mark set {mark:#x}",
                    server.ip()
                )],
            );
            let asks = datagrams_in(&uplink.containers[0], any(v4, 0));
            asks.connect(server).expect("connect");
            // While it is there, what the client sends must come to the other socket all the same.
            let answers = UdpSocket::from(transparent(SockType::Datagram, server));
            for number in 0..3_u8 {
                asks.send(&[number]).expect("ask");
                let (got, from) = next(&proxy);
                assert_eq!((got, from.ip()), (vec![number], client));
                answers.send_to(&[number, number], from).expect("answer");
                assert_eq!(next(&asks).0, [number, number]);
            }
            drop((proxy, answers));
            let nodes = datagrams(UdpSocket::bind(any(v4, server.port())).expect("bind"));
            asks.send(b"lost").expect("ask");
            gets_nothing(&nodes);
        }
    });
}

#[test]
fn answers_of_the_world_come_to_the_socket_that_asked_and_others_do_not() {
    in_linux_world(None, |w| async move {
        ensure(&w.kernel, &wanted(true)).await;
        let uplink = Uplink::new(w.dir.path());
        for (v4, client, node, world) in [(true, container4(0), NODE4, WORLD4), (false, container6(0), NODE6, WORLD6)] {
            let server = datagrams_in(&uplink.world, SocketAddr::new(world, 7700));
            let made = transparent(SockType::Datagram, SocketAddr::new(client, 0));
            setsockopt(&made, sockopt::Mark, &MARK_PROXIED_EGRESS).expect("mark");
            let proxy = datagrams(made.into());
            proxy.connect(SocketAddr::new(world, 7700)).expect("connect");
            for number in 0..3_u8 {
                proxy.send(&[number]).expect("ask");
                let (got, from) = next(&server);
                assert_eq!((got, from.ip()), (vec![number], node), "masqueraded");
                server.send_to(&[number, number], from).expect("answer");
                assert_eq!(next(&proxy).0, [number, number]);
            }
            // The proxy answers in the name of a container that somebody in the world asks, too.
            let at = SocketAddr::new(client, 7701);
            let answers = UdpSocket::from(transparent(SockType::Datagram, at));
            let container = datagrams_in(&uplink.containers[0], any(v4, at.port()));
            LinuxWorld::inside(&uplink.world, move || {
                run("ip", &["route", "add", &client.to_string(), "via", &node.to_string()]);
            });
            server.send_to(b"for the container", at).expect("ask");
            assert_eq!(next(&container).0, b"for the container");
            gets_nothing(&answers);
        }
    });
}

/// Whatever somebody removes, what is marked goes to nobody but the proxy.
#[test]
fn without_a_part_of_the_way_marked_packets_are_lost() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        ensure(k, &wanted(true)).await;
        let uplink = Uplink::new(w.dir.path());
        for (v4, client, world) in [(true, container4(0), WORLD4), (false, container6(0), WORLD6)] {
            let family = if v4 { "-4" } else { "-6" };
            let route = format!("ip {family} route flush table 0x77680000");
            let [first, second] = [87, 88].map(|pref| format!("ip {family} rule del pref {pref}"));
            let (both, table) = (format!("{first} && {second}"), "nft delete table inet wharf".to_owned());
            // Of the first packet, and of those that follow it.
            for mark in [MARK_TO_PROXY | 0x1234 << MARK_PORT_SHIFT, MARK_TO_PROXY] {
                for lost in [&route, &first, &both, &table] {
                    k.ensure_way_to_proxy(true).await.expect("way to the proxy");
                    let rule = "type filter hook prerouting priority -200";
                    run(
                        "nft",
                        &[&format!(
                        "add table inet programs; flush table inet programs; add chain inet programs c {{ {rule}; }};
                         add rule inet programs c iifname c0 udp dport 7700 meta mark set {mark:#x}"
                    )],
                    );
                    let server = datagrams_in(&uplink.world, SocketAddr::new(world, 7700));
                    let nodes = datagrams(UdpSocket::bind(any(v4, 7700)).expect("bind"));
                    let asks = datagrams_in(&uplink.containers[0], SocketAddr::new(client, 0));
                    // Without a shell: that of the guests has an `ip` of its own.
                    for command in lost.split(" && ") {
                        let (program, words) = command.split_once(' ').expect("words");
                        run(program, &words.split(' ').collect::<Vec<_>>());
                    }
                    asks.send_to(b"lost", SocketAddr::new(world, 7700)).expect("ask");
                    gets_nothing(&server);
                    // Without a port it is for a connection, which UDP does not have.
                    if mark != MARK_TO_PROXY {
                        gets_nothing(&nodes);
                    }
                    run("nft", &["delete table inet programs"]);
                }
            }
        }
    });
}

/// Marks of others have some of the bits.
#[test]
fn what_others_mark_is_tracked() {
    in_linux_world(None, |w| async move {
        ensure(&w.kernel, &wanted(true)).await;
        let uplink = Uplink::new(w.dir.path());
        for (mark, tracked) in [(MARK_TURNED, true), (0x539, true), (MARK_TURNED | MARK_TO_PROXY, false)] {
            run(
                "nft",
                &[&format!(
                    "add table inet programs; flush table inet programs;
                 add chain inet programs c {{ type filter hook prerouting priority -310; }};
                 add rule inet programs c iifname c0 udp dport 7700 meta mark set {mark:#x};
                 add chain inet programs d {{ type filter hook prerouting priority -190; }};
                 add rule inet programs d udp dport 7700 ct state untracked counter drop"
                )],
            );
            let asks = datagrams_in(&uplink.containers[0], SocketAddr::new(container4(0), 0));
            asks.send_to(b"hello", SocketAddr::new(NODE4, 7700)).expect("ask");
            let counted = run("nft", &["list chain inet programs d"]).contains("packets 1 ");
            assert_eq!(counted, !tracked, "mark {mark:#x}");
        }
    });
}
