//! Addresses: none left, and one that is not the container's own.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use wharf_tests::{
    Node, NodeConfig,
    frame::{self, PacketSocket},
    icmp::ping,
    scenario, wait,
};

use crate::{
    phrases::{FALSE_SOURCE, POOL_EXHAUSTED},
    support::{Screen, all_is_well, await_screen, await_status, config, id, remedy, two, wharf},
};

/// The CNI code for "try again later".
const LATER: u32 = 11;

fn small_pool() -> NodeConfig {
    config().flags(&["--ipv4-pool", "10.44.0.0/29", "--ipv6-pool", "fd44::/64", "--ip-rest-ms", "100"])
}

#[test]
fn no_address_is_left() -> Result<()> {
    scenario(small_pool(), |node| {
        // Six addresses; the router has one, and a caller another.
        let held = node.http("POST", "/v1/ipam/10.44.0.6?owner=somebody", None)?;
        ensure!(held.status < 300, "{}", held.text());
        let sandboxes: Vec<_> = (0..4).map(|n| node.sandbox(&format!("job-{n}"))).collect::<Result<_>>()?;
        let jobs: Vec<_> = sandboxes.iter().map(|s| node.attach(s)).collect::<Result<_>>()?;
        let web = node.sandbox("web-3f9c51aa")?;
        let failure = node.cni("ADD").of(web.name(), web.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(failure.code == LATER, "{failure:?}");
        await_status(node, 1, POOL_EXHAUSTED.status)?;
        wharf(node, &["explain", "web-3f9c51aa"])?.must(0, POOL_EXHAUSTED.explain)?;
        let list = wharf(node, &["ipam", "list"])?;
        list.must(0, POOL_EXHAUSTED.other)?;
        for job in &jobs {
            list.must_say(&[&job.v4()?.to_string(), &format!("harbour/{}:eth0", job.container)])?;
        }
        list.must_say(&["10.44.0.6", "somebody"])?;
        remedy(node, POOL_EXHAUSTED.remedy, &[("ADDRESS", "10.44.0.6")])?;
        let ea = node.attach(&web)?;
        ping(web.space()?, ea.gateways()?[0])?.must_answer()?;
        jobs.iter().try_for_each(|job| node.detach(job))?;
        await_status(node, 0, POOL_EXHAUSTED.over)?;
        all_is_well(node)?;
        node.detach(&ea)
    })
}

/// `wharf monitor` until it has seen one drop; packets are sent until then.
fn monitored(node: &Node, id: &str, send: impl Fn() -> Result<()>) -> Result<Screen> {
    std::thread::scope(|scope| {
        let twin = node.twin()?;
        let arguments = ["monitor", "--type", "drop", "--reason", "invalid-source-ip", "--endpoint", id, "-n", "1"];
        let watching = scope.spawn(move || wharf(&twin, &arguments));
        wait::until("the monitor to show a packet", || {
            send()?;
            Ok(watching.is_finished().then_some(()))
        })?;
        watching.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })
}

#[test]
fn a_container_sends_in_anothers_name() -> Result<()> {
    scenario(config(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let (id, own) = (id(node, &ea)?, node.endpoint(&ea)?);
        let socket = PacketSocket::open(a.space()?, "eth0")?;
        let (from, to) = (Ipv4Addr::new(10, 99, 1, 5), eb.v4()?);
        let packet = frame::ip(from.into(), to.into(), 17, &frame::udp(from.into(), to.into(), (4000, 53), b"hello"));
        let bytes = frame::ethernet(frame::mac(&own.host_mac)?, frame::mac(&own.container_mac)?, frame::IPV4, &packet);
        socket.send(&bytes)?;
        // Nothing is amiss with the node: the question is about the container.
        wharf(node, &["status"])?.must(0, FALSE_SOURCE.status)?;
        await_screen(node, &["explain", "web-3f9c51aa"], |s| s.says_all(FALSE_SOURCE.explain))?.must_exit(0)?;
        let shown = monitored(node, &id, || socket.send(&bytes))?;
        shown.must(0, FALSE_SOURCE.other)?;
        shown.must_say(&[&format!("endpoint {id}")])?;
        // What it sends in its own name passes all the while.
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        wharf(node, &["explain", "db-77e0c2d1"])?.must(0, &["nothing is wrong"])?;
        all_is_well(node)?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}
