//! UDP flows that a rule redirects: every datagram of the client's goes to the proxy's one socket.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use wharf_common::policy::{ACCEPT, DENY, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, redirect};
use wharf_tests::{
    Node, NodeConfig,
    echo::EchoServer,
    process::{ip, own_address},
    scenario,
    space::Space,
    world::{NODE, World},
};

use crate::{
    PORT, Scene,
    client::{Flow, PATIENCE},
    datagrams::Datagrams,
    pods::{import, network_policy},
    rules::{Side, rule, rule_of_port},
    way::check_sources,
};

/// What is sent to the world keeps its source.
pub(crate) const UNTRANSLATED: [&str; 1] = ["--masquerade-exclude=198.51.100.0/24,2001:db8:7::/64"];

/// The scene of TCP, with a proxy of UDP at the port of each of TCP.
pub(crate) struct Udp {
    pub(crate) scene: Scene,
    pub(crate) egress: Datagrams,
    pub(crate) ingress: Datagrams,
}

impl Udp {
    pub(crate) fn new(node: &Node) -> Result<Self> {
        let scene = Scene::new(node)?;
        let egress = Datagrams::start(node.space(), scene.egress.port, MARK_PROXIED_EGRESS)?;
        let ingress = Datagrams::start(node.space(), scene.ingress.port, MARK_PROXIED_INGRESS)?;
        Ok(Self { scene, egress, ingress })
    }

    pub(crate) fn client(&self) -> Result<&Space> {
        self.scene.web.space()
    }

    /// By both families.
    pub(crate) fn servers(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.scene.db.end.both()?.map(|address| self.scene.echo.udp_at(address)))
    }

    pub(crate) fn dropped(&self, node: &Node) -> Result<u64> {
        node.packets(node.endpoint(&self.scene.web.end)?.id, "egress", "proxy-unavailable")
    }

    pub(crate) fn end(self, node: &Node) -> Result<()> {
        drop((self.egress, self.ingress));
        self.scene.end(node)
    }
}

/// The proxy took so many datagrams of this client for this server since it was asked last, and no others.
pub(crate) fn took(proxy: &Datagrams, client: IpAddr, server: SocketAddr, expected: usize) -> Result<()> {
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
    scenario(NodeConfig::default().flags(&UNTRANSLATED), |node| {
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
            let to = server.udp_at(address.parse()?);
            own_address(node.space(), to.ip())?;
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
