//! Services of somebody else's: an address of the node that a rule of the node's translates to a container (a
//! ClusterIP, a NodePort, a published port). Replies take the way that the flow came.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    icmp,
    process::{command_in, run},
    scenario,
};

/// The services' address in each family: of no network of the node's.
const SERVICE: [&str; 2] = ["198.51.100.80", "2001:db8:5::80"];
const PORT: u16 = 80;

/// A client, a server that services lead to, and the server's echo.
struct Scene {
    client: Sandbox,
    server: Sandbox,
    ends: [Attached; 2],
    echo: EchoServer,
}

impl Scene {
    fn end(&self, node: &Node) -> Result<()> {
        self.ends.iter().try_for_each(|end| node.detach(end))
    }
}

fn nft(node: &Node, rules: &str) -> Result<()> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), Duration::from_secs(10))?.ok().map(drop)
}

fn scene(node: &Node) -> Result<Scene> {
    for setting in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        node.space().run(|| std::fs::write(format!("/proc/sys/{setting}"), "1"))?.with_context(|| setting)?;
    }
    let (client, server) = (node.sandbox("client")?, node.sandbox("server")?);
    let ends = [node.attach(&client)?, node.attach(&server)?];
    let echo = EchoServer::start(server.space()?)?;
    let [v4, v6] = ends[1].both()?;
    let (tcp, udp) = (echo.tcp_at(v4).port(), echo.udp_at(v4).port());
    nft(
        node,
        &format!(
            "table ip services {{ chain c {{ type nat hook prerouting priority -100;
               ip daddr {s4} tcp dport {PORT} dnat to {v4}:{tcp}
               ip daddr {s4} udp dport {PORT} dnat to {v4}:{udp}
               ip daddr {s4} udp dport 9 dnat to {v4}:9
               ip daddr {s4} icmp type echo-request dnat to {v4}
             }}
             }}
             table ip6 services {{ chain c {{ type nat hook prerouting priority -100;
               ip6 daddr {s6} tcp dport {PORT} dnat to [{v6}]:{tcp}
               ip6 daddr {s6} udp dport {PORT} dnat to [{v6}]:{udp}
               ip6 daddr {s6} udp dport 9 dnat to [{v6}]:9
               ip6 daddr {s6} icmpv6 type echo-request dnat to {v6}
             }}
             }}",
            s4 = SERVICE[0],
            s6 = SERVICE[1],
        ),
    )?;
    Ok(Scene { client, server, ends, echo })
}

fn services() -> Result<[SocketAddr; 2]> {
    let of = |text: &str| anyhow::Ok(SocketAddr::new(text.parse::<IpAddr>()?, PORT));
    Ok([of(SERVICE[0])?, of(SERVICE[1])?])
}

/// Every packet of the socket gets a destination options header with six bytes of padding.
fn with_destination_options(socket: &std::net::UdpSocket) -> Result<()> {
    use std::os::fd::AsRawFd as _;
    /// `IPV6_DSTOPTS` of linux/in6.h.
    const DESTINATION_OPTIONS: i32 = 59;
    // Next header (the kernel writes it), length beyond eight bytes, PadN of four bytes.
    let header = [0_u8, 0, 1, 4, 0, 0, 0, 0];
    // SAFETY: the pointer and the length are those of a live array.
    let result = unsafe {
        nix::libc::setsockopt(
            socket.as_raw_fd(),
            nix::libc::IPPROTO_IPV6,
            DESTINATION_OPTIONS,
            header.as_ptr().cast(),
            nix::libc::socklen_t::try_from(header.len())?,
        )
    };
    ensure!(result == 0, "set destination options: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Packets that the client's program gave to the other container directly.
fn direct(node: &Node, s: &Scene) -> Result<u64> {
    node.packets(node.endpoint(&s.ends[0])?.id, "egress", "forwarded-local")
}

/// The rows of the table of paths through the stack.
fn paths(node: &Node) -> Result<Vec<Value>> {
    let answer = node.wharf(&["bpf", "map", "get", "STACK_PATHS", "-o", "json"])?.ok()?;
    let table: Value = serde_json::from_str(&answer)?;
    Ok(table["rows"].as_array().context("rows")?.clone())
}

#[test]
fn a_container_reaches_its_neighbour_through_a_service() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let client = s.client.space()?;
        // First, before anything else has noted the port: behind an extension header of IPv6 (destination options, RFC
        // 8200, 4.6).
        let [_, v6] = services()?;
        let padded = echo::udp_client(client, v6)?;
        with_destination_options(&padded)?;
        padded.send(b"behind an option")?;
        padded.set_read_timeout(Some(Duration::from_secs(5)))?;
        padded.recv(&mut [0; 32]).context("UDP behind destination options")?;
        for service in services()? {
            echo::tcp(client, service, 100_000).context("TCP")?;
            echo::udp(client, service, 100).context("UDP")?;
            // Its echo comes back in fragments, of which only the first has ports.
            echo::udp(client, service, 4_000).context("UDP in fragments")?;
            icmp::ping(client, service.ip())?.must_answer()?;
            // The error is about the translated packet; the client's socket knows only the service.
            let closed = echo::udp_client(client, SocketAddr::new(service.ip(), 9))?;
            closed.send(b"nobody there").context("send")?;
            closed.set_read_timeout(Some(Duration::from_secs(5)))?;
            match closed.recv(&mut [0; 16]) {
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {}
                other => bail!("{service}: the error of a closed port did not come back: {other:?}"),
            }
        }
        // Other ports of the same two containers are delivered directly as before.
        let before = direct(node, &s)?;
        let other = EchoServer::start(s.server.space()?)?;
        for address in s.ends[1].both()? {
            echo::tcp(client, other.tcp_at(address), 10_000)?;
            echo::udp(client, other.udp_at(address), 4_000)?;
        }
        ensure!(direct(node, &s)? > before, "nothing was delivered directly any more");
        // And the service's own port, by the server's own address.
        for address in s.ends[1].both()? {
            echo::tcp(client, s.echo.tcp_at(address), 10_000)?;
            echo::udp(client, s.echo.udp_at(address), 100)?;
        }
        let paths = paths(node)?;
        let [from, to] = [s.ends[0].v4()?.to_string(), s.ends[1].v4()?.to_string()];
        let port = s.echo.tcp_at(to.parse()?).port().to_string();
        let noted = |row: &&Value| {
            row["client"] == from && row["server"] == to && row["port"] == port && row["protocol"] == "6"
        };
        ensure!(paths.iter().any(|row| noted(&row)), "{paths:?}");
        ensure!(paths.iter().all(|row| row["client"] != to), "the server is a client: {paths:?}");
        s.end(node)
    })
}

#[test]
fn a_container_that_tries_every_port_of_a_host_fills_no_table() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let host: IpAddr = "198.51.100.81".parse()?;
        let target = s.ends[1].v4()?;
        nft(node, &format!("add rule ip services c ip daddr {host} dnat to {target}"))?;
        let socket = echo::udp_client(s.client.space()?, SocketAddr::new(host, 1))?;
        for port in 2_000..4_000 {
            // Errors of the ports before come back here.
            let _ = socket.send_to(b"x", SocketAddr::new(host, port));
        }
        let client = s.client.space()?;
        echo::udp(client, s.echo.udp_at(host), 100).context("a port that has no row of its own")?;
        echo::tcp(client, s.echo.tcp_at(host), 10_000)?;
        let rows = paths(node)?.len();
        ensure!(rows < 100, "{rows} rows");
        s.end(node)
    })
}

#[test]
fn a_connection_to_a_service_outlives_a_restart_and_an_upgrade() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let mut streams = Vec::new();
        for service in services()? {
            let connect = s.client.space()?.run(|| TcpStream::connect_timeout(&service, Duration::from_secs(5)))?;
            let stream = connect.with_context(|| format!("connect {service}"))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            streams.push(stream);
        }
        let mut talk = |when: &str| -> Result<()> {
            for stream in &mut streams {
                stream.write_all(b"still there?").with_context(|| format!("write {when}"))?;
                stream.read_exact(&mut [0; 12]).with_context(|| format!("read {when}"))?;
            }
            Ok(())
        };
        talk("before")?;
        node.kill_agent()?;
        talk("without an agent")?;
        node.start_agent()?;
        talk("after the restart")?;
        for next in [true, false] {
            node.stop_agent()?;
            node.set_next_version(next);
            node.start_agent()?;
            talk(if next { "after the upgrade" } else { "after the downgrade" })?;
        }
        s.end(node)
    })
}

#[test]
fn an_address_that_was_anothers_inherits_no_path() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms=0", "--ipv4-pool=10.88.0.0/29"]), |node| {
        let s = scene(node)?;
        let [v4, v6] = services()?;
        echo::tcp(s.client.space()?, v4, 100)?;
        echo::tcp(s.client.space()?, v6, 100)?;
        let address = s.ends[0].v4()?;
        node.detach(&s.ends[0])?;
        let mut others = Vec::new();
        let heir = loop {
            let sandbox = node.sandbox(&format!("heir{}", others.len()))?;
            let end = node.attach(&sandbox)?;
            if end.v4()? == address {
                break (sandbox, end);
            }
            others.push((sandbox, end));
        };
        // Through the stack the flow would count as such.
        let id = node.endpoint(&heir.1)?.id;
        echo::tcp(heir.0.space()?, s.echo.tcp_at(s.ends[1].v4()?.into()), 100)?;
        ensure!(node.packets(id, "egress", "forwarded-stack")? == 0, "the heir's flow took the stack");
        ensure!(node.packets(id, "egress", "forwarded-local")? > 0);
        others.push(heir);
        others.iter().try_for_each(|(_, end)| node.detach(end))?;
        node.detach(&s.ends[1])
    })
}

#[test]
fn local_flows_pass_the_nodes_firewall_where_the_operator_wants_that() -> Result<()> {
    for (way, passes) in [("direct", true), ("stack", false)] {
        scenario(NodeConfig::default().flags(&[&format!("--local-delivery={way}")]), |node| {
            let s = scene(node)?;
            let (client, [v4, v6]) = (s.client.space()?, s.ends[1].both()?);
            for address in [v4, v6] {
                echo::tcp(client, s.echo.tcp_at(address), 100).with_context(|| format!("{way}: without rules"))?;
            }
            let local = direct(node, &s)?;
            ensure!((local > 0) == passes, "{way}: {local} packets were delivered directly");
            let checked = node.wharf(&["endpoint", "health", &node.endpoint(&s.ends[0])?.id.to_string()])?;
            ensure!(checked.status.success(), "{way}: {}", checked.stdout);
            nft(
                node,
                &format!(
                    "table ip wall {{ chain c {{ type filter hook forward priority 0; ip daddr {v4} drop
 }}
             }}
                     table ip6 wall {{ chain c {{ type filter hook forward priority 0; ip6 daddr {v6} drop
 }}
             }}"
                ),
            )?;
            for address in [v4, v6] {
                let reached = echo::udp(client, s.echo.udp_at(address), 100).is_ok();
                ensure!(reached == passes, "{way}: {address} reached: {reached}");
            }
            s.end(node)
        })?;
    }
    Ok(())
}

/// A TCP connection from a port of the client's choice.
fn connect_from(space: &wharf_tests::space::Space, port: u16, to: SocketAddr) -> Result<std::net::TcpStream> {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
    };
    use std::os::fd::AsRawFd as _;
    let (family, any) = if to.is_ipv4() {
        (AddressFamily::Inet, SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), port))
    } else {
        (AddressFamily::Inet6, SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), port))
    };
    let socket = space.run(|| socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None))??;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(any)).with_context(|| format!("bind port {port}"))?;
    connect(socket.as_raw_fd(), &SockaddrStorage::from(to))
        .with_context(|| format!("connect {to} from port {port}"))?;
    let stream = std::net::TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

fn exchange(mut stream: &std::net::TcpStream) -> Result<()> {
    use std::io::{Read as _, Write as _};
    stream.write_all(b"alive")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    ensure!(answer == *b"alive", "an echo of something else");
    Ok(())
}

#[test]
fn a_direct_connection_outlives_one_to_the_service_from_the_same_port() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        let client = s.client.space()?;
        for (own, service) in s.ends[1].both()?.into_iter().zip(services()?) {
            let direct = connect_from(client, 41_000, s.echo.tcp_at(own))?;
            exchange(&direct)?;
            // The first use of the service, which notes the path: the direct connection takes it from its next packet
            // on.
            exchange(&connect_from(client, 41_001, service)?)?;
            exchange(&direct).with_context(|| format!("after the first use of {service}"))?;
            let through = connect_from(client, 41_000, service)?;
            for _ in 0..3 {
                exchange(&through).with_context(|| format!("through {service}"))?;
                exchange(&direct).with_context(|| format!("directly, beside {service}"))?;
            }
        }
        s.ends.iter().try_for_each(|end| node.detach(end))
    })
}
