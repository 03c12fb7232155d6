//! Pools that overlap the node's own networks: refused at start, told when they come later; what is the node's stays.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Node, NodeConfig,
    process::{ip, run},
    scenario, wait,
};

/// What the node has: commands of `ip`, and the words by which the refusal names it; none where it is no conflict.
const KINDS: &[(&[&str], Option<&[&str]>)] = &[
    // A LAN equal to the pool, inside it, around it.
    (&["addr add 10.87.44.5/16 dev lan0"], Some(&["10.87.0.0/16", "10.87.44.5", "lan0"])),
    (&["addr add 10.87.9.7/24 dev lan0"], Some(&["10.87.9.0/24", "lan0"])),
    (&["addr add 10.200.0.5/8 dev lan0"], Some(&["10.0.0.0/8", "lan0"])),
    (&["-6 addr add fd57:4a7f:e8f::44/64 dev lan0 nodad"], Some(&["fd57:4a7f:e8f::44", "lan0"])),
    (&["-6 addr add fd57:4a7f:e8f::9:1/112 dev lan0 nodad"], Some(&["fd57:4a7f:e8f::9:0/112", "lan0"])),
    (&["-6 addr add fd57:4a7f:e8f:1::1/48 dev lan0 nodad"], Some(&["fd57:4a7f:e8f::/48", "lan0"])),
    // The router's own address, on another interface.
    (&["addr add 10.87.0.1/32 dev lan0"], Some(&["10.87.0.1", "lan0", "--ipv4-pool"])),
    (&["-6 addr add fd57:4a7f:e8f::1/128 dev lan0 nodad"], Some(&["fd57:4a7f:e8f::1", "lan0", "--ipv6-pool"])),
    // Static routes: by a gateway, over a link, to nowhere, of any metric; and one that makes the pool the node's own.
    (&["route add 10.87.0.0/16 via 192.0.2.7"], Some(&["10.87.0.0/16", "192.0.2.7", "lan0"])),
    (&["route add 10.87.0.0/16 via 192.0.2.7 metric 500"], Some(&["10.87.0.0/16", "192.0.2.7"])),
    (&["route add 10.87.3.4/32 via 192.0.2.7"], Some(&["10.87.3.4/32", "192.0.2.7"])),
    (&["route add blackhole 10.87.0.0/16"], Some(&["10.87.0.0/16"])),
    (&["route add local 10.87.0.0/16 dev lo"], Some(&["10.87.0.0/16", "local"])),
    (&["-6 route add fd57:4a7f:e8f::/64 dev lan0"], Some(&["fd57:4a7f:e8f::/64", "lan0"])),
    (&["-6 route add fd57:4a7f:e8f::/64 via 2001:db8::7"], Some(&["fd57:4a7f:e8f::/64", "2001:db8::7"])),
    (&["-6 route add unreachable fd57:4a7f:e8f::/64"], Some(&["fd57:4a7f:e8f::/64"])),
    // Another table that a rule asks first.
    (&["route add 10.87.0.0/16 dev lan0 table 52", "rule add pref 100 lookup 52"], Some(&["10.87.0.0/16", "lan0"])),
    // No conflict: what only leads past the pool to a gateway, and what is beside it.
    (&["route add default via 192.0.2.7"], None),
    (&["route add 10.0.0.0/8 via 192.0.2.7"], None),
    (&["route add blackhole 10.0.0.0/8"], None),
    (&["-6 route add default via 2001:db8::7"], None),
    (&["-6 route add fd00::/8 via 2001:db8::7"], None),
    (&["addr add 10.88.0.1/16 dev lan0"], None),
];

/// Everything of the node's that the agent must leave as it is.
fn networks(node: &Node) -> Result<String> {
    let mut all = String::new();
    for what in ["-4 route show table all", "-6 route show table all", "-o addr show", "rule show", "-6 rule show"] {
        all.push_str(&ip(node.space(), what)?);
    }
    // Lifetimes tick.
    Ok(all.lines().map(|l| l.split(" expires ").next().unwrap_or(l).trim_end()).collect::<Vec<_>>().join("\n"))
}

/// Without what is the agent's own, and what the kernel adds on a node that forwards IPv6: each network's subnet-router
/// anycast address (RFC 4291, 2.6.1).
fn others(node: &Node) -> Result<String> {
    let ours = |l: &&str| !l.contains("proto 87") && !l.contains("wharf0") && !l.starts_with("anycast ");
    Ok(networks(node)?.lines().filter(ours).collect::<Vec<_>>().join("\n"))
}

fn with_lan() -> Result<Node> {
    let node = Node::without_agent(NodeConfig::default())?;
    for command in [
        "link set lo up",
        "link add lan0 type veth peer name lan1",
        // No address comes by itself and when it will.
        "link set lan0 addrgenmode none",
        "link set lan1 addrgenmode none",
        "link set lan0 up",
        "link set lan1 up",
        "addr add 192.0.2.1/24 dev lan0",
        "-6 addr add 2001:db8::1/64 dev lan0 nodad",
    ] {
        ip(node.space(), command)?;
    }
    Ok(node)
}

/// The kernel puts in the local route of an IPv6 address a moment after the address.
fn settled(node: &Node) -> Result<String> {
    wait::until("each address has its local route", || {
        let addresses = ip(node.space(), "-6 -o addr show")?.lines().count();
        let routes = ip(node.space(), "-6 route show table local type local")?.lines().count();
        Ok((addresses == routes).then_some(()))
    })?;
    networks(node)
}

#[test]
fn each_kind_of_overlap_is_refused_at_start_and_nothing_of_the_node_changes() -> Result<()> {
    for (commands, refused) in KINDS {
        let mut node = with_lan()?;
        for command in *commands {
            ip(node.space(), command)?;
        }
        let before = settled(&node)?;
        match refused {
            Some(words) => {
                let finished = node.run_agent_to_end(&[])?;
                let told = finished.describe();
                ensure!(finished.code() > 0, "{commands:?} was not refused: {told}");
                let missing: Vec<_> = words.iter().filter(|w| !finished.stderr.contains(**w)).collect();
                ensure!(missing.is_empty(), "{commands:?}: the refusal lacks {missing:?}: {told}");
                ensure!(!node.dirs().bpffs.join("wharf").exists(), "{commands:?}: something was pinned");
                ensure!(networks(&node)? == before, "{commands:?} changed:\n{before}\n---\n{}", networks(&node)?);
            }
            None => {
                node.start_agent().with_context(|| format!("{commands:?} is no conflict"))?;
                ensure!(node.audit()?.findings.is_empty(), "{commands:?}: {:?}", node.audit()?.findings);
                node.stop_agent()?;
                ensure!(others(&node)? == before, "{commands:?} changed:\n{before}\n---\n{}", others(&node)?);
            }
        }
    }
    Ok(())
}

#[test]
fn what_a_version_before_left_is_ours_and_not_an_overlap() -> Result<()> {
    let mut node = with_lan()?;
    // As it made them: of the lowest metric.
    ip(node.space(), "route add unreachable 10.87.0.0/16 proto 87")?;
    ip(node.space(), "-6 route add unreachable fd57:4a7f:e8f::/64 proto 87")?;
    node.start_agent()?;
    for family in ["-4", "-6"] {
        let ours = ip(node.space(), &format!("{family} route show proto 87"))?;
        ensure!(ours.lines().count() == 1 && ours.contains("metric"), "made way for one of the last metric: {ours}");
    }
    node.stop_agent()?;
    node.start_agent()?;
    ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
    node.stop_agent()
}

#[test]
fn an_address_that_the_node_has_is_given_to_no_container() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for command in ["link add lan0 type veth peer name lan1", "link set lan0 up", "link set lan1 up"] {
            ip(node.space(), command)?;
        }
        let first = node.sandbox("first")?;
        let before = node.attach(&first)?;
        // 10.87.0.2 is given out; the next three are the node's, or of its LAN.
        for command in [
            "addr add 10.87.0.3/32 dev lan0",
            "addr add 10.87.0.5/31 dev lan0",
            "-6 addr add fd57:4a7f:e8f::3/128 dev lan0 nodad",
        ] {
            ip(node.space(), command)?;
        }
        for wanted in ["10.87.0.3", "10.87.0.4", "fd57:4a7f:e8f::3"] {
            let sandbox = node.sandbox(&format!("asks-{}", wanted.replace([':', '.'], "-")))?;
            let answer = node
                .cni("ADD")
                .of(sandbox.name(), sandbox.path(), "eth0")
                .env("CNI_ARGS", &format!("IP={wanted}"))
                .conf(&node.netconf())
                .run()?;
            let told = format!("{:?}", answer.failure()?);
            ensure!(told.contains(wanted) && told.contains("lan0"), "{wanted}: {told}");
            ensure!(sandbox.space()?.links()? == ["lo"], "{wanted}: something was left");
        }
        let second = node.sandbox("second")?;
        let after = node.attach(&second)?;
        ensure!(after.v4()? == "10.87.0.6".parse::<std::net::Ipv4Addr>()?, "{:?}", after.v4()?);
        ensure!(after.v6()? != "fd57:4a7f:e8f::3".parse::<std::net::Ipv6Addr>()?, "{:?}", after.v6()?);
        let status = node.wharf(&["status"])?;
        ensure!(status.code() == 1, "{}", status.describe());
        for part in ["10.87.0.0/16", "lan0"] {
            ensure!(status.stdout.contains(part), "status does not tell of {part}:\n{}", status.stdout);
        }
        // An agent that starts while containers live in the pool serves them on.
        node.stop_agent()?;
        node.start_agent()?;
        ensure!(node.log().contains("overlaps the node's address 10.87.0.3 on lan0"), "the log does not tell of it");
        for (sandbox, attached) in [(first, before), (second, after)] {
            wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
            node.detach(&attached)?;
        }
        node.stop_agent()?;
        let refused = node.run_agent_to_end(&[])?;
        ensure!(refused.code() > 0 && refused.stderr.contains("lan0"), "no container lives: {}", refused.describe());
        ip(node.space(), "link del lan0")?;
        node.start_agent()
    })
}

#[test]
fn a_network_that_comes_later_keeps_its_routes() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for command in ["link add lan0 type veth peer name lan1", "link set lan0 up", "link set lan1 up"] {
            ip(node.space(), command)?;
        }
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        ip(node.space(), "addr add 10.87.200.1/16 dev lan0")?;
        ip(node.space(), "-6 addr add fd57:4a7f:e8f::c8/64 dev lan0 nodad")?;
        let told = node.audit()?.findings;
        for pool in ["pool 10.87.0.0/16", "pool fd57:4a7f:e8f::/64"] {
            let finding = told.iter().find(|f| f.subject == pool && f.remedy.contains("dev lan0"));
            ensure!(finding.is_some_and(|f| f.problem.contains("dev lan0") && !f.repairable), "{pool}: {told:?}");
        }
        let audit = node.wharf(&["audit"])?;
        ensure!(audit.code() == 1, "{}", audit.describe());
        let status = node.wharf(&["status"])?;
        ensure!(status.code() == 1 && status.stdout.contains("lan0"), "{}", status.describe());
        for to in ["10.87.200.2", "fd57:4a7f:e8f::c9"] {
            let leads = || ip(node.space(), &format!("route get {to}"));
            wait::until(&format!("{to} is on the LAN"), || Ok(leads()?.contains("dev lan0").then_some(())))?;
            // Also after the node's part was put in place again.
            node.wharf(&["audit", "--repair"])?;
            ensure!(leads()?.contains("dev lan0"), "{to}: {}", leads()?);
        }
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        node.detach(&attached)?;
        ip(node.space(), "link del lan0")?;
        let told = node.audit()?.findings;
        ensure!(told.is_empty(), "the network is gone: {told:?}");
        Ok(())
    })
}

#[test]
fn a_rule_or_a_route_that_comes_before_the_route_to_a_container_is_told() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for command in ["link add lan0 type veth peer name lan1", "link set lan0 up", "link set lan1 up"] {
            ip(node.space(), command)?;
        }
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        let (v4, v6) = (attached.v4()?.to_string(), attached.v6()?.to_string());
        let id = node.endpoint(&attached)?.id.to_string();
        // What somebody adds, what takes it away again, and what the finding says.
        let rule = |family: &str, to: &str, route: &str, says: &'static str| {
            let add = [
                format!("{family} route add {route} table 77"),
                format!("{family} rule add pref 100 to {to} lookup 77"),
            ];
            let remove = [format!("{family} rule del pref 100"), format!("{family} route flush table 77")];
            (to.to_owned(), add.to_vec(), remove.to_vec(), says)
        };
        let better = |add: String, remove: String, to: &str| (to.to_owned(), vec![add], vec![remove], "table 254");
        for (address, add, remove, says) in [
            rule("-4", &v4, "default dev lan0", "0.0.0.0/0 in table 77 first"),
            rule("-6", &v6, "default dev lan0", "::/0 in table 77 first"),
            rule("-4", &v4, "unreachable default", "refused"),
            rule("-6", &v6, "unreachable default", "refused"),
            better(format!("route prepend {v4}/32 dev lan0"), format!("route del {v4}/32 dev lan0"), &v4),
            better(format!("-6 route add {v6} dev lan0 metric 1"), format!("-6 route del {v6} dev lan0"), &v6),
        ] {
            for command in &add {
                ip(node.space(), command)?;
            }
            let told = node.audit()?.findings;
            let finding = told.iter().find(|f| f.object == "route" && f.subject.starts_with(&address));
            let finding = finding.with_context(|| format!("{add:?}: {told:?}"))?;
            ensure!(finding.problem.contains("look-up") && finding.problem.contains(says), "{add:?}: {finding:?}");
            ensure!(finding.remedy.contains("rule`") && !finding.repairable, "{add:?}: {finding:?}");
            ensure!(told.len() == 1, "{add:?} is told once: {told:?}");
            let health = node.wharf(&["endpoint", "health", &id])?;
            ensure!(health.code() != 0, "{add:?}: {}", health.describe());
            for command in &remove {
                ip(node.space(), command)?;
            }
            ensure!(node.audit()?.findings.is_empty(), "{remove:?}: {:?}", node.audit()?.findings);
        }
        node.detach(&attached)?;
        ip(node.space(), "link del lan0").map(drop)
    })
}

#[test]
fn a_container_that_takes_its_side_down_is_no_shadow_where_routes_without_carrier_are_ignored() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        node.space()
            .run(|| {
                ["ipv4", "ipv6"].iter().try_for_each(|family| {
                    ["all", "default"].iter().try_for_each(|of| {
                        std::fs::write(format!("/proc/sys/net/{family}/conf/{of}/ignore_routes_with_linkdown"), "1")
                    })
                })
            })?
            .context("ignore routes without carrier")?;
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        ip(sandbox.space()?, "link set eth0 down")?;
        let get = format!("route get {}", attached.v4()?);
        wait::until("a look-up ignores the route", || Ok(ip(node.space(), &get).is_err().then_some(())))?;
        let told = node.audit()?.findings;
        ensure!(!told.is_empty() && told.iter().all(|f| !f.problem.contains("look-up")), "{told:?}");
        node.detach(&attached)
    })
}

#[test]
fn where_ipv6_is_off_the_default_agent_runs_with_ipv4_alone() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let off = |value: &'static str| {
        node.space().run(move || {
            ["all", "default"]
                .iter()
                .try_for_each(|of| std::fs::write(format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6"), value))
        })
    };
    off("1")?.context("turn IPv6 off")?;
    let refused = node.run_agent_to_end(&["--ipv6-pool", "fd01::/64"])?;
    ensure!(refused.code() > 0, "{}", refused.describe());
    for part in ["ipv6-pool", "fd01::/64", "disable_ipv6", "--ipv6-pool="] {
        ensure!(refused.stderr.contains(part), "the refusal lacks {part}: {}", refused.describe());
    }
    ensure!(node.space().links()? == ["lo"] && !node.dirs().bpffs.join("wharf").exists(), "something was made");
    node.start_agent()?;
    ensure!(node.log().contains("IPv6 is off on this node"), "the log does not tell of it");
    let status = node.wharf(&["status"])?;
    ensure!(status.code() == 0 && status.stdout.contains("IPv4 alone"), "{}", status.describe());
    let sandbox = node.sandbox("a")?;
    let attached = node.attach(&sandbox)?;
    ensure!(attached.addresses().len() == 1, "{attached:?}");
    wharf_tests::icmp::ping(sandbox.space()?, "10.87.0.1".parse()?)?.must_answer()?;
    node.detach(&attached)?;
    node.finish()?;
    // A family is turned off by a flag too, and then nothing is amiss.
    let mut command = node.command(wharf_tests::process::bin("wharf-agent")?)?;
    command.args(["--ipv6-pool=", "--ipv4-pool="]).args(node.dirs().flags());
    let none = run(command, b"", Duration::from_secs(10))?;
    ensure!(none.code() > 0 && none.stderr.contains("no CIDR"), "{}", none.describe());
    Ok(())
}

#[test]
fn leases_that_smaller_pools_leave_outside_are_listed_until_they_are_given_back() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let conf = node.netconf();
        let call = node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").env("CNI_ARGS", "IP=10.87.200.9");
        call.conf(&conf).run()?.result()?;
        let leased = node.http("POST", "/v1/ipam/10.87.200.10?owner=me", None)?;
        ensure!(leased.status == 201, "{leased:?}");
        node.stop_agent()?;
        node.set_flag("--ipv4-pool=10.87.0.0/24", true);
        node.start_agent()?;
        let listed = || -> Result<Vec<String>> {
            let leases = node.ask(async |client| client.ipam().await)?.leases;
            Ok(leases.into_iter().filter(|l| l.owner != "node").map(|l| l.ip.to_string()).collect())
        };
        ensure!(listed()? == ["10.87.200.9", "10.87.200.10", "fd57:4a7f:e8f::2"], "{:?}", listed()?);
        let status = node.wharf(&["status"])?;
        ensure!(status.stdout.contains("2 leased addresses are in no pool"), "{}", status.stdout);
        let audit = node.wharf(&["audit"])?;
        let told =
            ["10.87.200.9", "10.87.200.10", "no pool has it today", "wharf ipam release 10.87.200.10", "recreate"];
        ensure!(audit.code() == 1 && told.iter().all(|part| audit.stdout.contains(part)), "{}", audit.describe());
        wharf_tests::icmp::ping(sandbox.space()?, "10.87.0.1".parse()?)?.must_answer()?;
        node.wharf(&["ipam", "release", "10.87.200.10"])?.ok()?;
        node.cni("DEL").of(sandbox.name(), sandbox.path(), "eth0").conf(&conf).run()?.silent()?;
        ensure!(listed()?.is_empty(), "{:?}", listed()?);
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        Ok(())
    })
}
