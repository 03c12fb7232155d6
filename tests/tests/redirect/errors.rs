//! ICMP errors about redirected flows.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, socket};
use wharf_tests::{NodeConfig, frame, icmp::internet_checksum, process::command_in, scenario, space::Space, wait};

use crate::{
    Open, Scene,
    client::{Flow, LOST},
    rules::Side,
    udp::{Udp, took},
};

fn nft(space: &Space, arguments: &str) -> Result<String> {
    let done = command_in(space, "nft")?.arg(arguments).output()?;
    ensure!(done.status.success(), "nft {arguments}: {done:?}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Counts the errors that a namespace gets.
pub(crate) fn count(space: &Space) -> Result<()> {
    let types = ["icmp type destination-unreachable", "icmpv6 type destination-unreachable"];
    let rules = types.map(|which| format!("{which} counter;")).concat();
    nft(space, &format!("table inet t {{ chain c {{ type filter hook input priority -300; {rules} }}; }}")).map(drop)
}

pub(crate) fn got_none(space: &Space) -> Result<()> {
    let told = nft(space, "list table inet t")?;
    ensure!(told.matches("packets 0 ").count() == 2, "{told}");
    Ok(())
}

/// Sends the error that nobody listens at the port of `at` to the one whose packet of TCP it says it is about.
pub(crate) fn send_error(from: &Space, at: SocketAddr, to: SocketAddr) -> Result<()> {
    let ports = [to.port().to_be_bytes(), at.port().to_be_bytes()].concat();
    let quoted = frame::ip(to.ip(), at.ip(), 6, &[&ports[..], &[0; 16]].concat());
    let (family, protocol, kind) = match at.ip() {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, [3, 3]),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, [1, 4]),
    };
    let message = |sum: [u8; 2]| [&kind[..], &sum, &[0; 4], &quoted].concat();
    // The kernel fills in that of IPv6.
    let message = message(internet_checksum(&message([0; 2])).to_be_bytes());
    from.run(|| {
        let raw = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        let to = SockaddrStorage::from(SocketAddr::new(to.ip(), 0));
        sendto(raw.as_raw_fd(), &message, &to, MsgFlags::empty()).context("send an error")
    })??;
    Ok(())
}

/// The proxy has the server's place; and the server has no part in what it never got.
#[test]
fn errors_of_the_ends_do_not_pass_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        scene.redirect(node, Side::Egress, false)?;
        let [client_id, server_id] = [node.endpoint(&scene.web.end)?.id, node.endpoint(&scene.db.end)?.id];
        for space in [scene.web.space()?, scene.db.space()?] {
            count(space)?;
        }
        for to in scene.servers()? {
            let open = Open::new(&scene.web, to)?;
            let client = open.0.local_addr()?;
            let before = node.packets(client_id, "egress", "redirected")?;
            send_error(scene.web.space()?, client, to)?;
            wait::until("the error goes to the proxy", || {
                Ok((node.packets(client_id, "egress", "redirected")? > before).then_some(()))
            })?;
            let before = node.packets(server_id, "egress", "proxy-unavailable")?;
            send_error(scene.db.space()?, to, client)?;
            wait::until("the error is dropped", || {
                Ok((node.packets(server_id, "egress", "proxy-unavailable")? > before).then_some(()))
            })?;
            ensure!(open.echoes()?, "{to}: afterwards");
        }
        got_none(scene.web.space()?)?;
        got_none(scene.db.space()?)?;
        scene.end(node)
    })
}

#[test]
fn an_error_about_what_the_proxy_sent_comes_to_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let udp = Udp::new(node)?;
        udp.scene.redirect(node, Side::Egress, false)?;
        count(udp.client()?)?;
        for (client, server) in udp.scene.web.end.both()?.into_iter().zip(udp.scene.db.end.both()?) {
            // Nobody is there.
            let to = SocketAddr::new(server, 9);
            ensure!(!Flow::new(udp.client()?, to)?.is_echoed(b"hello", LOST)?, "{to}: an answer");
            took(&udp.egress, client, to, 1)?;
            ensure!(udp.egress.is_refused(), "{to}: the proxy was told nothing");
        }
        got_none(udp.client()?)?;
        udp.end(node)
    })
}
