//! Packets of redirected UDP flows whose sender has no part in them, and ports that two flows use one after the other.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use wharf_common::policy::ACCEPT;
use wharf_tests::{
    NodeConfig,
    process::ip,
    scenario, wait,
    world::{NODE, World},
};

use crate::{
    client::{Flow, LOST, PATIENCE},
    datagrams::Datagrams,
    proxy,
    rules::{self, Side, rule},
    udp::{UNTRANSLATED, Udp, took},
};

fn wait_for_one(proxy: &Datagrams) -> Result<proxy::Taken> {
    wait::until("the proxy takes a datagram", || Ok(proxy.taken().pop()))
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
            // Without the row of the proxy's own flow the server's answer would not come to the proxy.
            wait::until("the server's answer", || Ok(udp.egress.is_answered().then_some(())))?;
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
    scenario(NodeConfig::default().flags(&UNTRANSLATED), |node| {
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
