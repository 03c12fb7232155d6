//! UDP flows that a rule redirects: every datagram of the client's goes to the proxy's one socket.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use wharf_common::policy::{ACCEPT, DENY, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, redirect};
use wharf_tests::space::Space;

use super::*;
use crate::{datagrams::Datagrams, rules::rule_of_port};

/// How long an echo is waited for that must come, and one that must not.
const PATIENCE: Duration = Duration::from_secs(3);
const LOST: Duration = Duration::from_millis(600);

/// The scene of TCP, with a proxy of UDP at the port of each of TCP.
struct Udp {
    scene: Scene,
    egress: Datagrams,
    ingress: Datagrams,
}

impl Udp {
    fn new(node: &Node) -> Result<Self> {
        let scene = Scene::new(node)?;
        let egress = Datagrams::start(node.space(), scene.egress.port, MARK_PROXIED_EGRESS)?;
        let ingress = Datagrams::start(node.space(), scene.ingress.port, MARK_PROXIED_INGRESS)?;
        Ok(Self { scene, egress, ingress })
    }

    fn client(&self) -> Result<&Space> {
        self.scene.web.space()
    }

    /// By both families.
    fn servers(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.scene.db.end.both()?.map(|address| self.scene.echo.udp_at(address)))
    }

    fn dropped(&self, node: &Node) -> Result<u64> {
        node.packets(node.endpoint(&self.scene.web.end)?.id, "egress", "proxy-unavailable")
    }

    fn end(self, node: &Node) -> Result<()> {
        drop((self.egress, self.ingress));
        self.scene.end(node)
    }
}

/// The client's end of a flow.
struct Flow {
    socket: UdpSocket,
    to: SocketAddr,
}

impl Flow {
    fn new(from: &Space, to: SocketAddr) -> Result<Self> {
        Self::of_port(from, 0, to)
    }

    fn of_port(from: &Space, port: u16, to: SocketAddr) -> Result<Self> {
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = from.run(|| UdpSocket::bind((any, port)))?.with_context(|| format!("bind port {port}"))?;
        // Only what comes from the server's address and port is an answer.
        socket.connect(to)?;
        Ok(Self { socket, to })
    }

    fn port(&self) -> Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Whether a datagram comes back in this time.
    fn is_echoed(&self, payload: &[u8], patience: Duration) -> Result<bool> {
        match self.socket.send(payload) {
            // An error about a datagram before.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => self.socket.send(payload).map(drop)?,
            sent => drop(sent?),
        }
        self.gets(payload, patience)
    }

    /// Whether these bytes come in this time; others are not waited for any more.
    fn gets(&self, payload: &[u8], patience: Duration) -> Result<bool> {
        let (end, mut buffer) = (Instant::now() + patience, vec![0; 65_536]);
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.socket.set_read_timeout(Some(left))?;
            match self.socket.recv(&mut buffer) {
                Ok(n) if buffer.get(..n) == Some(payload) => return Ok(true),
                Ok(_) => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused
                    ) => {}
                Err(e) => bail!("{}: {e}", self.to),
            }
        }
        Ok(false)
    }

    fn passes(&self, what: &str) -> Result<()> {
        ensure!(self.is_echoed(what.as_bytes(), PATIENCE)?, "{}: {what}", self.to);
        Ok(())
    }

    fn is_lost(&self, what: &str) -> Result<()> {
        ensure!(!self.is_echoed(what.as_bytes(), LOST)?, "{}: {what}", self.to);
        Ok(())
    }
}

/// The proxy took so many datagrams of this client for this server since it was asked last, and no others.
fn took(proxy: &Datagrams, client: IpAddr, server: SocketAddr, expected: usize) -> Result<()> {
    let taken = proxy.taken();
    let all = taken.iter().all(|one| one.client.ip() == client && one.server == server);
    ensure!(all && taken.len() == expected, "{taken:?}, not {expected} from {client} to {server}");
    Ok(())
}

/// Several flows of several datagrams each.
fn talk(from: &Space, to: SocketAddr) -> Result<usize> {
    const FLOWS: usize = 3;
    const DATAGRAMS: usize = 4;
    let flows: Vec<_> = (0..FLOWS).map(|_| Flow::new(from, to)).collect::<Result<_>>()?;
    for number in 0..DATAGRAMS {
        for (which, flow) in flows.iter().enumerate() {
            flow.passes(&format!("datagram {number} of flow {which}"))?;
        }
    }
    Ok(FLOWS * DATAGRAMS)
}

#[test]
fn rules_of_either_end_redirect_every_datagram() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        check_sources(node)?;
        for (sides, name) in
            [(&[Side::Egress][..], "egress"), (&[Side::Ingress], "ingress"), (&[Side::Egress, Side::Ingress], "both")]
        {
            rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
            rule(node, &udp.scene.db.end, Side::Ingress, ACCEPT)?;
            for side in sides {
                udp.scene.redirect(node, *side, false)?;
            }
            for (client, server) in udp.scene.web.end.both()?.into_iter().zip(udp.servers()?) {
                let sent = talk(udp.client()?, server).context(name)?;
                for (side, proxy) in [(Side::Egress, &udp.egress), (Side::Ingress, &udp.ingress)] {
                    took(proxy, client, server, if sides.contains(&side) { sent } else { 0 }).context(name)?;
                }
            }
            // The same rules, and the proxies of TCP at the same ports.
            udp.scene.talk().with_context(|| format!("TCP, {name}"))?;
        }
        udp.end(node)
    })
}

#[test]
fn datagrams_to_the_world_are_redirected_and_masqueraded() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        check_sources(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for (client, address) in udp.scene.web.end.both()?.into_iter().zip(world.addresses()) {
            let server = world.echo().udp_at(address);
            let sent = talk(udp.client()?, server)?;
            took(&udp.egress, client, server, sent)?;
        }
        udp.end(node)
    })
}

/// Without translation, where the world has a route to the containers.
#[test]
fn datagrams_to_the_world_are_redirected_without_masquerade() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade", "off"]), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        check_sources(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for ((client, address), via) in udp.scene.web.end.both()?.into_iter().zip(world.addresses()).zip(NODE) {
            ip(world.space()?, &format!("route add {client} via {via}"))?;
            let server = world.echo().udp_at(address);
            let sent = talk(udp.client()?, server)?;
            took(&udp.egress, client, server, sent)?;
        }
        udp.end(node)
    })
}

#[test]
fn fragmented_datagrams_are_redirected_whole() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        udp.scene.redirect(node, Side::Ingress, false)?;
        let local = udp.servers()?;
        let beyond = world.addresses().map(|address| world.echo().udp_at(address));
        let long: Vec<u8> = (0..=250_u8).cycle().take(4_000).collect();
        for to in local.into_iter().chain(beyond) {
            let flow = Flow::new(udp.client()?, to)?;
            flow.passes("a short one")?;
            ensure!(flow.is_echoed(&long, PATIENCE)?, "{to}: a long one");
            flow.passes("a short one after a long one")?;
            ensure!(udp.egress.taken().len() == 3, "{to}: at the egress");
            ensure!(udp.ingress.taken().len() == if local.contains(&to) { 3 } else { 0 }, "{to}: at the ingress");
        }
        udp.end(node)
    })
}

#[test]
fn without_the_proxy_a_datagram_is_dropped_unless_the_rule_is_open() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut udp = Udp::new(node)?;
        let [client4, client6] = udp.scene.web.end.both()?;
        for (client, to) in [client4, client6].into_iter().zip(udp.servers()?) {
            udp.scene.redirect(node, Side::Egress, false)?;
            let running = Flow::new(udp.client()?, to)?;
            running.passes("with the proxy")?;
            took(&udp.egress, client, to, 1)?;
            // It goes in the middle of a flow.
            drop(std::mem::replace(&mut udp.egress, Datagrams::start(node.space(), 0, MARK_PROXIED_EGRESS)?));
            let before = udp.dropped(node)?;
            running.is_lost("a flow without its proxy")?;
            Flow::new(udp.client()?, to)?.is_lost("a new flow without the proxy")?;
            let dropped = udp.dropped(node)? - before;
            ensure!(dropped == 2, "counted: {dropped}");
            udp.scene.redirect(node, Side::Egress, true)?;
            let open = Flow::new(udp.client()?, to)?;
            open.passes("an open rule without the proxy")?;
            running.passes("an open rule without the proxy, a flow that the proxy had")?;
            // It comes back: both flows are its again, whatever their rows say.
            udp.egress = Datagrams::start(node.space(), udp.scene.egress.port, MARK_PROXIED_EGRESS)?;
            open.passes("the proxy is back")?;
            running.passes("the proxy is back, a flow that it had before")?;
            took(&udp.egress, client, to, 2)?;
        }
        udp.end(node)
    })
}

#[test]
fn running_flows_follow_the_rules() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        for (client, to) in udp.scene.web.end.both()?.into_iter().zip(udp.servers()?) {
            rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
            let flow = Flow::new(udp.client()?, to)?;
            flow.passes("before the rule")?;
            took(&udp.egress, client, to, 0)?;
            for time in 0..2 {
                udp.scene.redirect(node, Side::Egress, false)?;
                for number in 0..3 {
                    flow.passes(&format!("redirected, {number}, time {time}"))?;
                }
                took(&udp.egress, client, to, 3)?;
                rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
                flow.passes("without the rule")?;
                flow.passes("without the rule, again")?;
                took(&udp.egress, client, to, 0)?;
            }
            udp.scene.redirect(node, Side::Egress, false)?;
            flow.passes("redirected")?;
            rule(node, &udp.scene.web.end, Side::Egress, DENY)?;
            flow.is_lost("denied")?;
            took(&udp.egress, client, to, 1)?;
        }
        rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
        udp.end(node)
    })
}

/// What a server sends after the rule came is none of the proxy's answers.
#[test]
fn a_server_does_not_go_on_past_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        for (server, client) in udp.scene.db.end.both()?.into_iter().zip(udp.scene.web.end.both()?) {
            rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
            let at = Flow::new(udp.scene.db.space()?, SocketAddr::new(client, 9))?;
            let to = SocketAddr::new(server, at.port()?);
            let flow = Flow::new(udp.client()?, to)?;
            at.socket.connect(SocketAddr::new(client, flow.port()?))?;
            let goes_on = |what: &str, patience| -> Result<bool> {
                at.socket.send(what.as_bytes())?;
                flow.gets(what.as_bytes(), patience)
            };
            flow.socket.send(b"hello")?;
            ensure!(at.gets(b"hello", PATIENCE)? && goes_on("accepted", PATIENCE)?, "{to}: before the rule");
            udp.scene.redirect(node, Side::Egress, false)?;
            ensure!(!goes_on("before the client went on", LOST)?, "{to}: past the proxy");
            // Now the proxy has the flow.
            flow.socket.send(b"once more")?;
            ensure!(wait_for_one(&udp.egress)?.server == to, "{to}");
            ensure!(!goes_on("of a flow that the proxy has", LOST)?, "{to}: past the proxy");
        }
        udp.end(node)
    })
}

fn wait_for_one(proxy: &Datagrams) -> Result<proxy::Taken> {
    wait::until("the proxy takes a datagram", || Ok(proxy.taken().pop()))
}

#[test]
fn a_rule_of_one_port_leaves_other_ports_alone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        let other = EchoServer::start(udp.scene.db.space()?)?;
        for ((client, server), to) in
            udp.scene.web.end.both()?.into_iter().zip(udp.scene.db.end.both()?).zip(udp.servers()?)
        {
            let elsewhere = other.udp_at(server);
            let ports = |port: u16| format!("{{ports: [{{protocol: UDP, port: {port}}}]}}");
            let spec = format!(
                "{{podSelector: {{matchLabels: {{app: web}}}}, policyTypes: [Egress], egress: [{}, {}]}}",
                ports(to.port()),
                ports(elsewhere.port())
            );
            import(node, &network_policy("web", &spec))?;
            rule_of_port(node, &udp.scene.web.end, Side::Egress, to.port(), redirect(udp.scene.egress.port, false))?;
            let sent = talk(udp.client()?, elsewhere).context("another port")?;
            took(&udp.egress, client, to, 0).with_context(|| format!("{sent} to another port"))?;
            let sent = talk(udp.client()?, to)?;
            took(&udp.egress, client, to, sent)?;
        }
        drop(other);
        udp.end(node)
    })
}

#[test]
fn the_nodes_own_addresses_are_servers_too() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        check_sources(node)?;
        let server = EchoServer::start(node.space())?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for (client, address) in udp.scene.web.end.both()?.into_iter().zip(NODE) {
            ip(node.space(), &format!("addr add {address} dev lo"))?;
            let to = server.udp_at(address.parse()?);
            let sent = talk(udp.client()?, to)?;
            took(&udp.egress, client, to, sent)?;
        }
        drop(server);
        udp.end(node)
    })
}

#[test]
fn datagrams_to_a_published_port_are_redirected() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        check_sources(node)?;
        let clients = udp.scene.web.end.both()?;
        for (((client, address), server), stranger) in
            clients.into_iter().zip(NODE).zip(udp.servers()?).zip(world.addresses())
        {
            let to = SocketAddr::new(address.parse()?, PORT);
            rule(node, &udp.scene.web.end, Side::Egress, ACCEPT)?;
            udp.scene.redirect(node, Side::Ingress, false)?;
            let sent = talk(world.space()?, to).context("from the world")?;
            took(&udp.ingress, stranger, server, sent)?;
            let sent = talk(udp.client()?, to).context("from a container")?;
            took(&udp.ingress, client, server, sent)?;
            udp.scene.redirect(node, Side::Egress, false)?;
            let sent = talk(udp.client()?, to).context("from a container whose rules redirect, too")?;
            took(&udp.egress, client, server, sent)?;
            took(&udp.ingress, client, server, sent)?;
        }
        udp.end(node)
    })
}

/// Of TCP a new connection says that the one before is over; a datagram says nothing, so the proxy's socket does.
#[test]
fn a_client_gets_the_port_that_the_proxy_took_when_the_proxy_is_done() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for (number, (client, to)) in udp.scene.web.end.both()?.into_iter().zip(udp.servers()?).enumerate() {
            let one = Flow::new(udp.client()?, to)?;
            one.passes("the flow that the proxy sends on")?;
            let port = udp.egress.upstreams().get(2 * number).context("a flow that was sent on")?.port();
            let same = Flow::of_port(udp.client()?, port, to)?;
            let before = udp.dropped(node)?;
            same.is_lost("the port of a flow of the proxy's")?;
            ensure!(udp.dropped(node)? == before + 1, "counted");
            one.passes("the proxy's flow, afterwards")?;
            took(&udp.egress, client, to, 2)?;
            udp.egress.close_all();
            same.passes("the port of a flow that is over")?;
            same.passes("and again")?;
            took(&udp.egress, client, to, 2)?;
        }
        udp.end(node)
    })
}

#[test]
fn the_proxy_takes_a_port_that_a_client_had() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for (client, to) in udp.scene.web.end.both()?.into_iter().zip(udp.servers()?) {
            let had = Flow::new(udp.client()?, to)?;
            had.passes("the flow before")?;
            udp.egress.send_from(had.port()?);
            let flow = Flow::new(udp.client()?, to)?;
            flow.passes("a flow that the proxy sends on from the port of another one")?;
            flow.passes("and again")?;
            took(&udp.egress, client, to, 3)?;
        }
        udp.end(node)
    })
}

/// The proxy's answer must not make a flow of the server's, whose client would answer past the proxy.
#[test]
fn an_answer_without_a_row_begins_no_flow() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        let beyond = world.addresses().map(|address| world.echo().udp_at(address));
        let clients = udp.scene.web.end.both()?;
        for (client, to) in clients.into_iter().chain(clients).zip(udp.servers()?.into_iter().chain(beyond)) {
            let flow = Flow::new(udp.client()?, to)?;
            udp.egress.hold(true);
            flow.socket.send(b"held")?;
            ensure!(wait_for_one(&udp.egress)?.server == to, "{to}");
            rules::forget_flows(node)?;
            udp.egress.hold(false);
            ensure!(flow.gets(b"held", PATIENCE)?, "{to}: the answer");
            flow.passes("after the answer")?;
            took(&udp.egress, client, to, 1)?;
        }
        udp.end(node)
    })
}

/// A stranger that guesses the port that the proxy took in its name has no part in the flow either.
#[test]
fn the_world_has_no_part_in_what_the_proxy_sends_in_its_name() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade", "off"]), |node| {
        let world = World::join(node)?;
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Ingress, false)?;
        for (number, ((client, via), to)) in world.addresses().into_iter().zip(NODE).zip(udp.servers()?).enumerate() {
            ip(world.space()?, &format!("route add {} via {via}", to.ip()))?;
            let flow = Flow::new(world.space()?, to)?;
            flow.passes("from the world")?;
            flow.passes("and again")?;
            took(&udp.ingress, client, to, 2)?;
            let port = udp.ingress.upstreams().get(2 * number).context("a flow that was sent on")?.port();
            let received = udp.scene.echo.datagrams();
            let same = Flow::of_port(world.space()?, port, to)?;
            same.is_lost("the port that the proxy took")?;
            ensure!(udp.scene.echo.datagrams() == received, "{to}: past the proxy");
            flow.passes("the proxy's flow, afterwards")?;
            took(&udp.ingress, client, to, 1)?;
            udp.ingress.close_all();
            same.passes("the port of a flow that is over")?;
            took(&udp.ingress, client, to, 1)?;
        }
        udp.end(node)
    })
}

#[test]
fn redirects_hold_where_datagrams_take_the_nodes_stack() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--local-delivery", "stack"]), |node| {
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Ingress, false)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        for (client, to) in udp.scene.web.end.both()?.into_iter().zip(udp.servers()?) {
            let sent = talk(udp.client()?, to)?;
            took(&udp.egress, client, to, sent)?;
            took(&udp.ingress, client, to, sent)?;
        }
        udp.end(node)
    })
}
