//! Flows that a rule redirects to a proxy of the node's.

mod client;
mod datagrams;
mod errors;
mod older;
#[path = "../policy/pods.rs"]
#[allow(dead_code, reason = "shared with the tests of policy")]
mod pods;
mod proxy;
mod rules;
mod same_port;
mod strangers;
mod udp;
mod way;

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::AsRawFd as _,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::{
    socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt},
    time::TimeVal,
};
use serde_json::json;
use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, redirect};
use wharf_tests::{
    Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    process::own_address,
    scenario, wait,
    world::{NODE, World},
};

use crate::{
    pods::{Pod, import, network_policy},
    proxy::{Proxy, Taken},
    rules::{Side, rule},
    way::{check_sources, prepare},
};

/// Published port.
const PORT: u16 = 8080;

/// Rules that accept everything that `web` sends and that `db` gets.
fn documents() -> String {
    network_policy("web", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{}]}")
        + &network_policy("db", "{podSelector: {matchLabels: {app: db}}, ingress: [{}]}")
}

/// A client, a server with an echo, and a proxy for each of their rules.
struct Scene {
    web: Pod,
    db: Pod,
    echo: EchoServer,
    egress: Proxy,
    ingress: Proxy,
}

impl Scene {
    fn new(node: &Node) -> Result<Self> {
        let web = Pod::container(node, "web", "web")?;
        let sandbox = node.sandbox("db")?;
        let echo = EchoServer::start(sandbox.space()?)?;
        let db = Self::published(node, sandbox, &echo)?;
        let egress = Proxy::start(node.space(), MARK_PROXIED_EGRESS)?;
        let ingress = Proxy::start(node.space(), MARK_PROXIED_INGRESS)?;
        prepare(node, &[egress.port, ingress.port])?;
        import(node, &documents())?;
        Ok(Self { web, db, echo, egress, ingress })
    }

    fn published(node: &Node, sandbox: Sandbox, echo: &EchoServer) -> Result<Pod> {
        let labels = json!({"cni": {"labels": [{"key": "app", "value": "db"}]}});
        let any = [0; 4].into();
        let ports = json!([
            {"hostPort": PORT, "containerPort": echo.tcp_at(any).port(), "protocol": "tcp"},
            {"hostPort": PORT, "containerPort": echo.udp_at(any).port(), "protocol": "udp"},
        ]);
        let conf = node.netconf().with("args", labels).with("runtimeConfig", json!({ "portMappings": ports }));
        let end = node.attach_with(&sandbox, "eth0", &conf)?;
        Ok(Pod { sandbox, end })
    }

    fn redirect(&self, node: &Node, side: Side, open: bool) -> Result<()> {
        let (end, proxy) = match side {
            Side::Egress => (&self.web.end, &self.egress),
            Side::Ingress => (&self.db.end, &self.ingress),
        };
        rule(node, end, side, redirect(proxy.port, open))
    }

    fn servers(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.db.end.both()?.map(|address| self.echo.tcp_at(address)))
    }

    /// An echo by each family from the client to the server.
    fn talk(&self) -> Result<()> {
        for to in self.servers()? {
            echo::tcp(self.web.space()?, to, 100_000).with_context(|| format!("{to}"))?;
        }
        Ok(())
    }

    fn end(self, node: &Node) -> Result<()> {
        let Self { web, db, echo, egress, ingress } = self;
        drop((echo, egress, ingress));
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    }
}

/// The proxy took these connections, and no others.
fn took(proxy: &Proxy, expected: &[(IpAddr, SocketAddr)]) -> Result<()> {
    let taken: Vec<_> = proxy.taken().iter().map(|Taken { client, server }| (client.ip(), *server)).collect();
    ensure!(taken == expected, "the proxy took {taken:?}, not {expected:?}");
    Ok(())
}

fn pairs(scene: &Scene) -> Result<Vec<(IpAddr, SocketAddr)>> {
    Ok(scene.web.end.both()?.into_iter().zip(scene.servers()?).collect())
}

#[test]
fn egress_rules_redirect_to_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.talk()?;
        took(&scene.egress, &pairs(&scene)?)?;
        took(&scene.ingress, &[])?;
        scene.end(node)
    })
}

#[test]
fn ingress_rules_redirect_to_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Ingress, false)?;
        scene.talk()?;
        took(&scene.ingress, &pairs(&scene)?)?;
        took(&scene.egress, &[])?;
        scene.end(node)
    })
}

#[test]
fn rules_of_both_ends_redirect_one_after_the_other() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        check_sources(node)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.redirect(node, Side::Ingress, false)?;
        scene.talk()?;
        took(&scene.egress, &pairs(&scene)?)?;
        took(&scene.ingress, &pairs(&scene)?)?;
        let [clients, upstreams] = [scene.egress.taken(), scene.ingress.taken()];
        for (one, other) in clients.iter().zip(&upstreams) {
            ensure!(one.client.port() != other.client.port(), "{one:?}, {other:?}");
        }
        scene.end(node)
    })
}

#[test]
fn connections_to_the_world_are_redirected_and_masqueraded() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        let servers = world.addresses().map(|address| world.echo().tcp_at(address));
        for to in servers {
            echo::tcp(scene.web.space()?, to, 100_000).with_context(|| format!("{to}"))?;
        }
        took(&scene.egress, &scene.web.end.both()?.into_iter().zip(servers).collect::<Vec<_>>())?;
        scene.end(node)
    })
}

#[test]
fn connections_of_the_world_to_a_published_port_are_redirected() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let scene = Scene::new(node)?;
        check_sources(node)?;
        scene.redirect(node, Side::Ingress, false)?;
        for address in NODE {
            let to = SocketAddr::new(address.parse()?, PORT);
            echo::tcp(world.space()?, to, 100_000).with_context(|| format!("{to} from the world"))?;
        }
        let mut expected: Vec<_> = world.addresses().into_iter().zip(scene.servers()?).collect();
        took(&scene.ingress, &expected)?;
        for address in NODE {
            let to = SocketAddr::new(address.parse()?, PORT);
            echo::tcp(scene.web.space()?, to, 100_000).with_context(|| format!("{to} from a container"))?;
        }
        expected.extend(pairs(&scene)?);
        took(&scene.ingress, &expected)?;
        // The node's own packets are never judged.
        for to in scene.servers()? {
            echo::tcp(node.space(), to, 1_000).with_context(|| format!("{to} from the node"))?;
        }
        took(&scene.ingress, &expected)?;
        scene.end(node)
    })
}

/// A connection over which bytes can be sent to and fro.
struct Open(TcpStream);

impl Open {
    fn new(pod: &Pod, to: SocketAddr) -> Result<Self> {
        let stream = pod.connect(to)?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        let open = Self(stream);
        ensure!(open.echoes()?, "{to}: a new connection");
        Ok(open)
    }

    /// Whether bytes come back; false where they are lost or the connection is at its end.
    fn echoes(&self) -> Result<bool> {
        let mut stream = &self.0;
        let mut got = [0; 4];
        match stream.write_all(b"ahoy").and_then(|()| stream.read_exact(&mut got)) {
            Ok(()) => Ok(&got == b"ahoy"),
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock
                        | ErrorKind::TimedOut
                        | ErrorKind::ConnectionReset
                        | ErrorKind::BrokenPipe
                        | ErrorKind::UnexpectedEof
                ) =>
            {
                Ok(false)
            }
            Err(e) => bail!("an open connection: {e}"),
        }
    }
}

#[test]
fn without_the_proxy_a_redirected_flow_is_dropped_unless_the_rule_is_open() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        let port = scene.egress.port;
        // Another one takes its place, at another port.
        scene.egress = Proxy::start(node.space(), MARK_PROXIED_EGRESS)?;
        for to in scene.servers()? {
            ensure!(!scene.web.reaches(to.ip(), pods::Ask::Tcp(to.port()))?, "{to}: without the proxy");
        }
        let dropped = node.packets(node.endpoint(&scene.web.end)?.id, "egress", "proxy-unavailable")?;
        ensure!(dropped > 0, "counted: {dropped}");
        rule(node, &scene.web.end, Side::Egress, redirect(port, true))?;
        scene.talk().context("an open rule without the proxy")?;
        took(&scene.egress, &[])?;
        scene.end(node)
    })
}

#[test]
fn proxied_connections_outlive_the_agent() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        let open: Vec<_> = scene.servers()?.into_iter().map(|to| Open::new(&scene.web, to)).collect::<Result<_>>()?;
        let echo = |when: &str| {
            for one in &open {
                ensure!(one.echoes()?, "{when}");
            }
            Ok(())
        };
        node.kill_agent()?;
        echo("without an agent")?;
        scene.talk().context("new connections without an agent")?;
        node.start_agent()?;
        node.await_rebuilt()?;
        echo("after a restart")?;
        scene.end(node)
    })
}

/// Begins a connection from one port of the client's, without waiting for an answer for long.
fn connect_from(pod: &Pod, port: u16, to: SocketAddr) -> Result<TcpStream> {
    let stream = pod.space()?.run(|| {
        let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let made = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&made, sockopt::ReuseAddr, &true)?;
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        bind(made.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(any, port)))?;
        setsockopt(&made, sockopt::SendTimeout, &TimeVal::new(2, 0))?;
        connect(made.as_raw_fd(), &SockaddrStorage::from(to)).with_context(|| format!("connect from port {port}"))?;
        anyhow::Ok(TcpStream::from(made))
    })??;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    Ok(stream)
}

#[test]
fn a_client_is_redirected_on_its_way_to_a_published_port() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.redirect(node, Side::Ingress, false)?;
        for address in NODE {
            let to = SocketAddr::new(address.parse()?, PORT);
            own_address(node.space(), to.ip())?;
            echo::tcp(scene.web.space()?, to, 100_000).with_context(|| format!("{to}"))?;
        }
        took(&scene.egress, &pairs(&scene)?)?;
        took(&scene.ingress, &pairs(&scene)?)?;
        scene.end(node)
    })
}

#[test]
fn the_nodes_own_addresses_are_servers_too() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        check_sources(node)?;
        let server = EchoServer::start(node.space())?;
        scene.redirect(node, Side::Egress, false)?;
        let mut expected = Vec::new();
        for (client, address) in scene.web.end.both()?.into_iter().zip(NODE) {
            let to = server.tcp_at(address.parse()?);
            own_address(node.space(), to.ip())?;
            echo::tcp(scene.web.space()?, to, 100_000).with_context(|| format!("{to}"))?;
            expected.push((client, to));
        }
        took(&scene.egress, &expected)?;
        drop(server);
        scene.end(node)
    })
}

#[test]
fn redirects_hold_where_containers_talk_through_the_nodes_stack() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--local-delivery", "stack"]), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Ingress, false)?;
        scene.talk().context("ingress")?;
        took(&scene.ingress, &pairs(&scene)?)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.talk().context("both")?;
        took(&scene.egress, &pairs(&scene)?)?;
        took(&scene.ingress, &[pairs(&scene)?, pairs(&scene)?].concat())?;
        scene.end(node)
    })
}

/// A client that uses its port again after the proxy has closed the connection first.
#[test]
fn a_port_is_used_again_after_the_proxy_closed() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        let [to, _] = scene.servers()?;
        for time in 0..3 {
            let open = Open(connect_from(&scene.web, 40_404, to).with_context(|| format!("time {time}"))?);
            ensure!(open.echoes()?, "time {time}");
            // A reset leaves the client no state.
            let taken = scene.egress.taken().len();
            ensure!(taken == time + 1, "{taken}");
            scene.egress.close_all()?;
            wait::until("the proxy closed", || Ok((!open.echoes()?).then_some(())))?;
        }
        scene.end(node)
    })
}
