//! TCP ports that a client uses and the proxy has taken for a connection in its name, at once or one after the other.

use std::{net::SocketAddr, os::fd::AsRawFd as _};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, socket};
use wharf_tests::{Node, NodeConfig, frame, process::command_in, scenario, wait};

use crate::{
    Open, Scene, connect_from,
    errors::{count, got_none, send_error},
    pods::Pod,
    rules::Side,
};

#[test]
fn a_container_has_no_part_in_what_the_proxy_sends_in_its_name() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        for (number, to) in scene.servers()?.into_iter().enumerate() {
            let open = Open::new(&scene.web, to)?;
            let port = scene.egress.upstreams().get(2 * number).context("a connection that was sent on")?.port();
            let same = Open(connect_from(&scene.web, port, to).context("the port that the proxy took")?);
            ensure!(same.echoes()? && open.echoes()?, "{to}: both, through the proxy");
            ensure!(scene.egress.taken().len() == 2 * (number + 1), "{to}: the proxy has both");
            drop(same);
            ensure!(open.echoes()?, "{to}: the proxy's connection afterwards");
        }
        scene.end(node)
    })
}

/// Sends an acknowledgement of nothing from one port of the client's.
fn acknowledge(pod: &Pod, port: u16, to: SocketAddr) -> Result<()> {
    const ACK: u8 = 16;
    let own = pod.end.both()?.into_iter().find(|own| own.is_ipv4() == to.is_ipv4()).context("an address")?;
    let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let made = pod.space()?.run(|| socket(family, kind, flags, SockProtocol::Tcp))?.context("make a raw socket")?;
    let segment = frame::tcp(own, to.ip(), (port, to.port()), 1, ACK);
    // A raw socket's address has no port.
    let to = SockaddrStorage::from(SocketAddr::new(to.ip(), 0));
    sendto(made.as_raw_fd(), &segment, &to, MsgFlags::empty()).context("send an acknowledgement")?;
    Ok(())
}

/// The proxy's connection to itself has the same ends as the client's.
#[test]
fn where_both_ends_redirect_a_client_waits_for_the_port_that_the_proxy_took() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.redirect(node, Side::Ingress, false)?;
        let dropped = || node.packets(node.endpoint(&scene.web.end)?.id, "egress", "proxy-unavailable");
        for (number, to) in scene.servers()?.into_iter().enumerate() {
            let open = Open::new(&scene.web, to)?;
            let port = scene.egress.upstreams().last().context("a connection that was sent on")?.port();
            let before = dropped()?;
            ensure!(connect_from(&scene.web, port, to).is_err() && dropped()? > before, "{to}: the port is taken");
            ensure!(open.echoes()?, "{to}: the proxy's connection afterwards");
            // Not only first packets: the proxy's socket would answer with its sequence numbers.
            let before = dropped()?;
            acknowledge(&scene.web, port, to)?;
            wait::until("its drop", || Ok((dropped()? > before).then_some(())))?;
            drop(open);
            let free = || Ok(connect_from(&scene.web, port, to).ok());
            let same = Open(wait::until("the port is free", free).with_context(|| format!("{number}"))?);
            ensure!(same.echoes()?, "{to}");
        }
        scene.end(node)
    })
}

/// Its row would take the answers of the proxy's connection to itself.
#[test]
fn where_both_ends_redirect_the_proxy_takes_a_port_that_the_client_had() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        scene.redirect(node, Side::Ingress, false)?;
        for to in scene.servers()? {
            let had = Open(connect_from(&scene.web, HAD, to)?);
            ensure!(had.echoes()?, "{to}: the client's");
            drop(had);
            let sockets = || sockets_of(node, HAD);
            wait::until("the proxy closes its end", || Ok(sockets()?.is_empty().then_some(())))?;
            scene.egress.send_from(HAD);
            let open = Open::new(&scene.web, to).context("the proxy's connection from that port")?;
            scene.egress.send_from(0);
            ensure!(scene.egress.upstreams().last().is_some_and(|own| own.port() == HAD), "{to}: another port");
            ensure!(open.echoes()?, "{to}: and again");
        }
        scene.end(node)
    })
}

/// A port of the client's.
const HAD: u16 = 40_404;

/// The node's sockets with this port that are open.
fn sockets_of(node: &Node, port: u16) -> Result<String> {
    let done = command_in(node.space(), "ss")?
        .args(["-Htn", "exclude", "time-wait", &format!("( sport = {port} or dport = {port} )")])
        .output()?;
    ensure!(done.status.success(), "ss: {done:?}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The server knows the proxy's connection alone.
#[test]
fn an_error_of_the_servers_is_about_the_proxys_connection() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        count(scene.web.space()?)?;
        let id = node.endpoint(&scene.db.end)?.id;
        for to in scene.servers()? {
            let open = Open::new(&scene.web, to)?;
            let port = scene.egress.upstreams().last().context("a connection that was sent on")?.port();
            let same = Open(connect_from(&scene.web, port, to)?);
            ensure!(same.echoes()?, "{to}: the client's from the same port");
            let redirected = || node.packets(id, "egress", "redirected");
            let (before, client) = (redirected()?, same.0.local_addr()?);
            send_error(scene.db.space()?, to, client)?;
            wait::until("the error goes to the proxy", || Ok((redirected()? > before).then_some(())))?;
            ensure!(open.echoes()? && same.echoes()?, "{to}: afterwards");
        }
        got_none(scene.web.space()?)?;
        scene.end(node)
    })
}
