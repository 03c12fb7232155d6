//! The life of containers on a node: added, reached and reaching, deleted without a trace.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use nix::ifaddrs::getifaddrs;
use serde_json::json;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, echo,
    echo::EchoServer,
    icmp::{Ping, ping},
    process::ip,
    scenario, wait,
};

fn two(node: &Node) -> Result<[(Sandbox, Attached); 2]> {
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok([(a, ea), (b, eb)])
}

#[test]
fn containers_reach_each_other_with_every_protocol_and_size() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        for (from, to, at) in [(&a, &b, &eb), (&b, &a, &ea)] {
            let (space, server) = (from.space()?, EchoServer::start(to.space()?)?);
            for address in at.both()? {
                for payload in [0, 56, 1472, 1473, 4000, 16_000] {
                    Ping { to: address, count: 2, payload }.run(space)?.must_answer()?;
                }
                for bytes in [1, 1000, 1452, 8000, 60_000] {
                    echo::udp(space, server.udp_at(address), bytes)?;
                }
                for bytes in [1, 100_000, 8 << 20] {
                    echo::tcp(space, server.tcp_at(address), bytes)?;
                }
            }
        }
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn containers_reach_each_other_over_netkit_or_the_agent_refuses_the_kernel() -> Result<()> {
    const NETKIT: [&str; 2] = ["--device-mode", "netkit"];
    let mut node = Node::without_agent(NodeConfig::default())?;
    let kernel_has_it = ip(node.space(), "link add probe type netkit").is_ok();
    if !kernel_has_it {
        let finished = node.run_agent_to_end(&NETKIT)?;
        let text = format!("{}{}", finished.stdout, finished.stderr);
        let says = ["netkit", "Linux 6.10", "--device-mode veth"].iter().all(|words| text.contains(words));
        ensure!(finished.code() > 0 && says, "{}", finished.describe());
        ensure!(node.space().links()? == ["lo"], "{:?}", node.space().links()?);
        return Ok(());
    }
    ip(node.space(), "link del probe")?;
    node.set_flag("--device-mode=netkit", true);
    node.start_agent()?;
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let ea = node.attach(&a)?;
    // Existing links keep their kind after the mode changes.
    node.kill_agent()?;
    node.set_flag("--device-mode=netkit", false);
    node.set_flag("--device-mode=veth", true);
    node.start_agent()?;
    let eb = node.attach(&b)?;
    for (end, kind) in [(&ea, "netkit"), (&eb, "veth")] {
        let host = node.endpoint(end)?.host_ifname;
        let shown = ip(node.space(), &format!("-d link show dev {host}"))?;
        ensure!(shown.contains(kind), "{kind}: {shown}");
        node.check(end)?.silent().with_context(|| format!("CHECK behind {kind}"))?;
    }
    for (from, to) in [(&a, &eb), (&b, &ea)] {
        for address in to.both()? {
            ping(from.space()?, address)?.must_answer()?;
        }
    }
    node.kill_agent()?;
    node.start_agent()?;
    let report = node.audit()?;
    ensure!(report.findings.is_empty(), "{report:?}");
    node.detach(&ea)?;
    node.detach(&eb)?;
    ensure!(node.endpoints()?.is_empty());
    node.stop_agent()
}

#[test]
fn the_node_and_a_container_reach_each_other() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, at_node) = (node.sandbox("a")?, EchoServer::start(node.space())?);
        let ea = node.attach(&a)?;
        let at_a = EchoServer::start(a.space()?)?;
        let directions = [(a.space()?, &at_node, ea.gateways()?), (node.space(), &at_a, ea.both()?)];
        for (from, server, addresses) in directions {
            for address in addresses {
                for payload in [56, 4000] {
                    Ping { to: address, count: 2, payload }.run(from)?.must_answer()?;
                }
                echo::udp(from, server.udp_at(address), 1000)?;
                echo::udp(from, server.udp_at(address), 8000)?;
                echo::tcp(from, server.tcp_at(address), 4 << 20)?;
            }
        }
        node.detach(&ea)
    })
}

#[test]
fn a_container_reaches_its_own_addresses() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let server = EchoServer::start(a.space()?)?;
        for address in ea.both()?.into_iter().chain([IpAddr::from([127, 0, 0, 1])]) {
            ping(a.space()?, address)?.must_answer()?;
            echo::tcp(a.space()?, server.tcp_at(address), 1000)?;
        }
        node.detach(&ea)
    })
}

#[test]
fn the_addresses_work_from_the_moment_add_answers() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        for round in 0..40 {
            let ea = node.attach(&a)?;
            // IPv6 first: the kernel completes an address of that family on a work queue, after the request for it was
            // acknowledged, and a container that starts at once must not lose its first packet to that.
            for address in [ea.v6()?.into(), ea.v4()?.into()] {
                let once = Ping { to: address, count: 1, payload: 56 }.run(a.space()?)?;
                once.must_answer().with_context(|| format!("round {round}"))?;
            }
            node.detach(&ea)?;
        }
        Ok(())
    })
}

#[test]
fn add_answers_with_what_the_container_has() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach_with(&a, "uplink0", &node.netconf().with("mtu", json!(1400)))?;
        let mut held: Vec<(IpAddr, IpAddr)> = a.space()?.run(|| -> Result<_> {
            let on_link = getifaddrs()?.filter(|i| i.interface_name == "uplink0");
            let pair = |i: nix::ifaddrs::InterfaceAddress| {
                let (address, mask) = (i.address?, i.netmask?);
                let v4 = || Some((address.as_sockaddr_in()?.ip().into(), mask.as_sockaddr_in()?.ip().into()));
                let v6 = || Some((address.as_sockaddr_in6()?.ip().into(), mask.as_sockaddr_in6()?.ip().into()));
                v4().or_else(v6)
            };
            Ok(on_link.filter_map(pair).collect())
        })??;
        held.retain(|(address, _)| !matches!(address, IpAddr::V6(a) if a.is_unicast_link_local()));
        held.sort_unstable();
        let expected = vec![(ea.v4()?.into(), IpAddr::from([255; 4])), (ea.v6()?.into(), IpAddr::from([0xff; 16]))];
        ensure!(held == expected, "on the interface {held:?}, in the result {expected:?}");

        let link = ip(a.space()?, "link show uplink0")?;
        ensure!(link.contains("mtu 1400") && link.contains("state UP"), "{link}");
        let listed = node.endpoint(&ea)?;
        ensure!(link.contains(&listed.container_mac), "{link} against {}", listed.container_mac);
        let [g4, g6] = ea.gateways()?;
        let (r4, r6) = (ip(a.space()?, "-4 route")?, ip(a.space()?, "-6 route")?);
        ensure!(r4.contains(&format!("default via {g4} dev uplink0")), "{r4}");
        ensure!(r6.contains(&format!("default via {g6} dev uplink0")), "{r6}");

        let host = ip(node.space(), &format!("link show {}", listed.host_ifname))?;
        ensure!(host.starts_with(&format!("{}:", listed.ifindex)) && host.contains("mtu 1400"), "{host}");
        node.detach(&ea)
    })
}

#[test]
fn a_deleted_container_answers_no_more_and_its_interface_is_gone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        node.detach(&eb)?;
        ensure!(b.space()?.links()? == ["lo"], "{:?}", b.space()?.links()?);
        for address in eb.both()? {
            let silence = Ping { to: address, count: 1, payload: 56 }.run(a.space()?)?;
            ensure!(silence.answered == 0, "{silence:?}");
            ensure!(echo::tcp(node.space(), (address, 9).into(), 1).is_err(), "{address} still takes connections");
        }
        let (r4, r6) = (ip(node.space(), "-4 route")?, ip(node.space(), "-6 route")?);
        for (routes, address) in [(&r4, eb.v4()?.to_string()), (&r6, eb.v6()?.to_string())] {
            let left = routes.lines().any(|l| l.split_whitespace().next() == Some(address.as_str()));
            ensure!(!left, "a route to {address} is left:\n{routes}");
        }
        ping(node.space(), ea.v4()?.into())?.must_answer()?;
        node.detach(&ea)
    })
}

#[test]
fn a_second_life_in_the_same_namespace_works_like_the_first() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let mut epochs = Vec::new();
        for _ in 0..5 {
            let ea = node.attach(&a)?;
            for address in ea.both()? {
                ping(node.space(), address)?.must_answer()?;
            }
            epochs.push(node.endpoint(&ea)?.epoch);
            node.detach(&ea)?;
            ensure!(node.left_behind()?.is_empty(), "{:?}", node.left_behind()?);
        }
        ensure!(epochs.is_sorted_by(|a, b| a < b), "an epoch came twice: {epochs:?}");
        Ok(())
    })
}

#[test]
fn two_interfaces_of_one_container_are_two_endpoints() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, first), (b, eb)] = two(node)?;
        let second = node.attach_with(&a, "eth1", &node.netconf().with("name", json!("annex")))?;
        ensure!(first.both()? != second.both()?, "both have {:?}", first.both()?);
        let listed = node.endpoints()?;
        let mut of_a: Vec<_> = listed.iter().filter(|e| e.container_id == "a").map(|e| e.ifname.as_str()).collect();
        of_a.sort_unstable();
        ensure!(of_a == ["eth0", "eth1"], "{of_a:?}");
        for address in first.both()? {
            ping(b.space()?, address)?.must_answer()?;
        }
        // Answers to the second interface's address must leave by the second interface: only there is it not a spoof.
        for address in second.both()? {
            ping(b.space()?, address)?.must_answer().context("the second interface")?;
        }
        node.detach(&first)?;
        ensure!(a.space()?.links()?.contains(&"eth1".to_owned()), "DEL of eth0 took eth1 along");
        for address in second.both()? {
            ping(b.space()?, address)?.must_answer().context("the second interface alone")?;
        }
        node.detach(&second)?;
        node.detach(&eb)
    })
}

#[test]
fn fifty_containers_come_talk_and_go() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes: Vec<Sandbox> = (0..50).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        let endpoints: Vec<Attached> = sandboxes.iter().map(|s| node.attach(s)).collect::<Result<_>>()?;
        let first = sandboxes.first().context("a first sandbox")?;
        for endpoint in &endpoints {
            for address in endpoint.both()? {
                Ping { to: address, count: 1, payload: 56 }.run(first.space()?)?.must_answer()?;
            }
        }
        let listed = node.endpoints()?;
        ensure!(listed.len() == 50, "{} are listed", listed.len());
        ensure!(listed.iter().all(|e| e.state == wharf_api::EndpointState::Ready), "{listed:?}");
        endpoints.iter().try_for_each(|e| node.detach(e))
    })
}

#[test]
fn an_address_given_back_is_not_given_out_next() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let ea = node.attach(&a)?;
        let old = ea.both()?;
        node.detach(&ea)?;
        let eb = node.attach(&b)?;
        ensure!(eb.both()?.iter().all(|address| !old.contains(address)), "{old:?} went straight to another container");
        node.detach(&eb)
    })
}

/// As after a plugin that was killed in its DEL, under a runtime that sends no other.
#[test]
fn a_container_that_dies_and_gets_no_del_is_deleted_by_the_agent() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--gone-grace-ms", "0"]), |node| {
        let [(mut a, ea), (mut b, eb)] = two(node)?;
        // Its path is gone and its namespace lives, as for an agent in other mounts.
        let held = std::fs::File::open(b.path())?;
        b.vanish()?;
        a.vanish()?;
        wait::until("the agent to delete the dead container's endpoint", || {
            Ok(node.endpoint(&ea).is_err().then_some(()))
        })?;
        ensure!(node.endpoint(&eb)?.state == wharf_api::EndpointState::Ready, "{:?}", node.endpoint(&eb)?);
        ensure!(node.log().contains("no DEL came within 0 s"), "not in the log");
        node.detach(&ea).context("a DEL that comes later")?;
        node.detach(&eb)?;
        drop(held);
        Ok(())
    })
}

#[test]
fn a_container_that_took_its_interface_down_and_up_is_connected_again() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        for state in ["down", "up"] {
            ip(a.space()?, &format!("link set eth0 {state}"))?;
        }
        for to in eb.both()? {
            let reached = || Ok(Ping { to, count: 1, payload: 56 }.run(a.space()?)?.must_answer().ok());
            wait::until("the container reaches another one again", reached)?;
        }
        let findings = node.audit()?.findings;
        ensure!(findings.is_empty(), "{findings:?}");
        // An interface that stays down is the container's choice.
        ip(a.space()?, "link set eth0 down")?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_container_that_dies_with_its_namespace_is_deleted_cleanly() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(mut a, ea), (b, eb)] = two(node)?;
        a.vanish()?;
        wait::until("the kernel to take the dead container's link", || {
            Ok((node.endpoint_links()?.len() == 1).then_some(()))
        })?;
        node.detach(&ea)?;
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        node.detach(&eb)
    })
}
