//! What leaves the node: masquerading and forwarding, toward a "world" that is one more namespace behind one link.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, echo, icmp,
    process::{command_in, ip, own_address, run},
    scenario,
    sctp::SctpSocket,
    wait,
    world::{NODE, WORLD, World},
};

struct Scene {
    world: World,
    inside: Sandbox,
    end: Attached,
}

fn scene(node: &Node) -> Result<Scene> {
    let world = World::join(node)?;
    let inside = node.sandbox("inside")?;
    let end = node.attach(&inside)?;
    Ok(Scene { world, inside, end })
}

impl Scene {
    /// Every protocol, both families.
    fn reaches_the_world(&self) -> Result<()> {
        let inside = self.inside.space()?;
        for address in self.world.addresses() {
            echo::tcp(inside, self.world.echo().tcp_at(address), 100_000).context("TCP")?;
            echo::udp(inside, self.world.echo().udp_at(address), 1_000).context("UDP")?;
            icmp::ping(inside, address)?.must_answer()?;
        }
        Ok(())
    }

    /// Who a server of the world takes the container for.
    fn seen_as(&self, world: IpAddr) -> Result<IpAddr> {
        seen_as(&self.world, &self.inside, world)
    }

    fn end(&self, node: &Node) -> Result<()> {
        node.detach(&self.end)
    }
}

/// Who a server of the world takes a container for.
fn seen_as(world: &World, from: &Sandbox, address: IpAddr) -> Result<IpAddr> {
    let server = world.space()?.run(|| UdpSocket::bind(SocketAddr::new(address, 0)))??;
    server.set_read_timeout(Some(Duration::from_secs(5)))?;
    echo::udp_client(from.space()?, server.local_addr()?)?.send(b"who?")?;
    Ok(server.recv_from(&mut [0; 16])?.1.ip())
}

fn nft(node: &Node, arguments: &[&str]) -> Result<String> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(arguments);
    run(command, b"", Duration::from_secs(10))?.ok()
}

fn setting(node: &Node, path: &str) -> Result<String> {
    let text = node.space().run(|| std::fs::read_to_string(format!("/proc/sys/net/{path}")))??;
    Ok(text.trim().to_owned())
}

fn masquerade_row(node: &Node) -> Result<(String, String)> {
    row(node, "masquerade")?.context("no row of masquerading in the status")
}

/// Health and message of a component.
fn row(node: &Node, name: &str) -> Result<Option<(String, String)>> {
    let status: serde_json::Value = serde_json::from_str(&node.wharf(&["status", "-o", "json"])?.stdout)?;
    let row = status["components"].as_array().into_iter().flatten().find(|c| c["name"] == name);
    let text = |key: &str| row.map(|row| row[key].as_str().unwrap_or_default().to_owned());
    Ok(text("health").zip(text("message")))
}

#[test]
fn a_container_reaches_the_world_with_the_nodes_address() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        s.reaches_the_world()?;
        for (world, expected) in s.world.addresses().into_iter().zip(NODE) {
            ensure!(s.seen_as(world)?.to_string() == expected, "{world} sees another source");
        }
        // A neighbour still sees the container's own address.
        let neighbour = node.sandbox("neighbour")?;
        let other = node.attach(&neighbour)?;
        let server = neighbour.space()?.run(|| UdpSocket::bind("0.0.0.0:0"))??;
        server.set_read_timeout(Some(Duration::from_secs(5)))?;
        let to = SocketAddr::new(other.v4()?.into(), server.local_addr()?.port());
        echo::udp_client(s.inside.space()?, to)?.send(b"who?")?;
        ensure!(server.recv_from(&mut [0; 16])?.1.ip() == IpAddr::V4(s.end.v4()?));
        let (health, message) = masquerade_row(node)?;
        ensure!(health == "ok" && message.contains("net.ipv6.conf.all.forwarding"), "{health}: {message}");
        let entries: u64 = setting(node, "netfilter/nf_conntrack_count")?.parse()?;
        let (health, message) = row(node, "connections")?.context("no row of connections")?;
        ensure!(
            health == "ok" && entries > 0 && message.ends_with(" tracked"),
            "{health}: {message}, {entries} entries"
        );
        let told: u64 = message.split(' ').next().unwrap_or_default().parse()?;
        ensure!(told > 0 && message.contains(&setting(node, "netfilter/nf_conntrack_max")?), "{message}");
        node.detach(&other)?;
        s.end(node)
    })
}

/// Chains of type nat do not see such packets, so another chain drops them.
#[test]
fn what_belongs_to_no_connection_does_not_leave_with_a_containers_address() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = scene(node)?;
        for (world, own) in s.world.addresses().into_iter().zip(s.end.both()?) {
            let v4 = world.is_ipv4();
            let (inside, outside) = (SctpSocket::open(s.inside.space()?, v4)?, SctpSocket::open(s.world.space()?, v4)?);
            // An answer that nobody asked for.
            let send = || inside.acknowledge(7_000, SocketAddr::new(world, 7_001));
            send()?;
            let seen = outside.receive(true);
            ensure!(seen.is_err(), "{world} got it: {seen:?}");
            nft(node, &["flush", "chain", "inet", "wharf", "untranslated"])?;
            send()?;
            let (from, _) = outside.receive(true).context("without the chain")?;
            ensure!(from.ip() == own, "without the chain it comes from {from}");
            wait::until("the audit to put the chain back", || {
                let text = nft(node, &["list", "chain", "inet", "wharf", "untranslated"])?;
                Ok(text.contains("ct state invalid").then_some(()))
            })?;
        }
        s.end(node)
    })
}

#[test]
fn containers_whose_address_no_pool_has_any_more_stay_masqueraded() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let inside = node.sandbox("inside")?;
        let conf = node.netconf();
        let add = node.cni("ADD").of(inside.name(), inside.path(), "eth0").env("CNI_ARGS", "IP=10.87.200.9");
        add.conf(&conf).run()?.result()?;
        let [v4, _] = world.addresses();
        let by_the_node: IpAddr = NODE[0].parse()?;
        ensure!(seen_as(&world, &inside, v4)? == by_the_node);
        node.stop_agent()?;
        node.set_flag("--ipv4-pool=10.87.0.0/24", true);
        node.start_agent()?;
        let seen = seen_as(&world, &inside, v4)?;
        ensure!(seen == by_the_node, "the world sees {seen}");
        node.cni("DEL").of(inside.name(), inside.path(), "eth0").conf(&conf).run()?.silent()
    })
}

#[test]
fn a_network_says_whether_its_containers_are_masqueraded() -> Result<()> {
    let pool = "[[pool]]\nname = 'bare'\ncidrs = ['10.99.0.0/24', 'fd99::/64']\nmasquerade = 'off'";
    scenario(NodeConfig::default().toml(pool), |node| {
        let s = scene(node)?;
        let own = node.sandbox("own")?;
        let keeps = node.attach_with(&own, "eth0", &node.netconf().with("ipMasq", json!(false)))?;
        let check = |own_address: bool, when: &str| -> Result<()> {
            for ((world, mine), nodes) in s.world.addresses().into_iter().zip(keeps.both()?).zip(NODE) {
                let expected = if own_address { mine.to_string() } else { nodes.to_owned() };
                let seen = seen_as(&s.world, &own, world)?.to_string();
                ensure!(seen == expected, "{when}: {world} sees {seen}, not {expected}");
                ensure!(s.seen_as(world)?.to_string() == nodes, "{when}: its neighbour is not masqueraded");
            }
            Ok(())
        };
        check(true, "made")?;
        node.kill_agent()?;
        check(true, "without an agent")?;
        nft(node, &["flush", "ruleset"])?;
        node.start_agent()?;
        node.await_rebuilt()?;
        check(true, "after a flush without an agent")?;
        nft(node, &["delete element inet wharf own6", &format!("{{ {} }}", keeps.v6()?)])?;
        let said = node.wharf(&["audit"])?.stdout;
        ensure!(said.contains("own-address") && said.contains(&keeps.v6()?.to_string()), "{said}");
        node.wharf(&["audit", "--repair"])?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        check(true, "repaired")?;
        // The next container with the address is masqueraded.
        node.detach(&keeps)?;
        for set in ["own4", "own6"] {
            ensure!(!nft(node, &["list", "set", "inet", "wharf", set])?.contains("elements"), "{set} is not empty");
        }
        let bare = node.netconf().with("pool", json!("bare")).with("ipMasq", json!(true));
        let said = node.cni("ADD").of("own", own.path(), "eth0").conf(&bare).run()?.failure()?;
        ensure!(said.code == 7 && said.msg.contains("pool bare"), "{said:?}");
        let said = node.cni("STATUS").conf(&bare).run()?.failure()?;
        ensure!(said.code == 7 && said.msg.contains("pool bare"), "{said:?}");
        node.cni("STATUS").conf(&node.netconf().with("ipMasq", json!(true))).run()?.silent()?;
        ensure!(node.endpoints()?.len() == 1, "an endpoint is left");
        let asks = node.attach_with(&own, "eth0", &node.netconf().with("ipMasq", json!(true)))?;
        ensure!(seen_as(&s.world, &own, s.world.addresses()[0])?.to_string() == NODE[0]);
        node.detach(&asks)?;
        s.end(node)
    })
}

#[test]
fn masquerading_outlives_kills_and_what_others_do_to_its_table() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--audit-interval-ms=1000"]), |node| {
        let s = scene(node)?;
        node.kill_agent()?;
        s.reaches_the_world().context("without an agent")?;
        node.start_agent()?;
        s.reaches_the_world().context("after the restart")?;
        // What is damaged is put aside at the next start, and nothing else depends on it.
        node.kill_agent()?;
        std::fs::write(node.dirs().run.join("settings.json"), "{")?;
        node.start_agent()?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        ensure!(node.dirs().run.join("settings.bad").exists(), "the damaged record was not put aside");
        nft(node, &["flush", "ruleset"])?;
        wait::until("the table is written again", || {
            Ok(nft(node, &["list", "tables"])?.contains("inet wharf").then_some(()))
        })?;
        s.reaches_the_world().context("after a flush")?;
        ip(node.space(), "link add dummy9 type veth peer name dummy8")?;
        node.space().run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "0"))??;
        wait::until("the node forwards again", || Ok((setting(node, "ipv4/ip_forward")? == "1").then_some(())))?;
        s.reaches_the_world().context("after the setting")?;
        ip(node.space(), "link del dummy9")?;
        s.end(node)
    })
}

#[test]
fn off_touches_neither_firewall_nor_settings_and_takes_back_what_on_did() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade=off"]), |node| {
        let s = scene(node)?;
        let settings = ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/up0/accept_ra"];
        let before: Vec<String> = settings.iter().map(|path| setting(node, path)).collect::<Result<_>>()?;
        ensure!(nft(node, &["list", "ruleset"])?.is_empty(), "a ruleset was written");
        ensure!(
            echo::udp(s.inside.space()?, s.world.echo().udp_at(s.world.addresses()[0]), 10).is_err(),
            "it reached the world"
        );
        let (health, message) = masquerade_row(node)?;
        ensure!((health.as_str(), message.as_str()) == ("ok", "off"), "{health}: {message}");
        ensure!(row(node, "connections")?.is_none(), "a row of what is not used");
        let other = node.sandbox("other")?;
        let conf = node.netconf().with("ipMasq", json!(true));
        let said = node.cni("ADD").of("other", other.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(said.code == 7 && said.details.contains("--masquerade on"), "{said:?}");
        ensure!(node.endpoints()?.len() == 1, "an endpoint is left");
        for (flag, reaches) in [("--masquerade=on", true), ("--masquerade=off", false)] {
            node.stop_agent()?;
            node.set_flag("--masquerade=on", false);
            node.set_flag("--masquerade=off", false);
            node.set_flag(flag, true);
            node.start_agent()?;
            ensure!(nft(node, &["list", "tables"])?.contains("inet wharf") == reaches, "{flag}");
            if reaches {
                s.reaches_the_world()?;
                ensure!(setting(node, "ipv6/conf/up0/accept_ra")? == "2", "the uplink no longer listens to routers");
            }
        }
        let after: Vec<String> = settings.iter().map(|path| setting(node, path)).collect::<Result<_>>()?;
        ensure!(before == after, "{before:?} became {after:?}");
        s.end(node)
    })
}

#[test]
fn what_is_excluded_keeps_its_address_and_a_chosen_source_is_used() -> Result<()> {
    let exclude = format!("--masquerade-exclude={}/32", WORLD[0]);
    let source = "--masquerade-source=198.51.100.77,2001:db8:7::77";
    scenario(NodeConfig::default().flags(&[&exclude, source]), |node| {
        let s = scene(node)?;
        // `up0` goes with the world, at any moment after this, and an absent source is a finding.
        for address in ["198.51.100.77", "2001:db8:7::77"] {
            own_address(node.space(), address.parse()?)?;
        }
        let [world4, world6] = s.world.addresses();
        ensure!(s.seen_as(world4)? == IpAddr::V4(s.end.v4()?));
        ensure!(s.seen_as(world6)? == "2001:db8:7::77".parse::<IpAddr>()?);
        s.end(node)
    })
}

#[test]
fn a_table_of_somebody_elses_and_a_chain_that_refuses_are_named_and_left() -> Result<()> {
    let pool = "[[pool]]\nname = 'bare'\ncidrs = ['10.99.0.0/24']\nmasquerade = 'off'";
    scenario(NodeConfig::default().toml(pool), |node| {
        let s = scene(node)?;
        let refuses = |expected: bool| {
            wait::until(&format!("the chain refuses: {expected}"), || {
                let (health, message) = masquerade_row(node)?;
                Ok(((health == "degraded", message.contains("inet wall c refuses")) == (expected, expected))
                    .then_some(message))
            })
        };
        nft(
            node,
            &["add table inet wall; add chain inet wall c { type filter hook forward priority 0; policy drop; }"],
        )?;
        let message = refuses(true)?;
        // The command can be copied from the screen, and mends it; pools that are not masqueraded are in it.
        let shown = node.wharf(&["status"])?.stdout;
        let command =
            shown.lines().find_map(|line| line.trim().strip_prefix("nft '")).and_then(|c| c.strip_suffix('\''));
        let command = command.with_context(|| format!("no command on a line of its own: {shown}"))?;
        ensure!(message.contains(command) && command.contains("10.99.0.0/24"), "{message}");
        ensure!(s.reaches_the_world().is_err(), "the chain refuses nothing");
        nft(node, &[command])?;
        refuses(false)?;
        s.reaches_the_world()?;
        nft(node, &["delete table inet wall"])?;
        refuses(false)?;
        node.stop_agent()?;
        nft(node, &["delete table inet wharf; add table inet wharf; add chain inet wharf theirs"])?;
        node.start_agent()?;
        let (health, message) = masquerade_row(node)?;
        ensure!(health == "degraded" && message.contains("somebody else"), "{health}: {message}");
        ensure!(nft(node, &["list", "table", "inet", "wharf"])?.contains("theirs"));
        // Containers of the node are served all the same.
        let other = node.sandbox("other")?;
        let there = node.attach(&other)?;
        icmp::ping(s.inside.space()?, there.v4()?.into())?.must_answer()?;
        node.detach(&there)?;
        nft(node, &["delete table inet wharf"])?;
        wait::until("the agent's own table", || Ok((masquerade_row(node)?.0 == "ok").then_some(())))?;
        s.end(node)
    })
}

#[test]
fn what_is_taken_back_is_what_was_there_and_nobody_changed() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade=off"]), |node| {
        let set = |node: &Node, path: &str, value: &str| {
            node.space()
                .run(|| std::fs::write(format!("/proc/sys/net/{path}"), value))?
                .with_context(|| path.to_owned())
        };
        ip(node.space(), "link add v0 type veth peer name v1")?;
        ip(node.space(), "link add v2 type veth peer name v3")?;
        let kept =
            ["ipv4/conf/all/accept_redirects", "ipv4/conf/v0/forwarding", "ipv4/conf/v2/forwarding", "ipv4/ip_forward"];
        // A new namespace has the IPv4 settings of the machine.
        set(node, kept[3], "0")?;
        set(node, kept[0], "0")?;
        set(node, kept[1], "1")?;
        set(node, kept[2], "1")?;
        node.stop_agent()?;
        node.set_flag("--masquerade=off", false);
        node.start_agent()?;
        // The record is removed with all that the agent knows of it in memory, and somebody closes an interface.
        let record = node.dirs().run.join("settings.json");
        std::fs::remove_file(&record)?;
        wait::until("the record is written again", || Ok(record.exists().then_some(())))?;
        set(node, kept[2], "0")?;
        node.stop_agent()?;
        node.set_flag("--masquerade=off", true);
        node.start_agent()?;
        let values: Vec<String> = kept.iter().map(|path| setting(node, path)).collect::<Result<_>>()?;
        ensure!(values == ["0", "1", "0", "0"], "{kept:?} are {values:?}");
        Ok(())
    })
}

#[test]
fn what_the_agent_does_not_put_right_is_named_with_what_to_do() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--masquerade=off", "--local-delivery=stack"]), |node| {
        for path in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            node.space().run(|| std::fs::write(format!("/proc/sys/net/{path}"), "0"))??;
        }
        wait::until("what is missing is named", || {
            let (health, message) = masquerade_row(node)?;
            Ok((health == "degraded" && message.contains("net.ipv4.ip_forward")).then_some(()))
        })?;
        ensure!(node.wharf(&["audit"])?.stdout.contains("sysctl -w net.ipv4.ip_forward=1"));
        for path in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            node.space().run(|| std::fs::write(format!("/proc/sys/net/{path}"), "1"))??;
        }
        wait::until("nothing amiss", || Ok((masquerade_row(node)?.0 == "ok").then_some(())))
    })?;
    scenario(NodeConfig::default().flags(&["--masquerade-source=203.0.113.9"]), |node| {
        let (health, message) = masquerade_row(node)?;
        ensure!(health == "degraded" && message.contains("203.0.113.9"), "{health}: {message}");
        ip(node.space(), "addr add 203.0.113.9/32 dev lo")?;
        wait::until("nothing amiss", || Ok((masquerade_row(node)?.0 == "ok").then_some(())))
    })
}
