//! Published ports: reached from a "world" behind one link, from the node, from other containers and from themselves.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, cni,
    echo::{self, EchoServer},
    process::{command_in, ip, run},
    scenario,
    sctp::SctpSocket,
    wait,
};

/// The node's and the world's addresses on the link between them.
const NODE: [&str; 2] = ["198.51.100.1", "2001:db8:7::1"];
const WORLD: [&str; 2] = ["198.51.100.2", "2001:db8:7::2"];
const PORT: u16 = 8080;
/// What the plugin answers where something of the request is taken.
const TAKEN: u32 = 4;

fn at(address: &str) -> Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, PORT))
}

/// Joins the node to a world that has no route back to any pool.
fn world(node: &Node) -> Result<Sandbox> {
    let world = node.sandbox("world")?;
    ip(node.space(), &format!("link add up0 type veth peer name eth0 netns {}", world.path().display()))?;
    for (space, name, [v4, v6]) in [(node.space(), "up0", NODE), (world.space()?, "eth0", WORLD)] {
        ip(space, &format!("addr add {v4}/24 dev {name}"))?;
        ip(space, &format!("addr add {v6}/64 dev {name} nodad"))?;
        ip(space, &format!("link set {name} up"))?;
        ip(space, "link set lo up")?;
    }
    Ok(world)
}

fn asks(node: &Node, ports: Value) -> cni::NetConf {
    node.netconf().with("runtimeConfig", json!({ "portMappings": ports }))
}

/// The TCP and the UDP side of a server on one port of the node.
fn of(echo: &EchoServer) -> Value {
    let any = IpAddr::from(Ipv6Addr::LOCALHOST);
    json!([
        {"hostPort": PORT, "containerPort": echo.tcp_at(any).port(), "protocol": "tcp"},
        {"hostPort": PORT, "containerPort": echo.udp_at(any).port(), "protocol": "UDP"},
    ])
}

/// A container with a server that is published.
fn published(node: &Node, name: &str) -> Result<(Sandbox, Attached, EchoServer)> {
    let sandbox = node.sandbox(name)?;
    let echo = EchoServer::start(sandbox.space()?)?;
    let end = node.attach_with(&sandbox, "eth0", &asks(node, of(&echo)))?;
    Ok((sandbox, end, echo))
}

/// What the plugin answers to an ADD with these ports.
fn add(node: &Node, sandbox: &Sandbox, ports: Value) -> Result<cni::Answer> {
    node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").conf(&asks(node, ports)).run()
}

fn nft(node: &Node, arguments: &[&str]) -> Result<String> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(arguments);
    run(command, b"", Duration::from_secs(10))?.ok()
}

/// The elements of a map as text. Protocols are numbers (6 TCP, 17 UDP): nft writes names only where it has
/// `/etc/protocols`.
fn elements(node: &Node, map: &str) -> Result<String> {
    let text = nft(node, &["--numeric-protocol", "list", "map", "inet", "wharf", map])?;
    Ok(text.split_once("elements").map(|(_, elements)| elements.to_owned()).unwrap_or_default())
}

fn both(from: &wharf_tests::space::Space, address: &str) -> Result<()> {
    echo::tcp(from, at(address)?, 100_000).with_context(|| format!("TCP to {address}"))?;
    echo::udp(from, at(address)?, 1_000).with_context(|| format!("UDP to {address}"))
}

#[test]
fn a_published_port_is_reached_from_everywhere() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let (sandbox, end, _echo) = published(node, "server")?;
        let neighbour = node.sandbox("neighbour")?;
        let other = node.attach(&neighbour)?;
        for address in NODE {
            both(world.space()?, address).context("from the world")?;
            both(node.space(), address).context("from the node")?;
            both(neighbour.space()?, address).context("from a neighbour")?;
            both(sandbox.space()?, address).context("from itself")?;
        }
        both(node.space(), "127.0.0.1").context("from the node's loopback")?;
        // A neighbour is seen with its own address, the world with its own too.
        let seer = sandbox.space()?.run(|| UdpSocket::bind("[::]:7777"))??;
        seer.set_read_timeout(Some(Duration::from_secs(5)))?;
        node.detach(&end)?;
        let seen = asks(node, json!([{"hostPort": PORT, "containerPort": 7777, "protocol": "udp"}]));
        let end = node.attach_with(&sandbox, "eth0", &seen)?;
        let [mine4, mine6] = other.both()?;
        let [world4, world6] = [WORLD[0].parse()?, WORLD[1].parse()?];
        for (from, to, expected) in [
            (neighbour.space()?, NODE[0], mine4),
            (neighbour.space()?, NODE[1], mine6),
            (world.space()?, NODE[0], world4),
            (world.space()?, NODE[1], world6),
        ] {
            echo::udp_client(from, at(to)?)?.send(b"who?")?;
            let source = seer.recv_from(&mut [0; 16]).with_context(|| format!("from {expected}"))?.1.ip();
            ensure!(source.to_canonical() == expected, "{expected} is seen as {source}");
        }
        node.detach(&end)?;
        ensure!(elements(node, "ports4")?.is_empty() && elements(node, "ports6")?.is_empty());
        node.detach(&other)
    })
}

/// With `route_localnet`, which a published port needs, the kernel takes packets for the loopback from the container's
/// link.
#[test]
fn a_container_with_a_published_port_does_not_reach_the_nodes_loopback() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (sandbox, end, _echo) = published(node, "server")?;
        let inside = sandbox.space()?;
        // The container asks its router for the loopback.
        ip(inside, "addr flush dev lo")?;
        ip(inside, &format!("route add 127.0.0.1 via {}", end.gateways()?[0]))?;
        inside.run(|| std::fs::write("/proc/sys/net/ipv4/conf/eth0/route_localnet", "1"))??;
        let server = node.space().run(|| UdpSocket::bind("127.0.0.1:0"))??;
        server.set_read_timeout(Some(Duration::from_millis(500)))?;
        let client = inside.run(|| UdpSocket::bind((end.v4()?, 0)).map_err(anyhow::Error::from))??;
        for table in ["there", "gone"] {
            if table == "gone" {
                nft(node, &["delete", "table", "inet", "wharf"])?;
            }
            client.send_to(b"in?", server.local_addr()?)?;
            ensure!(server.recv(&mut [0; 8]).is_err(), "it came in, the table is {table}");
        }
        let id = node.endpoint(&end)?.id.to_string();
        let told: Value = serde_json::from_str(&node.wharf(&["explain", &id, "-o", "json"])?.stdout)?;
        let dropped =
            told["verdicts"].as_array().into_iter().flatten().find(|v| v["reason"] == "invalid-destination-ip");
        ensure!(dropped.is_some_and(|v| v["packets"] == 2), "{:#}", told["verdicts"]);
        wait::until("the audit to put the table back", || Ok(node.audit()?.findings.is_empty().then_some(())))?;
        node.detach(&end)
    })
}

#[test]
fn sctp_passes_a_published_port_both_ways() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let (sandbox, neighbour) = (node.sandbox("server")?, node.sandbox("neighbour")?);
        let to = 7777;
        let asked = asks(node, json!([{"hostPort": PORT, "containerPort": to, "protocol": "sctp"}]));
        let (end, other) = (node.attach_with(&sandbox, "eth0", &asked)?, node.attach(&neighbour)?);
        for (family, (address, own)) in NODE.into_iter().zip(WORLD).enumerate() {
            let server = SctpSocket::open(sandbox.space()?, family == 0)?;
            let [mine4, mine6] = other.both()?;
            let clients = [
                ("the world", world.space()?, Some(own.parse()?)),
                ("a neighbour", neighbour.space()?, Some(if family == 0 { mine4 } else { mine6 })),
                ("the node", node.space(), None),
            ];
            for (port, (who, space, source)) in (5000..).zip(clients) {
                let client = SctpSocket::open(space, family == 0)?;
                client.init(port, at(address)?)?;
                let (from, came_to) = server.receive(false).with_context(|| format!("from {who} to {address}"))?;
                ensure!(came_to == to && source.is_none_or(|ip| from == SocketAddr::new(ip, port)), "{who} is {from}");
                server.acknowledge(to, from)?;
                let (from, came_to) = client.receive(true).with_context(|| format!("back to {who}, {address}"))?;
                ensure!((from, came_to) == (at(address)?, port), "{who} hears {from} at {came_to}");
            }
        }
        node.detach(&other)?;
        node.detach(&end)
    })
}

#[test]
fn a_port_of_one_address_is_published_on_it_alone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let sandbox = node.sandbox("server")?;
        let echo = EchoServer::start(sandbox.space()?)?;
        let to = echo.tcp_at(Ipv6Addr::LOCALHOST.into()).port();
        let one = |ip: &str| json!([{"hostPort": PORT, "containerPort": to, "hostIP": ip}]);
        let end = node.attach_with(&sandbox, "eth0", &asks(node, one(NODE[0])))?;
        echo::tcp(world.space()?, at(NODE[0])?, 100)?;
        ensure!(echo::tcp(world.space()?, at(NODE[1])?, 100).is_err(), "IPv6 is published too");
        ensure!(echo::tcp(node.space(), at("127.0.0.1")?, 100).is_err(), "the loopback is published too");
        node.detach(&end)?;
        let end = node.attach_with(&sandbox, "eth0", &asks(node, one("127.0.0.1")))?;
        echo::tcp(node.space(), at("127.0.0.1")?, 100)?;
        ensure!(echo::tcp(world.space()?, at(NODE[0])?, 100).is_err(), "the world reaches the loopback's port");
        node.detach(&end)
    })
}

#[test]
fn a_port_of_an_address_that_a_route_makes_the_nodes_is_published() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let any = ["192.0.2.7", "2001:db8:77::7"];
        for (family, net, gateway) in [("-4", "192.0.2.0/24", NODE[0]), ("-6", "2001:db8:77::/64", NODE[1])] {
            ip(node.space(), &format!("{family} route add local {net} dev lo"))?;
            ip(world.space()?, &format!("{family} route add {net} via {gateway}"))?;
        }
        let sandbox = node.sandbox("server")?;
        let echo = EchoServer::start(sandbox.space()?)?;
        let to = echo.tcp_at(Ipv6Addr::LOCALHOST.into()).port();
        let ports = any.map(|ip| json!({"hostPort": PORT, "containerPort": to, "hostIP": ip}));
        let end = node.attach_with(&sandbox, "eth0", &asks(node, json!(ports)))?;
        for address in any {
            echo::tcp(world.space()?, at(address)?, 100).with_context(|| address.to_owned())?;
        }
        ensure!(echo::tcp(world.space()?, at(NODE[0])?, 100).is_err(), "other addresses have the port too");
        // A process that holds the port of such an address is still found.
        let _holder = node.space().run(|| TcpListener::bind("192.0.2.8:8083"))??;
        let second = node.sandbox("second")?;
        let held = json!([{"hostPort": 8083, "containerPort": 80, "hostIP": "192.0.2.8"}]);
        let said = add(node, &second, held)?.failure()?;
        ensure!(said.code == TAKEN, "{said:?}");
        node.detach(&end)
    })
}

#[test]
fn what_cannot_be_published_is_refused_with_nothing_half_made() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (_first, end, _echo) = published(node, "first")?;
        let second = node.sandbox("second")?;
        let one = |ip: &str, port: u16| json!([{"hostPort": port, "containerPort": 80, "hostIP": ip}]);
        let refused = |ports: Value, code: u32, word: &str| -> Result<()> {
            let said = add(node, &second, ports.clone())?.failure()?;
            ensure!(said.code == code && format!("{} {}", said.msg, said.details).contains(word), "{ports}: {said:?}");
            ensure!(node.endpoints()?.len() == 1, "{ports}: an endpoint is left");
            Ok(())
        };
        let holder = node.space().run(|| UdpSocket::bind("0.0.0.0:8082"))??;
        let listener = node.space().run(|| TcpListener::bind("127.0.0.1:8083"))??;
        refused(one("", PORT), TAKEN, "first")?;
        refused(one("127.0.0.1", PORT), TAKEN, "first")?;
        refused(one("", 8083), TAKEN, "ss -tlnp")?;
        refused(json!([{"hostPort": 8082, "containerPort": 80, "protocol": "udp"}]), TAKEN, "ss -ulnp")?;
        refused(one("192.0.2.99", 8084), 7, "192.0.2.99")?;
        refused(one("::1", 8084), 7, "::1")?;
        refused(one("", 0), 7, "portMappings[0].hostPort")?;
        refused(json!([{"hostPort": 65_536, "containerPort": 80}]), 7, "portMappings[0].hostPort")?;
        let twice = json!([{"hostPort": 8084, "containerPort": 80}, {"hostPort": 8084, "containerPort": 81, "hostIP": "127.0.0.1"}]);
        refused(twice, 7, "portMappings[1]")?;
        drop((holder, listener));
        let ports = json!([
            {"hostPort": 8082, "containerPort": 80, "protocol": "udp"},
            {"hostPort": 8083, "containerPort": 80},
            {"hostPort": PORT, "containerPort": 80, "protocol": "sctp"},
        ]);
        let other = node.attach_with(&second, "eth0", &asks(node, ports))?;
        node.detach(&other)?;
        // Of many that ask for one port exactly one gets it.
        node.detach(&end)?;
        let sandboxes: Vec<_> = (0..8).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        for round in 0..3 {
            let shared = &*node;
            let won: Vec<Attached> = thread::scope(|scope| {
                let ask = |s| move || shared.attach_with(s, "eth0", &asks(shared, one("", PORT))).ok();
                let threads: Vec<_> = sandboxes.iter().map(|s| scope.spawn(ask(s))).collect();
                threads
                    .into_iter()
                    .map(|t| t.join().map_err(|_| anyhow!("a thread panicked")))
                    .collect::<Result<Vec<_>>>()
            })?
            .into_iter()
            .flatten()
            .collect();
            ensure!(won.len() == 1, "round {round}: {} of 8 got the port", won.len());
            ensure!(node.endpoints()?.len() == 1, "round {round}");
            won.iter().try_for_each(|end| node.detach(end))?;
            ensure!(elements(node, "ports4")?.is_empty(), "round {round}: an element is left");
            ensure!(node.left_behind()?.is_empty(), "round {round}: {:?}", node.left_behind()?);
        }
        Ok(())
    })
}

#[test]
fn a_port_of_a_family_that_the_container_does_not_get_is_refused() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ipv6-pool="]), |node| {
        let _world = world(node)?;
        let sandbox = node.sandbox("server")?;
        let six = json!([{"hostPort": 8080, "containerPort": 80}, {"hostPort": 8081, "containerPort": 80, "hostIP": NODE[1]}]);
        let said = add(node, &sandbox, six)?.failure()?;
        ensure!(said.code == 7 && said.msg.contains("no IPv6 address") && !said.details.is_empty(), "{said:?}");
        ensure!(node.endpoints()?.is_empty() && elements(node, "ports4")?.is_empty(), "something is half made");
        Ok(())
    })
}

#[test]
fn without_masquerading_ports_are_refused() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade=off"]), |node| {
        let sandbox = node.sandbox("server")?;
        let said = add(node, &sandbox, json!([{"hostPort": PORT, "containerPort": 80}]))?.failure()?;
        ensure!(format!("{} {}", said.msg, said.details).contains("--masquerade on"), "{said:?}");
        ensure!(node.endpoints()?.is_empty());
        Ok(())
    })
}

#[test]
fn ports_that_a_start_without_masquerading_switches_off_are_told_and_come_back() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let (_sandbox, end, _echo) = published(node, "server")?;
        let off = |node: &Node| -> Result<bool> {
            let told = [
                &["port", "list"][..],
                &["endpoint", "get", &node.endpoints()?.first().context("one")?.id.to_string()],
            ];
            let told: Vec<bool> = told
                .into_iter()
                .map(|arguments| Ok(node.wharf(arguments)?.stdout.contains("runs with --masquerade off")))
                .chain([Ok(node.wharf(&["status"])?.stdout.contains("nothing translates the published ports of 1"))])
                .collect::<Result<_>>()?;
            ensure!(told.iter().all(|one| *one == told.contains(&true)), "{told:?}");
            Ok(told.contains(&true))
        };
        ensure!(!off(node)?, "off before");
        node.stop_agent()?;
        node.set_flag("--masquerade=off", true);
        node.start_agent()?;
        node.await_rebuilt()?;
        ensure!(off(node)?, "not told");
        ensure!(echo::tcp(world.space()?, at(NODE[0])?, 100).is_err(), "it is translated all the same");
        node.stop_agent()?;
        node.set_flag("--masquerade=off", false);
        node.start_agent()?;
        node.await_rebuilt()?;
        ensure!(!off(node)?, "off after");
        NODE.into_iter().try_for_each(|address| both(world.space()?, address))?;
        node.detach(&end)
    })
}

#[test]
fn ports_outlive_a_kill_and_a_flush_and_what_others_do_to_elements_is_mended() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--audit-interval-ms=1000"]), |node| {
        let world = world(node)?;
        let (_sandbox, end, _echo) = published(node, "server")?;
        let reached = |when: &str| -> Result<()> {
            NODE.into_iter().try_for_each(|address| both(world.space()?, address)).with_context(|| when.to_owned())
        };
        node.kill_agent()?;
        reached("without an agent")?;
        node.start_agent()?;
        reached("after the restart")?;
        node.kill_agent()?;
        nft(node, &["flush", "ruleset"])?;
        node.start_agent()?;
        // The table is there when the agent serves; each endpoint's ports come back as it is rebuilt, right after.
        node.await_rebuilt()?;
        reached("after a flush without an agent")?;
        nft(node, &["flush", "ruleset"])?;
        let is_there = |node: &Node| Ok(nft(node, &["list", "tables"])?.contains("inet wharf").then_some(()));
        wait::until("the table is written again", || is_there(node))?;
        reached("after a flush")?;
        nft(node, &["delete element inet wharf ports4 { tcp . 8080 }"])?;
        nft(node, &["add element inet wharf ports4 { tcp . 9090 : 10.99.0.9 . 90 }"])?;
        // Each is found, and mended when it was seen twice.
        let mut now = String::new();
        wait::until("the stray element goes and the missing one comes back", || {
            now = elements(node, "ports4")?;
            Ok((now.contains("6 . 8080") && !now.contains("9090")).then_some(()))
        })
        .with_context(|| format!("ports4{now}"))?;
        reached("after the audit")?;
        node.detach(&end)
    })
}

#[test]
fn elements_by_hand_are_findings_that_the_audit_names_and_repairs() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (_sandbox, end, _echo) = published(node, "server")?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        nft(node, &["delete element inet wharf ports6 { udp . 8080 }"])?;
        nft(node, &["add element inet wharf ports4 { udp . 9090 : 10.99.0.9 . 90 }"])?;
        let said = node.wharf(&["audit"])?.stdout;
        for word in ["udp port 9090 of every IPv4 address", "udp port 8080 of every IPv6 address"] {
            ensure!(said.contains(word), "{word}: {said}");
        }
        node.wharf(&["audit", "--repair"])?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        let [four, six] = [elements(node, "ports4")?, elements(node, "ports6")?];
        ensure!(six.contains("17 . 8080") && !four.contains("9090"), "ports4{four}, ports6{six}");
        node.detach(&end)
    })
}

#[test]
fn a_udp_flow_goes_to_the_next_container_of_the_port_or_to_nobody() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms=0", "--ipv4-pool=10.88.0.0/29"]), |node| {
        let world = world(node)?;
        let answering = |node: &Node, name: &str| -> Result<(Sandbox, Attached, UdpSocket)> {
            let sandbox = node.sandbox(name)?;
            let socket = sandbox.space()?.run(|| UdpSocket::bind("0.0.0.0:7777"))??;
            socket.set_read_timeout(Some(Duration::from_millis(200)))?;
            let conf = asks(node, json!([{"hostPort": PORT, "containerPort": 7777, "protocol": "udp"}]));
            let end = node.attach_with(&sandbox, "eth0", &conf)?;
            Ok((sandbox, end, socket))
        };
        let client = echo::udp_client(world.space()?, at(NODE[0])?)?;
        let (_old, end, server) = answering(node, "old")?;
        client.send(b"first")?;
        let (_, from) = server.recv_from(&mut [0; 16])?;
        server.send_to(b"old", from)?;
        let mut buffer = [0; 16];
        let n = client.recv(&mut buffer)?;
        ensure!(buffer.get(..n) == Some(b"old".as_slice()));
        node.detach(&end)?;
        // The address goes to a container that publishes nothing.
        let stranger = node.sandbox("stranger")?;
        let ear = stranger.space()?.run(|| UdpSocket::bind("0.0.0.0:7777"))??;
        ear.set_read_timeout(Some(Duration::from_millis(200)))?;
        let (_new, next, _server) = answering(node, "new")?;
        let apart = node.attach(&stranger)?;
        for _ in 0..20 {
            // A refused port of the node is an error of the socket; the client goes on.
            client.send(b"again").ok();
            thread::sleep(Duration::from_millis(20));
        }
        match ear.recv_from(&mut buffer) {
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            other => anyhow::bail!("a container that publishes nothing got the flow: {other:?}"),
        }
        node.detach(&apart)?;
        node.detach(&next)
    })
}

/// A client that never changes its own port reaches whoever has the port of the node: a row of the kernel's connection
/// tracking would keep it with the container that is gone, or with the node itself.
#[test]
fn a_udp_client_reaches_whoever_has_the_port_now() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = world(node)?;
        let clients: Vec<UdpSocket> =
            NODE.iter().map(|address| echo::udp_client(world.space()?, at(address)?)).collect::<Result<_>>()?;
        clients.iter().try_for_each(|client| client.set_read_timeout(Some(Duration::from_millis(500))))?;
        let refused = |when: &str| {
            clients.iter().try_for_each(|client| {
                wait::until(&format!("{when}: the node refuses {client:?}"), || {
                    client.send(b"?").ok();
                    let error = client.recv(&mut [0; 16]).err();
                    Ok((error.map(|e| e.kind()) == Some(ErrorKind::ConnectionRefused)).then_some(()))
                })
            })
        };
        refused("at first")?;
        for name in ["first", "second"] {
            let sandbox = node.sandbox(name)?;
            let server = sandbox.space()?.run(|| UdpSocket::bind("[::]:7777"))??;
            server.set_read_timeout(Some(Duration::from_secs(5)))?;
            let conf = asks(node, json!([{"hostPort": PORT, "containerPort": 7777, "protocol": "udp"}]));
            let end = node.attach_with(&sandbox, "eth0", &conf)?;
            for client in &clients {
                client.send(name.as_bytes())?;
                let mut buffer = [0; 16];
                let (n, from) = server.recv_from(&mut buffer).with_context(|| format!("{name} gets nothing"))?;
                ensure!(buffer.get(..n) == Some(name.as_bytes()));
                server.send_to(b"here", from)?;
                client.recv(&mut buffer).with_context(|| format!("no answer of {name}"))?;
            }
            node.detach(&end)?;
            // The ports are free when the endpoint is gone, which the list awaits.
            ensure!(node.endpoints()?.is_empty());
            if name == "second" {
                refused("at last")?;
            }
        }
        Ok(())
    })
}
