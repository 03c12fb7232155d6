//! What only the real kernel can show: checks at start, real packets, what survives the agent.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    time::{Duration, Instant},
};

use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray};
use ipnet::IpNet;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use support::{
    traffic::{PORT, converse, node_reaches, reaches_node},
    *,
};
use wharf_common::{
    Counter, SourcesRow,
    map::{self, METRICS_MAX},
};
use wharf_core::{
    finding::{EndpointProblem, NodeProblem, Problem, Side},
    ids::{Epoch, IfIndex, IfName},
    kernel::{
        AttachMode, ConfigSpec, ContainerSide, EndpointKernel, FlowKernel, KernelErrorKind, LinkRef, MissingRoute,
        NatKernel, NextHop, NodeKernel, NodeSpec, OverlayNode, OverlaySpec, PeerRoute,
    },
    overlap::Way,
    selfcheck,
};
use wharf_datapath::{
    LinuxKernel,
    leftovers::{self, Leftover},
    observe_networks,
};

fn open(bpffs: &Path) -> wharf_core::kernel::Result<LinuxKernel> {
    support::open(bpffs, &bpffs.with_extension("run"), None)
}

fn refused(bpffs: &Path) -> wharf_core::kernel::KernelError {
    match open(bpffs) {
        Ok(_) => panic!("opening {} should have been refused", bpffs.display()),
        Err(e) => e,
    }
}

#[test]
fn a_directory_that_is_no_bpffs_is_refused_and_nothing_is_made_in_it() {
    in_namespaces(|dir| {
        let plain = dir.join("plain");
        fs::create_dir(&plain).expect("directory");
        let e = refused(&plain);
        assert_eq!(e.kind, KernelErrorKind::NotFound, "{e}");
        assert!(e.to_string().contains("mount -t bpf"), "{e}");
        assert_eq!(fs::read_dir(&plain).expect("list").count(), 0);
        let e = refused(&dir.join("missing"));
        assert_eq!(e.kind, KernelErrorKind::NotFound, "{e}");
    });
}

#[test]
fn a_pinned_map_of_another_layout_is_refused_and_left_alone() {
    in_namespaces(|dir| {
        let bpffs = dir.join("bpf");
        drop(open(&bpffs).expect("first open"));
        let endpoints = pins_on(&bpffs).join("shared/ENDPOINTS");
        fs::remove_file(&endpoints).expect("unpin");
        let other = Array::<MapData, u32>::create(7, 0).expect("map");
        other.pin(&endpoints).expect("pin");
        let e = refused(&bpffs);
        assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
        for part in ["array", "value 4 bytes", "7 entries", "hash", "value 32 bytes"] {
            assert!(e.to_string().contains(part), "{part} is missing in: {e}");
        }
        assert!(endpoints.exists());
    });
}

#[test]
fn shared_maps_and_endpoints_outlive_the_agent() {
    in_linux_world(None, |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let bpffs = w.bpffs();
        let LinuxWorld { dir: _dir, kernel } = w;
        drop(kernel);
        let again = open(&bpffs).expect("open again");
        assert_eq!(again.observe_endpoint(&a).await.expect("observe"), [], "as the first agent left it");
        delete(&again, &a).await;
        assert_no_endpoints(&again).await;
        again.remove_node().await.expect("node gone");
        assert!(!bpffs.join("wharf").exists(), "nothing of ours is left in the bpffs");
    });
}

#[test]
fn routes_to_other_nodes_are_made_replaced_and_removed_and_no_others() {
    in_linux_world(None, |w| async move {
        // All of it: its directory has the bpffs.
        let world = w;
        let k = &world.kernel;
        for command in [
            "link add up0 type veth peer name up1",
            "link set up1 up",
            "link set up0 up",
            "addr add 192.0.2.1/24 dev up0",
            "addr add 2001:db8::1/64 dev up0 nodad",
            "route add 10.9.0.0/24 via 192.0.2.9",
            "route add 10.8.0.0/24 via 192.0.2.9 proto 88",
            "route add unreachable 10.7.0.0/24 proto 88 metric 7",
        ] {
            run("ip", &command.split(' ').collect::<Vec<_>>());
        }
        let direct = |via: &str| NextHop::Direct(via.parse().unwrap());
        let peer = |to: &str, via: &str| PeerRoute { to: to.parse().unwrap(), via: direct(via) };
        let routes = || {
            let all = run("ip", &["-4", "route", "show"]) + &run("ip", &["-6", "route", "show", "proto", "88"]);
            let ours = all.lines().filter(|line| line.contains("metric 2003304447") || line.contains("192.0.2.9"));
            ours.map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        let theirs = ["10.8.0.0/24 via 192.0.2.9", "10.9.0.0/24 via 192.0.2.9"];
        let unreachable = || {
            let all = run("ip", &["-4", "route", "show", "proto", "88"])
                + &run("ip", &["-6", "route", "show", "proto", "88"]);
            let all = all.lines().filter_map(|line| line.strip_prefix("unreachable ")?.split(' ').next());
            all.map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
        };
        let of_others = "10.7.0.0/24";
        let with = |peers: Vec<PeerRoute>| NodeSpec { peers, ..node_spec() };
        let both = with(vec![peer("10.2.0.0/16", "192.0.2.2"), peer("fd02::/64", "2001:db8::2")]);
        let amiss = async |spec: &NodeSpec| {
            let problems = k.observe_node(spec).await.expect("observe");
            let route = |p| match p {
                NodeProblem::PeerRoute { to, .. } => Some(to.to_string()),
                NodeProblem::PeerUnreachable { to, .. } => Some(format!("behind {to}")),
                _ => None,
            };
            problems.into_iter().filter_map(route).collect::<Vec<_>>()
        };
        k.ensure_node(&node_spec()).await.expect("node");
        assert_eq!(amiss(&both).await, ["10.2.0.0/16", "behind 10.2.0.0/16", "fd02::/64", "behind fd02::/64"]);
        k.ensure_node(&both).await.expect("routes");
        assert_eq!(amiss(&both).await, [""; 0]);
        assert_eq!(routes().len(), 4, "{:?}", routes());
        assert_eq!(unreachable(), ["10.2.0.0/16", of_others, "fd02::/64"]);
        run("ip", &["-6", "route", "del", "unreachable", "fd02::/64", "metric", "2003304449"]);
        assert_eq!(amiss(&both).await, ["behind fd02::/64"]);
        k.ensure_node(&both).await.expect("routes");
        assert_eq!(amiss(&both).await, [""; 0]);
        // Another next hop; a network whose hosts are behind a link that is down, which is no error.
        let moved = with(vec![peer("10.2.0.0/16", "192.0.2.3"), peer("10.3.0.0/16", "203.0.113.1")]);
        let missing = k.ensure_node(&moved).await.expect("routes");
        assert_eq!(missing.iter().map(|route| route.to.to_string()).collect::<Vec<_>>(), ["10.3.0.0/16"]);
        assert!(missing[0].why.contains("unreachable"), "{missing:?}");
        assert_eq!(routes(), [&["10.2.0.0/16 via 192.0.2.3"], &theirs[..]].concat());
        assert_eq!(amiss(&moved).await, ["10.3.0.0/16"]);
        assert_eq!(unreachable(), ["10.2.0.0/16", "10.3.0.0/16", of_others]);
        let left = ["10.2.0.0/16", "behind 10.2.0.0/16", "behind 10.3.0.0/16"];
        assert_eq!(amiss(&node_spec()).await, left, "leftovers");
        k.ensure_node(&node_spec()).await.expect("no routes");
        assert_eq!((routes(), unreachable()), (theirs.map(str::to_owned).to_vec(), vec![of_others.to_owned()]));
        k.ensure_node(&both).await.expect("routes");
        k.remove_node().await.expect("node gone");
        assert_eq!((routes(), unreachable()), (theirs.map(str::to_owned).to_vec(), vec![of_others.to_owned()]));
    });
}

/// Destinations and nodes.
fn overlay_spec(port: u16, peers: &[(&str, &str)]) -> NodeSpec {
    let hop = |remote: &str| NextHop::Overlay { remote: remote.parse().unwrap(), local: None };
    let nodes = peers.iter().enumerate().map(|(n, (to, remote))| OverlayNode {
        name: format!("n{n}"),
        addresses: vec![remote.parse().unwrap()],
        cidrs: vec![to.parse().unwrap()],
    });
    let overlay = OverlaySpec { vni: 7, port, mtu: 1450, nodes: nodes.collect() };
    let peers = peers.iter().map(|(to, remote)| PeerRoute { to: to.parse().unwrap(), via: hop(remote) });
    NodeSpec { peers: peers.collect(), overlay: Some(overlay), ..node_spec() }
}

#[test]
fn the_overlay_is_made_kept_changed_and_removed() {
    in_linux_world(None, |w| async move {
        // All of it: its directory has the bpffs.
        let world = w;
        let k = &world.kernel;
        for command in ["link set lo up", "addr add 192.0.2.1/32 dev lo", "route add default dev lo"] {
            run("ip", &command.split(' ').collect::<Vec<_>>());
        }
        let amiss = async |spec: &NodeSpec| {
            let problems = k.observe_node(spec).await.expect("observe");
            problems.into_iter().map(|p| Problem::Node(p).to_string()).collect::<Vec<_>>()
        };
        let device = || run("ip", &["-d", "link", "show", "vxlan-wharf"]);
        let routes =
            || run("ip", &["-4", "route", "show", "proto", "88"]) + &run("ip", &["-6", "route", "show", "proto", "88"]);
        let far = [("10.2.0.0/16", "198.51.100.2"), ("fd02::/64", "2001:db8:9::2"), ("10.3.0.0/16", "2001:db8:9::3")];
        let spec = overlay_spec(4789, &far);
        k.ensure_node(&spec).await.expect("overlay");
        assert_eq!(amiss(&spec).await, [""; 0]);
        let is = device();
        assert!(
            is.contains("external") && is.contains("dstport 4789") && is.contains("mtu 1450") && is.contains("NOARP"),
            "{is}"
        );
        assert!(run("tc", &["filter", "show", "dev", "vxlan-wharf", "ingress"]).contains("wharf/from_overlay"));
        let is = routes();
        for part in [
            "10.2.0.0/16  encap ip id 7 src 0.0.0.0 dst 198.51.100.2",
            "fd02::/64  encap ip6 id 7 src :: dst 2001:db8:9::2",
            "mtu 1450",
        ] {
            assert!(is.contains(part), "{part} in {is}");
        }
        assert!(is.contains(&format!("src {ROUTER4}")) && is.contains(&format!("src {ROUTER6}")), "{is}");
        // Nothing changes what is right.
        k.ensure_node(&spec).await.expect("again");
        assert_eq!(routes(), is);
        // Another way to a node, then none; the others stay.
        let [first, second, third] = far;
        let moved = overlay_spec(4789, &[(first.0, "198.51.100.9"), second, third]);
        assert_eq!(amiss(&moved).await.len(), 2, "a route and the filter");
        k.ensure_node(&moved).await.expect("moved");
        assert_eq!(amiss(&moved).await, [""; 0]);
        assert!(routes().contains("dst 198.51.100.9") && !routes().contains("dst 198.51.100.2"), "{}", routes());
        let fewer = overlay_spec(4789, &[second, third]);
        k.ensure_node(&fewer).await.expect("fewer");
        assert_eq!(amiss(&fewer).await, [""; 0]);
        // What others change is found, and mended.
        for (command, told) in [
            ("ip link set vxlan-wharf down", "vxlan-wharf is down"),
            ("ip link set vxlan-wharf mtu 1400", "expected 1450, found 1400"),
            ("tc filter del dev vxlan-wharf ingress", "its filter is not attached"),
            ("ip link del vxlan-wharf", "it is not there"),
            ("ip -4 route flush proto 88", "is not there"),
        ] {
            let words: Vec<&str> = command.split(' ').collect();
            run(words[0], &words[1..]);
            let problems = amiss(&fewer).await;
            assert!(problems.iter().any(|problem| problem.contains(told)), "{command}: {problems:?}");
            k.ensure_node(&fewer).await.expect(command);
            assert_eq!(amiss(&fewer).await, [""; 0], "{command}");
        }
        // Under another name it keeps its port: up, which kernels before 6.2 do not rename, and down.
        for (is_down, taken) in [(false, false), (true, false), (true, true)] {
            if is_down {
                run("ip", &["link", "set", "vxlan-wharf", "down"]);
            }
            let renamed =
                std::process::Command::new("ip").args(["link", "set", "vxlan-wharf", "name", "other"]).output();
            if !renamed.expect("ip").status.success() {
                assert!(!is_down, "an interface that is down is not renamed");
                continue;
            }
            run("ip", &["link", "set", "other", "up"]);
            if taken {
                run("ip", &["link", "add", "vxlan-wharf", "type", "bridge"]);
                k.ensure_node(&fewer).await.expect("the rest of the node");
                let problems = amiss(&fewer).await;
                assert!(problems.iter().any(|p| p.contains("is not Wharf's")), "{problems:?}");
                run("ip", &["link", "del", "vxlan-wharf"]);
            }
            let problems = amiss(&fewer).await;
            assert!(problems.iter().any(|p| p.contains("was renamed to other")), "{problems:?}");
            k.ensure_node(&fewer).await.expect("renamed");
            assert_eq!(amiss(&fewer).await, [""; 0]);
            assert!(device().contains("dstport 4789") && !run("ip", &["link", "show"]).contains("other"));
        }
        for router in [format!("{ROUTER4}/32"), format!("{ROUTER6}/128")] {
            run("ip", &["addr", "del", &router, "dev", "vxlan-wharf"]);
            let problems = amiss(&fewer).await;
            assert!(problems.iter().any(|p| p.contains("expected on vxlan-wharf, is not there")), "{problems:?}");
            k.ensure_node(&fewer).await.expect("addresses");
            assert_eq!(amiss(&fewer).await, [""; 0], "{router}");
        }
        // They are no other program's addresses: the router's interface may be made again.
        run("ip", &["link", "del", "wharf0"]);
        k.ensure_node(&fewer).await.expect("router");
        let seen = observe_networks(&[format!("{ROUTER4}/32").parse().unwrap()]).expect("networks");
        assert!(seen.foreign.iter().all(|network| network.way != Way::Address), "{:?}", seen.foreign);
        // Without IPv6 on the interface, everything else on the node works.
        fs::write("/proc/sys/net/ipv6/conf/vxlan-wharf/disable_ipv6", "1").expect("disable IPv6");
        k.ensure_node(&fewer).await.expect("the rest of the node");
        assert!(!amiss(&fewer).await.is_empty(), "no IPv6 by the overlay");
        fs::write("/proc/sys/net/ipv6/conf/vxlan-wharf/disable_ipv6", "0").expect("enable IPv6");
        k.ensure_node(&fewer).await.expect("IPv6");
        assert_eq!(amiss(&fewer).await, [""; 0]);
        // A port is a property of the interface.
        let elsewhere = overlay_spec(4790, &[second, third]);
        k.ensure_node(&elsewhere).await.expect("another port");
        assert!(device().contains("dstport 4790"), "{}", device());
        assert_eq!(amiss(&elsewhere).await, [""; 0]);
        // Without routes that use it, it goes, also under another name.
        run("ip", &["link", "set", "vxlan-wharf", "down"]);
        run("ip", &["link", "set", "vxlan-wharf", "name", "other"]);
        assert!(amiss(&node_spec()).await.iter().any(|problem| problem.contains("but other is there")));
        k.ensure_node(&node_spec()).await.expect("no overlay");
        assert!(!run("ip", &["link", "show"]).contains("other"));
        k.ensure_node(&elsewhere).await.expect("the overlay again");
        assert_eq!(amiss(&elsewhere).await, [""; 0]);
        assert_eq!(amiss(&node_spec()).await.len(), 5, "the interface, and two routes for each node");
        k.ensure_node(&node_spec()).await.expect("no overlay");
        assert_eq!((amiss(&node_spec()).await, routes()), (Vec::new(), String::new()));
        assert!(!run("ip", &["link", "show"]).contains("vxlan-wharf"));
        // An interface of others stays, and costs the overlay alone.
        run("ip", &["link", "add", "vxlan-wharf", "type", "bridge"]);
        assert_eq!(amiss(&node_spec()).await, [""; 0], "nobody needs the name");
        k.ensure_node(&spec).await.expect("the rest of the node");
        let problems = amiss(&spec).await;
        assert!(problems.iter().any(|p| p.contains("vxlan-wharf")) && problems.len() == 4, "{problems:?}");
        k.ensure_node(&node_spec()).await.expect("no overlay");
        assert!(run("ip", &["-d", "link", "show", "vxlan-wharf"]).contains("bridge"));
        run("ip", &["link", "del", "vxlan-wharf"]);
        // A port that another interface has.
        run("ip", &["link", "add", "theirs", "type", "vxlan", "id", "9", "dstport", "4789"]);
        run("ip", &["link", "set", "theirs", "up"]);
        let missing = k.ensure_node(&spec).await.expect("the rest of the node");
        let is_of_port = |route: &MissingRoute| route.why.contains("UDP port 4789 is in use");
        assert!(missing.len() == 3 && missing.iter().all(is_of_port), "{missing:?}");
        let problems = amiss(&spec).await;
        assert!(problems.iter().any(|p| p.contains("UDP port 4789 is in use")), "{problems:?}");
        run("ip", &["link", "del", "theirs"]);
        assert_eq!(k.ensure_node(&spec).await.expect("now it is free"), []);
        assert_eq!(amiss(&spec).await, [""; 0]);
        k.remove_node().await.expect("node gone");
        assert!(!run("ip", &["link", "show"]).contains("vxlan-wharf"));
        assert_eq!(routes(), "");
    });
}

fn packets_flow_everywhere(mode: AttachMode) {
    in_linux_world(Some(mode), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        let (in_a, in_b) = (a.netns.path.as_path(), b.netns.path.as_path());
        for (of_a, of_b, router) in [
            (IpAddr::V4(a.ipv4.unwrap()), IpAddr::V4(b.ipv4.unwrap()), IpAddr::V4(ROUTER4)),
            (IpAddr::V6(a.ipv6.unwrap()), IpAddr::V6(b.ipv6.unwrap()), IpAddr::V6(ROUTER6)),
        ] {
            assert_eq!(converse(Some(in_a), Some(in_b), of_b), of_a, "endpoint to endpoint");
            assert_eq!(converse(Some(in_a), None, router), of_a, "endpoint to node");
            assert_eq!(converse(None, Some(in_a), of_a), router, "node to endpoint");
        }
        let counters = w.kernel.observe_counters(a.id).await.expect("counters");
        let count = |direction: &str, reason: &str| {
            counters.iter().find(|c| c.direction == direction && c.reason == reason).map_or(0, |c| c.packets)
        };
        assert!(count("egress", "forwarded-local") > 0, "{counters:?}");
        assert!(count("ingress", "forwarded-local") > 0, "{counters:?}");
        assert!(count("egress", "forwarded-stack") > 0, "{counters:?}");
        delete(&w.kernel, &a).await;
        delete(&w.kernel, &b).await;
        assert_no_endpoints(&w.kernel).await;
    });
}

#[test]
fn packets_flow_everywhere_with_tcx() {
    packets_flow_everywhere(AttachMode::Tcx);
}

#[test]
fn packets_flow_everywhere_with_clsact() {
    packets_flow_everywhere(AttachMode::Clsact);
}

/// Rules of ours in a container, both families.
fn rules(netns: &Path) -> String {
    LinuxWorld::inside(netns, || {
        ["-4", "-6"].map(|family| run("ip", &[family, "rule", "show", "pref", "30000"])).concat()
    })
}

#[test]
fn a_container_with_two_interfaces_answers_from_both_addresses() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let first = new_endpoint(&w, 1, 10).await;
        let mut second = record(2, 11, &first.netns, "net1");
        create(k, &mut second).await;
        let other = new_endpoint(&w, 3, 12).await;
        let (both, elsewhere) = (first.netns.path.as_path(), other.netns.path.as_path());
        for _ in 0..2 {
            assert_eq!(rules(both).lines().count(), 4, "one for each family and interface: {}", rules(both));
            for inside in [&first, &second] {
                for (address, of_other, router) in [
                    (IpAddr::V4(inside.ipv4.unwrap()), IpAddr::V4(other.ipv4.unwrap()), IpAddr::V4(ROUTER4)),
                    (IpAddr::V6(inside.ipv6.unwrap()), IpAddr::V6(other.ipv6.unwrap()), IpAddr::V6(ROUTER6)),
                ] {
                    assert_eq!(converse(Some(elsewhere), Some(both), address), of_other, "endpoint to {address}");
                    assert_eq!(converse(None, Some(both), address), router, "node to {address}");
                }
                assert_eq!(k.observe_endpoint(inside).await.expect("observe"), []);
            }
            // What an agent does again after its restart changes nothing.
            k.ensure_connected(&first).await.expect("connect again");
            k.ensure_connected(&second).await.expect("connect again");
        }
        let packets = k.observe_counters(second.id).await.expect("counters");
        let out = packets.iter().find(|c| c.direction == "egress" && c.reason == "forwarded-local");
        assert!(out.is_some_and(|c| c.packets > 0), "answers left by the second interface: {packets:?}");
        // A rule or a route that someone removed is told of and mended.
        let address = second.ipv4.unwrap().to_string();
        LinuxWorld::inside(both, move || run("ip", &["rule", "del", "from", &address]));
        let told = k.observe_endpoint(&second).await.expect("observe");
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(matches!(told[0], EndpointProblem::ContainerRule { .. }), "{told:?}");
        let table = (0x7768_0000 + second.container_ifindex.0).to_string();
        LinuxWorld::inside(both, move || run("ip", &["-6", "route", "flush", "table", &table]));
        assert_eq!(k.observe_endpoint(&second).await.expect("observe").len(), 3, "both routes of the table, too");
        k.ensure_connected(&second).await.expect("mended");
        assert_eq!(k.observe_endpoint(&second).await.expect("observe"), []);
        // The rules go with the endpoint, and others' stay.
        LinuxWorld::inside(both, || {
            run("ip", &["rule", "add", "from", "192.0.2.1", "lookup", "main", "pref", "29999"])
        });
        delete(k, &second).await;
        assert_eq!(rules(both).lines().count(), 2, "those of the first stay: {}", rules(both));
        let theirs = LinuxWorld::inside(both, || run("ip", &["rule", "show", "pref", "29999"]));
        assert!(theirs.contains("192.0.2.1"), "{theirs}");
        assert_eq!(k.observe_endpoint(&first).await.expect("observe"), []);
        assert_eq!(converse(Some(elsewhere), Some(both), first.ipv4.unwrap().into()), IpAddr::V4(other.ipv4.unwrap()));
        delete(k, &first).await;
        assert_eq!(rules(both), "");
        delete(k, &other).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn a_second_interface_goes_on_when_the_first_goes() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let first = new_endpoint(&w, 1, 10).await;
        let path = first.netns.path.clone();
        let mut second = record(2, 11, &first.netns, "net1");
        create(k, &mut second).await;
        delete(k, &first).await;
        let (own4, own6) = (IpAddr::V4(second.ipv4.unwrap()), IpAddr::V6(second.ipv6.unwrap()));
        for again in [false, true] {
            assert_eq!(k.observe_endpoint(&second).await.expect("observe"), [], "connected again: {again}");
            assert_eq!(converse(Some(&path), None, ROUTER4.into()), own4);
            assert_eq!(converse(Some(&path), None, ROUTER6.into()), own6);
            assert_eq!(converse(None, Some(&path), own4), IpAddr::V4(ROUTER4));
            k.ensure_connected(&second).await.expect("connect again");
        }
        delete(k, &second).await;
        assert_eq!(rules(&path), "");
        assert_no_endpoints(k).await;
    });
}

fn nothing_passes_between_detach_and_deletion(mode: AttachMode) {
    in_linux_world(Some(mode), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let path = a.netns.path.clone();
        assert!(reaches_node(&path), "before");
        w.kernel.remove_attached(&link_ref(&a)).await.expect("detach");
        assert!(!reaches_node(&path), "after detach");
        w.kernel.remove_reachable(&a).await.expect("unreachable");
        w.kernel.remove_programs(a.id).await.expect("programs");
        assert!(!reaches_node(&path), "after the programs' pins are gone");
        // A delete that resumes in another agent finds the link and closes it once more.
        w.kernel.remove_attached(&link_ref(&a)).await.expect("detach again");
        assert!(!reaches_node(&path), "after a second detach");
        w.kernel.remove_link(&link_ref(&a)).await.expect("link");
        assert_no_endpoints(&w.kernel).await;
    });
}

#[test]
fn nothing_passes_between_detach_and_deletion_with_tcx() {
    nothing_passes_between_detach_and_deletion(AttachMode::Tcx);
}

#[test]
fn nothing_passes_between_detach_and_deletion_with_clsact() {
    nothing_passes_between_detach_and_deletion(AttachMode::Clsact);
}

#[test]
fn drops_arrive_as_events_and_there_is_one_reader() {
    in_linux_world(None, |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let mut events = w.kernel.events().expect("reader");
        let second = w.kernel.events().err().expect("one reader only");
        assert_eq!(second.kind, KernelErrorKind::Exhausted, "{second}");
        let path = a.netns.path.clone();
        // So that the forged packet need not ask for the gateway's MAC, which would be refused before it.
        assert!(reaches_node(&path), "an honest packet");
        LinuxWorld::inside(&path, || {
            run("ip", &["addr", "add", "10.77.9.9/32", "dev", "eth0"]);
            let forger = UdpSocket::bind("10.77.9.9:0").expect("UDP socket");
            forger.send_to(b"ping", SocketAddr::new(ROUTER4.into(), PORT)).expect("send");
        });
        let reason = wharf_common::DropReason::InvalidSourceIp as u32;
        let forged = async {
            loop {
                let batch = events.next().await.expect("events");
                if let Some(e) = batch.into_iter().find(|e| e.reason == reason) {
                    return e;
                }
            }
        };
        let event = tokio::time::timeout(Duration::from_secs(10), forged).await.expect("the drop is told of");
        assert_eq!((event.endpoint_id, event.epoch, event.identity), (1, 10, 257));
        assert_eq!(event.source[12..], [10, 77, 9, 9]);
        assert_eq!(events.malformed(), 0);
        drop(events);
        w.kernel.events().expect("the turn is free again");
        delete(&w.kernel, &a).await;
    });
}

#[test]
fn the_nodes_own_namespace_is_refused() {
    in_linux_world(None, |w| async move {
        let own = Path::new("/proc/thread-self/ns/net");
        let e = w.kernel.observe_netns(own).await.expect_err("own namespace");
        assert_eq!(e.kind, KernelErrorKind::NotANetns, "{e}");
        assert!(e.to_string().contains("node's own"), "{e}");
        let e = w.kernel.observe_netns(Path::new("/proc/thread-self/ns/mnt")).await.expect_err("mount namespace");
        assert_eq!(e.kind, KernelErrorKind::NotANetns, "{e}");
        let fifo = w.dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).expect("fifo");
        let e = w.kernel.observe_netns(&fifo).await.expect_err("a FIFO does not hang us");
        assert_eq!(e.kind, KernelErrorKind::NotANetns, "{e}");
        let looped = w.dir.path().join("loop");
        std::os::unix::fs::symlink(&looped, &looped).expect("symbolic link");
        for path in [looped, fifo.join("x"), w.dir.path().join("a".repeat(300))] {
            let e = w.kernel.observe_netns(&path).await.expect_err("the path does not resolve");
            assert_eq!(e.kind, KernelErrorKind::NotANetns, "{e}");
        }
    });
}

#[test]
fn ipv6_that_is_off_in_the_container_is_turned_on_for_its_interface() {
    in_linux_world(None, |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let path = w.add_netns("c");
        LinuxWorld::inside(&path, || {
            for which in ["all", "default"] {
                fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1").expect("sysctl");
            }
        });
        let netns = w.kernel.observe_netns(&path).await.expect("netns");
        let mut a = record(1, 10, &netns, "eth0");
        create(&w.kernel, &mut a).await;
        assert_eq!(w.kernel.observe_endpoint(&a).await.expect("observe"), []);
        delete(&w.kernel, &a).await;
    });
}

#[test]
fn foreign_things_are_named_and_never_touched() {
    in_linux_world(None, |w| async move {
        let root = w.pins();
        for path in ["shared/theirs", "theirs"] {
            let map = Array::<MapData, u32>::create(1, 0).expect("map");
            map.pin(root.join(path)).expect("pin");
        }
        fs::create_dir(root.join("endpoints/not-an-id")).expect("directory");
        let dump = w.kernel.dump().await.expect("dump");
        let named: Vec<_> = dump.foreign_pins.iter().map(|p| p.strip_prefix(&root).unwrap().to_owned()).collect();
        assert_eq!(named, ["endpoints/not-an-id", "shared/theirs", "theirs"].map(Path::new));
        // A link that has the name of ours but is no veth is not ours.
        run("ip", &["link", "add", "wharf0", "type", "bridge"]);
        let e = w.kernel.ensure_node(&node_spec()).await.expect_err("a foreign wharf0");
        assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
        run("ip", &["link", "show", "wharf0"]);
        assert!(root.join("shared/theirs").exists());
        MapData::from_pin(root.join("theirs")).expect("theirs is there still");
    });
}

#[test]
fn what_somebody_changed_on_the_host_side_is_named_and_put_back() {
    type IsIt = fn(&EndpointProblem) -> bool;
    let changes: [(&[&str], IsIt); 4] = [
        (&["address", "02:00:00:00:00:99"], |p| matches!(p, EndpointProblem::LinkMac { side: Side::Node, .. })),
        (&["arp", "on"], |p| matches!(p, EndpointProblem::LinkArp { side: Side::Node, .. })),
        (&["mtu", "1400"], |p| matches!(p, EndpointProblem::LinkMtu { side: Side::Node, .. })),
        (&["master", "br-down"], |p| matches!(p, EndpointProblem::LinkEnslaved { .. })),
    ];
    in_linux_world(None, move |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let in_a = a.netns.path.as_path();
        run("ip", &["link", "add", "br-down", "type", "bridge"]);
        let pairs =
            [(IpAddr::V4(a.ipv4.unwrap()), IpAddr::V4(ROUTER4)), (IpAddr::V6(a.ipv6.unwrap()), IpAddr::V6(ROUTER6))];
        for (change, is_it) in changes {
            run("ip", &[&["link", "set", "dev", a.host_ifname.as_str()], change].concat());
            let problems = k.observe_endpoint(&a).await.expect("observe");
            assert!(matches!(problems.as_slice(), [one] if is_it(one)), "{change:?}: {problems:?}");
            if change[0] != "mtu" {
                let both_ways = reaches_node(in_a) && node_reaches(in_a, pairs[0].0);
                assert!(!both_ways, "{change:?}: the fault is none");
            }
            k.ensure_connected(&a).await.expect("put back");
            assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "{change:?}");
            for (of_a, router) in pairs {
                assert_eq!(converse(Some(in_a), None, router), of_a, "{change:?}: endpoint to node");
                assert_eq!(converse(None, Some(in_a), of_a), router, "{change:?}: node to endpoint");
            }
        }
        // The kernel takes the IPv6 routes with the setting.
        fs::write(format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", a.host_ifname), "1").expect("sysctl");
        let problems = k.observe_endpoint(&a).await.expect("observe");
        assert!(matches!(problems.as_slice(), [EndpointProblem::NodeRoute { .. }]), "{problems:?}");
        k.ensure_connected(&a).await.expect("turned on again");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        assert_eq!(converse(None, Some(in_a), pairs[1].0), pairs[1].1, "node to endpoint");
        delete(k, &a).await;
    });
}

#[test]
fn a_route_to_an_address_that_is_not_ours_is_told_of_and_stays() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let endpoint = new_endpoint(&w, 1, 10).await;
        let address = endpoint.ipv4.expect("IPv4").to_string();
        let route = || run("ip", &["route", "show", &address]);
        let ours = route();
        assert!(ours.contains("proto 87"), "{ours}");
        run("ip", &["route", "replace", &address, "dev", "lo", "proto", "static"]);
        let refused = async || {
            let error = k.ensure_connected(&endpoint).await.expect_err("refused");
            assert_eq!(error.kind, KernelErrorKind::Conflict, "{error}");
            assert!(error.to_string().contains(&address), "{error}");
            assert!(route().contains("dev lo proto static"), "{}", route());
        };
        refused().await;
        // The programs bring no packets to this address to an endpoint that is not connected.
        k.remove_reachable(&endpoint).await.expect("unreachable");
        refused().await;
        assert_eq!(k.dump().await.expect("dump").endpoint_rows, []);
        // Out of the way, ours comes back; and in the place of one of ours that is out of date.
        run("ip", &["route", "del", &address]);
        k.ensure_connected(&endpoint).await.expect("put in");
        assert_eq!(route(), ours);
        run("ip", &["route", "replace", &address, "dev", "lo", "proto", "87"]);
        k.ensure_connected(&endpoint).await.expect("replaced");
        assert_eq!(route(), ours);
        delete(k, &endpoint).await;
    });
}

#[test]
fn programs_with_log_records_are_read_by_one_reader() {
    in_linux_world(None, |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let path = w.add_netns("c");
        let netns = w.kernel.observe_netns(&path).await.expect("netns");
        let mut a = record(1, 10, &netns, "eth0");
        create(&w.kernel, &mut a).await;
        let quiet = w.kernel.ensure_programs(&program_spec(&a)).await.expect("programs");
        let e = w.kernel.program_log(quiet.program_ids[2]).await.err().expect("no records in these");
        assert_eq!(e.kind, KernelErrorKind::NotFound, "{e}");
        let mut spec = program_spec(&a);
        spec.debug = true;
        let told = w.kernel.ensure_programs(&spec).await.expect("`cargo xtask build` makes endpoint-debug.o");
        w.kernel.ensure_attached(&link_ref(&a)).await.expect("attached");
        let mut log = w.kernel.program_log(told.program_ids[2]).await.expect("log");
        let e = w.kernel.program_log(told.program_ids[2]).await.err().expect("one reader only");
        assert_eq!(e.kind, KernelErrorKind::Exhausted, "{e}");
        assert!(reaches_node(&path), "a packet to tell of");
        tokio::time::timeout(Duration::from_secs(10), log.next()).await.expect("a record").expect("read");
        delete(&w.kernel, &a).await;
    });
}

/// Every row of an endpoint's counters as it stands in the map.
fn rows_of(metrics: &Path) -> Vec<Vec<(u64, u64)>> {
    let map = Map::PerCpuArray(MapData::from_pin(metrics).expect("map"));
    let rows: PerCpuArray<_, Counter> = map.try_into().expect("rows");
    let row = |index| rows.get(&index, 0).expect("row").iter().map(|c| (c.packets, c.bytes)).collect();
    (0..METRICS_MAX).map(row).collect()
}

/// Nothing but the self-check's packets passes here: the links are down.
#[test]
fn test_packets_leave_no_trace_in_pinned_maps() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let (a, b) = (new_endpoint(&w, 1, 10).await, new_endpoint(&w, 2, 11).await);
        for r in [&a, &b] {
            run("ip", &["link", "set", r.host_ifname.as_str(), "down"]);
            k.ensure_config(r.id, &ConfigSpec { trace: true, ..config_spec(r) }).await.expect("config");
        }
        let mut events = k.events().expect("reader");
        let early = tokio::time::timeout(Duration::from_millis(200), async {
            loop {
                events.next().await.expect("events");
            }
        });
        early.await.expect_err("only events of what the links' ends said while they were up");
        let rows = || [1, 2].map(|id| rows_of(&w.pins().join(format!("endpoints/{id}/METRICS"))));
        let before = rows();
        for (r, peer) in [(&a, &b), (&b, &a)] {
            let cases = selfcheck::cases(r, &config_spec(r), Some(peer));
            let results = verdicts(k, r.id, &cases).await.expect("verdicts");
            assert_eq!(results.len(), 14);
            for (case, result) in cases.iter().zip(&results) {
                let judged = case.judge(result);
                assert!(judged.same, "{judged:?}");
            }
        }
        assert_eq!(rows(), before);
        let told = tokio::time::timeout(Duration::from_millis(200), events.next()).await;
        assert!(told.is_err(), "{told:?}");
        delete(k, &a).await;
        delete(k, &b).await;
    });
}

/// The shared maps.
const SHARED: [&str; 24] = [
    "ENDPOINTS",
    "CALLS",
    "NODE_CALLS",
    "PROFILES",
    "EVENTS",
    "STACK_PATHS",
    "STACK_USERS",
    "SOURCES",
    "FLOWS",
    "FLOWS_RECENT",
    "FLOWS_NEW",
    "FLOW_CACHE",
    "FLOW_CACHE_ENDS",
    "FRAGMENT_SLOTS",
    "FRAGMENTS",
    "FLOW_USE",
    "FLOW_TOTALS",
    "PROXY_USE",
    "IPCACHE",
    "POLICY_PORTS",
    "POLICY_CELLS",
    "POLICY_SETS",
    "POLICY_STATE",
    "ADDRESS_GENERATIONS",
];

#[test]
fn each_shared_map_of_another_layout_is_refused_before_anything_is_made() {
    in_namespaces(|dir| {
        let bpffs = dir.join("bpf");
        let shared = pins_on(&bpffs).join("shared");
        fs::create_dir_all(&shared).expect("directory");
        for name in SHARED {
            let other = Array::<MapData, u32>::create(7, 0).expect("map");
            other.pin(shared.join(name)).expect("pin");
            let e = refused(&bpffs);
            assert_eq!(e.kind, KernelErrorKind::Conflict, "{name}: {e}");
            assert!(e.to_string().contains(name) && e.to_string().contains("remove it"), "{e}");
            let there: Vec<_> = fs::read_dir(&shared).expect("list").map(|f| f.expect("pin").file_name()).collect();
            assert_eq!(there, [name], "nothing else was made");
            fs::remove_file(shared.join(name)).expect("unpin");
        }
    });
}

#[test]
fn a_start_keeps_the_node_programs_if_the_record_names_them_and_only_then() {
    in_linux_world(None, |w| async move {
        let programs = async |k: &LinuxKernel| k.dump_map(map::NODE_CALLS).await.expect("programs");
        let next = || support::open(&w.bpffs(), w.dir.path(), None).expect("open kernel");
        let path = w.dir.path().join("programs.json");
        let read = || fs::read_to_string(&path).expect("record");
        let mut before = programs(&w.kernel).await;
        let kept = next();
        assert_eq!(programs(&kept).await, before, "kept");
        kept.ensure_node(&node_spec()).await.expect("node");
        kept.collect_flows().await.expect("collected");
        assert_eq!(programs(&kept).await, before, "kept");
        let good: serde_json::Value = serde_json::from_str(&read()).expect("json");
        let other = |field: &str, value: serde_json::Value| {
            let mut record = good.clone();
            record[field] = value;
            record.to_string()
        };
        let without = |field: &str| {
            let list = good[field].as_array().expect("ids");
            other(field, list[1..].to_vec().into())
        };
        for bad in [
            String::new(),
            "{".to_owned(),
            other("boot_id", "b64ba9b4-11c4-4a8e-8a34-0e3b6f0f6d4c".into()),
            other("object_hash", 1.into()),
            without("programs"),
            without("maps"),
        ] {
            fs::write(&path, &bad).expect("written");
            let loaded = programs(&next()).await;
            assert!(loaded.iter().zip(&before).all(|(new, old)| new["id"] != old["id"]), "{bad}: {loaded:?}");
            before = loaded;
            assert_eq!(programs(&next()).await, before, "and recorded again");
        }
        fs::remove_file(&path).expect("removed");
        let loaded = programs(&next()).await;
        assert_ne!(loaded, before, "without a record");
    });
}

#[test]
fn source_prefixes_of_no_endpoint_are_found_and_removed() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let data = MapData::from_pin(w.pins().join("shared").join(map::SOURCES)).expect("map");
        let mut rows: HashMap<_, u32, SourcesRow> = Map::HashMap(data).try_into().expect("a hash");
        // Of an id without pins, and of an endpoint that has no prefixes.
        for (ifindex, endpoint_id) in [(77, 7), (a.host_ifindex.0, 1)] {
            rows.insert(ifindex, SourcesRow { epoch: 10, endpoint_id, ..SourcesRow::default() }, 0).expect("row");
        }
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert_eq!(told.len(), 2, "{told:?}");
        for problem in &told {
            let is_stray = |cause: &str| cause.contains("is of no endpoint");
            assert!(
                matches!(problem, NodeProblem::Pin { cause, repairable: true, .. } if is_stray(cause)),
                "{problem:?}"
            );
        }
        k.ensure_node(&node_spec()).await.expect("node again");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
        assert_eq!(k.dump_map(map::SOURCES).await.expect("rows"), []);
        delete(k, &a).await;
    });
}

/// Mounts a bpffs at a path.
fn mount_bpffs(bpffs: &Path) {
    mount(Some("bpf"), bpffs, Some("bpf"), MsFlags::empty(), None::<&str>).expect("mount a bpffs");
}

#[test]
fn a_directory_in_the_place_of_a_pin_keeps_no_other_pin_from_being_made() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let pin = |name: &str| w.pins().join("shared").join(name);
        for name in [map::FLOWS, map::FLOWS_NEW] {
            fs::remove_file(pin(name)).expect("unpin");
        }
        fs::create_dir(pin(map::FLOWS)).expect("a directory in the way");
        k.ensure_node(&node_spec()).await.expect_err("it cannot be replaced");
        assert!(pin(map::FLOWS_NEW).exists(), "the other one is pinned");
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert!(
            matches!(&told[..], [NodeProblem::Pin { path, cause, repairable: false }]
                if Path::new(path) == pin(map::FLOWS) && cause.contains("remove it")),
            "{told:?}"
        );
        let left: Vec<_> =
            fs::read_dir(w.pins().join("shared")).expect("list").map(|e| e.expect("e").file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("next_")), "{left:?}");
        fs::remove_dir(pin(map::FLOWS)).expect("out of the way");
        k.ensure_node(&node_spec()).await.expect("node again");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
    });
}

#[test]
fn nothing_is_pinned_in_a_bpffs_that_is_mounted_over_ours() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        let bpffs = w.bpffs();
        mount_bpffs(&bpffs);
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert!(
            matches!(&told[..], [NodeProblem::Pin { path, cause, repairable: false }]
                if Path::new(path) == bpffs && cause.contains("mounted over") && cause.contains("unmount it")),
            "{told:?}"
        );
        let dump = k.dump().await.expect("an audit needs it, to tell of the pins");
        let slots = k.call_slots().await.expect("slots");
        assert_eq!((dump.endpoint_rows.len(), slots.len()), (4, 2), "{dump:?}");
        assert!(dump.pins.is_empty(), "pins at the path are another's: {dump:?}");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "the node has the problem, not each endpoint");
        let speakers = k.observe_speakers(first_address(&a)).await.expect("observe");
        assert_eq!(speakers.len(), 2, "the row is in the table that the programs use: {speakers:?}");
        let node = k.ensure_node(&node_spec()).await.map(drop);
        for refused in [node, k.ensure_programs(&program_spec(&a)).await.map(drop)] {
            let e = refused.expect_err("it would be pinned in the wrong bpffs");
            assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
            assert!(e.to_string().contains("unmount it"), "{e}");
        }
        // The kernel itself may put iterators into a new bpffs.
        assert!(!bpffs.join("wharf").exists(), "something was made in it");
        // A delete does not wait for the sink's pin.
        k.remove_attached(&link_ref(&b)).await.expect("detached");
        umount2(&bpffs, MntFlags::MNT_DETACH).expect("unmount");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), [], "the pins are there");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        k.ensure_node(&node_spec()).await.expect("node again");
        // Something that is no bpffs.
        mount(Some("tmpfs"), &bpffs, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("mount over it");
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert!(
            told.iter().any(|p| matches!(p, NodeProblem::Bpffs { cause, .. } if cause.contains("not a bpffs"))),
            "{told:?}"
        );
        let e = k.ensure_node(&node_spec()).await.expect_err("no bpffs");
        assert_eq!(e.kind, KernelErrorKind::NotFound, "{e}");
        assert_eq!(fs::read_dir(&bpffs).expect("list").count(), 0, "nothing was made in it");
        umount2(&bpffs, MntFlags::MNT_DETACH).expect("unmount");
        delete(k, &a).await;
        delete(k, &b).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn the_maps_in_use_are_pinned_in_a_bpffs_that_took_the_place_of_ours() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let id =
            |name: &str| MapData::from_pin(w.pins().join("shared").join(name)).expect("map").info().expect("info").id();
        let before = SHARED.map(id);
        let bpffs = w.bpffs();
        umount2(&bpffs, MntFlags::MNT_DETACH).expect("unmount");
        mount_bpffs(&bpffs);
        let told = k.observe_node(&node_spec()).await.expect("observe");
        let missing = told.iter().filter(|p| matches!(p, NodeProblem::PinMissing { .. })).count();
        assert_eq!(missing, SHARED.len() + 1, "the maps and the sink: {told:?}");
        k.ensure_node(&node_spec()).await.expect("node again");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
        assert_eq!(SHARED.map(id), before, "what is attached and what is written are one");
        delete(k, &a).await;
        assert_no_endpoints(k).await;
    });
}

/// An agent that dies between the two steps of pinning a map again leaves it under the other name.
#[test]
fn a_start_finishes_what_an_agent_left_that_died_while_it_pinned_a_map_again() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let shared = w.pins().join("shared");
        let id = |path: &Path| MapData::from_pin(path).expect("map").info().expect("info").id();
        for name in ["ENDPOINTS", "CALLS", "POLICY_STATE"] {
            let (path, next) = (shared.join(name), shared.join(format!("next_{name}")));
            let before = id(&path);
            for replaced in [false, true] {
                fs::rename(&path, &next).expect("as the agent left it");
                if replaced {
                    Array::<MapData, u32>::create(7, 0).expect("map").pin(&path).expect("pin");
                }
                let dump = k.dump().await.expect("dump");
                assert_eq!(dump.foreign_pins, Vec::<std::path::PathBuf>::new(), "{name}: it is Wharf's own");
                drop(open(&w.bpffs()).expect("the next start"));
                assert!(!next.exists(), "{name}, replaced: {replaced}");
                assert_eq!(id(&path), before, "{name}, replaced: {replaced}: the map that the programs use");
            }
            // What is no such map is removed.
            Array::<MapData, u32>::create(7, 0).expect("map").pin(&next).expect("pin");
            drop(open(&w.bpffs()).expect("the next start"));
            assert!(!next.exists() && id(&path) == before, "{name}");
        }
        k.ensure_node(&node_spec()).await.expect("its programs are in their slots again");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
    });
}

/// Readers of a pin (`wharf bpf`, another program) find a map at each moment.
#[test]
fn a_pin_that_is_replaced_is_missing_at_no_moment() {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    };
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let (path, other) = (w.pins().join("shared/PROFILES"), w.pins().join("shared/next_OTHER"));
        let before = MapData::from_pin(&path).expect("map").info().expect("info").id();
        let done = Arc::new(AtomicBool::new(false));
        let reader = std::thread::spawn({
            let (path, done) = (path.clone(), Arc::clone(&done));
            move || {
                let mut looks = 0_u32;
                while !done.load(Relaxed) {
                    assert!(path.symlink_metadata().is_ok(), "no pin after {looks} looks");
                    looks += 1;
                }
                looks
            }
        });
        for _ in 0..50 {
            Array::<MapData, u32>::create(7, 0).expect("map").pin(&other).expect("pin");
            fs::rename(&other, &path).expect("replace the pin");
            k.ensure_node(&node_spec()).await.expect("pinned again");
        }
        done.store(true, Relaxed);
        let looked = reader.join().expect("the pin is always there");
        assert!(looked > 50, "{looked} looks");
        assert_eq!(MapData::from_pin(&path).expect("map").info().expect("info").id(), before);
    });
}

#[test]
fn a_shared_map_of_another_agent_is_reported_and_never_used() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let mut a = new_endpoint(&w, 1, 10).await;
        let endpoints = w.pins().join("shared/ENDPOINTS");
        fs::remove_file(&endpoints).expect("unpin");
        // Another agent, which knows nothing of the first one's maps, makes a new one of the same layout.
        let second = open(&w.bpffs()).expect("second agent");
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert!(
            matches!(
                &told[..],
                [NodeProblem::Pin { path, cause, repairable: true }, NodeProblem::PinMissing { path: program }]
                    if path.ends_with("ENDPOINTS") && cause.contains("replaced") && program.contains("`event`")
            ),
            "{told:?}"
        );
        let e = k.ensure_programs(&program_spec(&a)).await.expect_err("another map");
        assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
        assert!(e.to_string().contains("wharf audit --repair"), "{e}");
        // To the second agent the map is the right one and the endpoint's programs are not.
        assert_eq!(second.observe_node(&node_spec()).await.expect("observe"), []);
        let told = second.observe_endpoint(&a).await.expect("observe");
        assert!(
            told.iter().any(|p| matches!(p, EndpointProblem::MapUnused { map, .. } if map == "ENDPOINTS")),
            "{told:?}"
        );
        create(&second, &mut a).await;
        assert_eq!(second.observe_endpoint(&a).await.expect("observe"), [], "built anew, on the pinned map");
        delete(&second, &a).await;
        k.ensure_node(&node_spec()).await.expect("its own map is pinned again");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
    });
}

#[test]
fn no_shared_map_is_created_again_while_the_agent_runs() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let id = |path: &Path| MapData::from_pin(path).expect("map").info().expect("info").id();
        for name in SHARED {
            let path = w.pins().join("shared").join(name);
            let before = id(&path);
            for replaced in [false, true] {
                fs::remove_file(&path).expect("unpin");
                if replaced {
                    Array::<MapData, u32>::create(7, 0).expect("map").pin(&path).expect("pin");
                }
                for refused in [k.ensure_programs(&program_spec(&a)).await.map(drop), k.ensure_reachable(&a).await] {
                    let e = refused.expect_err("the pin is not the map that the agent holds");
                    assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
                    assert!(e.to_string().contains(name) && e.to_string().contains("wharf audit --repair"), "{e}");
                }
                assert_eq!(path.exists(), replaced, "{name}: nothing was made in its place");
                // Removals work, in the maps that the programs use.
                k.remove_reachable(&a).await.expect("removed");
                assert_eq!(k.dump().await.expect("dump").endpoint_rows, [], "{name}");
                let told = k.observe_node(&node_spec()).await.expect("observe");
                let is_named = match &told[..] {
                    [NodeProblem::PinMissing { path }] => !replaced && path.ends_with(name),
                    [NodeProblem::Pin { path, repairable: true, .. }] => replaced && path.ends_with(name),
                    _ => false,
                };
                assert!(is_named, "{name}: {told:?}");
                k.ensure_node(&node_spec()).await.expect("the agent's map is pinned again");
                assert_eq!(id(&path), before, "{name}");
                k.ensure_reachable(&a).await.expect("reachable");
            }
        }
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        delete(k, &a).await;
    });
}

#[test]
fn connections_of_every_protocol_and_zone_go_with_their_address() {
    in_linux_world(None, |w| async move {
        use support::ctnetlink::{self, ICMP, ICMP6, TCP, UDP};
        let ip = |text: &str| -> IpAddr { text.parse().expect("address") };
        let [a, b, c] = ["10.77.0.2", "10.77.0.3", "10.77.0.4"].map(ip);
        let [a6, b6, c6] = ["fd77::2", "fd77::3", "fd77::4"].map(ip);
        if !ctnetlink::add(a, b, UDP, 0) {
            assert!(!w.kernel.features().conntrack, "a kernel that tracks nothing says so");
            return;
        }
        assert!(open(&w.bpffs()).expect("open").features().conntrack, "a kernel that tracks says so");
        for zone in [0, 7] {
            for protocol in [ICMP, TCP, UDP] {
                for (source, destination) in [(a, b), (c, a), (b, c)] {
                    if (zone, protocol, source) != (0, UDP, a) {
                        assert!(ctnetlink::add(source, destination, protocol, zone));
                    }
                }
            }
            for protocol in [ICMP6, TCP, UDP] {
                for (source, destination) in [(a6, b6), (b6, c6)] {
                    assert!(ctnetlink::add(source, destination, protocol, zone));
                }
            }
        }
        assert_eq!(ctnetlink::count(), 30);
        assert_eq!(w.kernel.remove_connections(&[a, a6]).await.expect("remove"), 18);
        assert_eq!(ctnetlink::count(), 12, "the others' rows stay");
        // More than one datagram of answers, and more than one batch of deletes.
        for n in 0..=255u8 {
            assert!(ctnetlink::add(a, IpAddr::from([10, 78, 0, n]), TCP, 0));
        }
        assert_eq!(w.kernel.remove_connections(&[a]).await.expect("remove"), 256);
        assert_eq!(w.kernel.remove_connections(&[c, c6]).await.expect("remove"), 12);
        assert_eq!(ctnetlink::count(), 0);
    });
}

#[test]
fn a_renamed_link_goes_with_its_endpoint_and_anothers_stays() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        for (n, alias) in [(1, None), (2, Some("wharf:2:10"))] {
            let a = new_endpoint(&w, n, 10).await;
            if let Some(alias) = alias {
                w.set_alias(a.host_ifname.as_str(), alias);
            }
            // Older kernels rename only what is down.
            run("ip", &["link", "set", "dev", a.host_ifname.as_str(), "down"]);
            run("ip", &["link", "set", "dev", a.host_ifname.as_str(), "name", "renamed0"]);
            // A delete of another epoch, or of another endpoint, that has the index of this link.
            for (id, epoch) in [(a.id, Epoch(9)), (id(9), a.epoch)] {
                k.remove_link(&LinkRef { id, epoch, ..link_ref(&a) }).await.expect("nothing of theirs");
                run("ip", &["link", "show", "renamed0"]);
            }
            delete(k, &a).await;
            let left = std::process::Command::new("ip").args(["link", "show", "renamed0"]).output().expect("run ip");
            assert!(!left.status.success(), "it went with endpoint {n}");
        }
        assert_no_endpoints(k).await;
    });
}

/// Commands that change the router's link behind the agent's back, and how many problems they make.
fn changes_of_the_router(other: &str) -> [Vec<String>; 5] {
    let rename = |from: &str, to: &str| [format!("link set {from} down"), format!("link set {from} name {to}")];
    let both = [rename("wharf0", "foo"), rename("wharf0p", "foop")].concat();
    [
        rename("wharf0", "foo").to_vec(),
        rename("wharf0p", "foop").to_vec(),
        both,
        vec![format!("link set wharf0 netns {other}")],
        vec![format!("link set wharf0p netns {other}")],
    ]
}

fn apply(commands: &[String]) {
    for command in commands {
        run("ip", &command.split(' ').collect::<Vec<_>>());
    }
}

/// A process that holds a network namespace of its own, for `ip link set ... netns PID`.
struct Elsewhere(std::process::Child);

impl Elsewhere {
    fn start() -> Self {
        let holder = "unshare -n sh -c 'echo there; exec cat'";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &format!("exec {holder}")]);
        let piped = std::process::Stdio::piped;
        let mut child = command.stdin(piped()).stdout(piped()).spawn().expect("run unshare");
        let mut there = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().expect("output"), &mut there).expect("the namespace is there");
        Self(child)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().expect("its namespace goes with it");
    }
}

fn links() -> String {
    run("ip", &["-brief", "link"])
}

#[test]
fn the_routers_link_is_mended_whatever_somebody_did_to_it() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let in_a = a.netns.path.as_path();
        let elsewhere = Elsewhere::start();
        for change in changes_of_the_router(&elsewhere.0.id().to_string()) {
            apply(&change);
            let told = k.observe_node(&node_spec()).await.expect("observe");
            let named =
                |p: &NodeProblem| matches!(p, NodeProblem::LinkRenamed { .. } | NodeProblem::LinkMissing { .. });
            assert!(told.iter().any(named), "{change:?}: {told:?}");
            k.ensure_node(&node_spec()).await.unwrap_or_else(|e| panic!("{change:?}: {e}"));
            assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), [], "{change:?}");
            assert!(!links().contains("foo"), "{change:?}: {}", links());
            let kept = run("tc", &["qdisc", "show", "dev", "wharf0p"]);
            assert!(kept.contains("clsact"), "{change:?}: {kept}");
            // Routes whose source is the router address go with the address.
            k.ensure_connected(&a).await.expect("connect again");
            assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "{change:?}");
            for (own, router) in
                [(IpAddr::V4(a.ipv4.unwrap()), IpAddr::V4(ROUTER4)), (IpAddr::V6(a.ipv6.unwrap()), IpAddr::V6(ROUTER6))]
            {
                assert_eq!(converse(Some(in_a), None, router), own, "{change:?}");
                assert_eq!(converse(None, Some(in_a), own), router, "{change:?}");
            }
        }
        delete(k, &a).await;
    });
}

#[test]
fn a_router_link_without_marks_is_adopted_when_whole_and_left_alone_when_not() {
    in_linux_world(None, |w| async move {
        let k = w.kernel();
        let unmarked = || ["wharf0", "wharf0p"].map(|name| run("ip", &["link", "set", name, "alias", ""]));
        k.ensure_node(&node_spec()).await.expect("node");
        // As a version before marks made it.
        unmarked();
        k.ensure_node(&node_spec()).await.expect("adopted");
        apply(&changes_of_the_router("")[0]);
        k.ensure_node(&node_spec()).await.expect("it was marked");
        unmarked();
        let elsewhere = Elsewhere::start();
        run("ip", &["link", "set", "wharf0", "netns", &elsewhere.0.id().to_string()]);
        let e = k.ensure_node(&node_spec()).await.expect_err("wharf0p is not provably Wharf's");
        assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
        assert!(e.to_string().contains("ip link del wharf0p"), "{e}");
        run("ip", &["link", "del", "wharf0p"]);
        k.ensure_node(&node_spec()).await.expect("as the error said");
        // The name is another's, the link itself is known by its mark.
        apply(&changes_of_the_router("")[0]);
        run("ip", &["link", "add", "wharf0", "type", "veth", "peer", "name", "theirs"]);
        let told = k.observe_node(&node_spec()).await.expect("observe");
        assert!(matches!(told.as_slice(), [NodeProblem::LinkForeign { name }] if name == "wharf0"), "{told:?}");
        let e = k.ensure_node(&node_spec()).await.expect_err("the name is taken");
        assert!(e.to_string().contains("rename or remove it"), "{e}");
        run("ip", &["link", "del", "wharf0"]);
        k.ensure_node(&node_spec()).await.expect("renamed back");
        assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), []);
    });
}

#[test]
fn a_cleanup_finds_the_routers_link_whatever_somebody_did_to_it() {
    in_linux_world(None, |w| async move {
        let elsewhere = Elsewhere::start();
        for change in changes_of_the_router(&elsewhere.0.id().to_string()) {
            w.kernel.ensure_node(&node_spec()).await.expect("node");
            apply(&change);
            let routers = || {
                let found = leftovers::list(&w.bpffs(), &w.bpffs().with_extension("run")).expect("list").ours;
                found.into_iter().filter(|l| matches!(l, Leftover::Router { .. })).collect::<Vec<_>>()
            };
            let found = routers();
            assert_eq!(found.len(), 1, "{change:?}: {found:?}");
            leftovers::remove(&found[0]).expect("remove");
            assert_eq!(routers(), [], "{change:?}");
            assert!(!links().contains("veth") && links().lines().count() == 1, "only lo is left: {}", links());
        }
    });
}

#[test]
fn a_link_whose_host_side_was_moved_away_goes_with_its_endpoint_and_anothers_stays() {
    in_linux_world(None, |w| async move {
        let k = w.kernel();
        k.ensure_node(&node_spec()).await.expect("node");
        let b = new_endpoint(&w, 2, 10).await;
        for into_the_container in [false, true] {
            let a = new_endpoint(&w, 1, 10 + u64::from(into_the_container)).await;
            let path = a.netns.path.clone();
            let inside = || LinuxWorld::inside(&path, links);
            let elsewhere = Elsewhere::start();
            if into_the_container {
                let container = path.display().to_string();
                run("ip", &["link", "set", a.host_ifname.as_str(), "netns", &container]);
            } else {
                run("ip", &["link", "set", a.host_ifname.as_str(), "netns", &elsewhere.0.id().to_string()]);
            }
            // Another link than the one that was made, or one that is in use.
            let of_a = link_ref(&a).container.expect("known");
            let gone = LinkRef { host_ifname: IfName::parse("wh00ff000000ff").expect("name"), ..link_ref(&a) };
            for other in [
                ContainerSide { mac: b.container_mac, ..of_a.clone() },
                ContainerSide { ifindex: IfIndex(of_a.ifindex.0 + 100), ..of_a.clone() },
                link_ref(&b).container.expect("known"),
            ] {
                let link = LinkRef { host_ifindex: None, container: Some(other), ..gone.clone() };
                k.remove_link(&link).await.expect("nothing of its own");
                assert!(inside().contains("eth0"), "{}", inside());
                assert_eq!(k.observe_endpoint(&b).await.expect("observe"), []);
            }
            delete(k, &a).await;
            assert!(inside().lines().count() == 1, "only lo is left: {}", inside());
            delete(k, &a).await;
            // The interface's name is free for the next endpoint.
            let mut next = record(3, 10, &a.netns, "eth0");
            create(k, &mut next).await;
            assert_eq!(k.observe_endpoint(&next).await.expect("observe"), []);
            delete(k, &next).await;
        }
        delete(k, &b).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn arp_that_the_container_turned_off_is_named_and_put_back() {
    in_linux_world(None, |w| async move {
        let k = w.kernel();
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let in_a = a.netns.path.as_path();
        LinuxWorld::inside(in_a, || run("ip", &["link", "set", "dev", "eth0", "arp", "off"]));
        assert!(!reaches_node(in_a), "the fault is none");
        let problems = k.observe_endpoint(&a).await.expect("observe");
        let is_it = |p: &EndpointProblem| matches!(p, EndpointProblem::LinkArp { side: Side::Container, .. });
        assert!(matches!(problems.as_slice(), [one] if is_it(one)), "{problems:?}");
        k.ensure_connected(&a).await.expect("put back");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        assert!(reaches_node(in_a), "put back");
        delete(k, &a).await;
    });
}

#[test]
fn a_local_route_that_comes_first_is_named_with_its_table() {
    in_linux_world(None, |w| async move {
        let k = w.kernel();
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let addresses = [IpAddr::V4(a.ipv4.unwrap()), IpAddr::V6(a.ipv6.unwrap())];
        for address in addresses {
            run("ip", &["addr", "add", &IpNet::from(address).to_string(), "dev", "lo", "nodad"]);
        }
        // The kernel adds the IPv6 address's local route from a work queue.
        let end = Instant::now() + Duration::from_secs(10);
        while !run("ip", &["-6", "route", "show", "table", "local"]).contains(&addresses[1].to_string()) {
            assert!(Instant::now() < end, "no local route to {}", addresses[1]);
            std::thread::sleep(Duration::from_millis(5));
        }
        let problems = k.observe_endpoint(&a).await.expect("observe");
        let tables = problems.iter().map(|p| match p {
            EndpointProblem::NodeRouteShadowed { found: Some(found), .. } => Some(found.table),
            _ => None,
        });
        assert_eq!(tables.collect::<Vec<_>>(), [Some(255), Some(255)], "{problems:?}");
        for address in addresses {
            run("ip", &["addr", "del", &IpNet::from(address).to_string(), "dev", "lo"]);
        }
        delete(k, &a).await;
    });
}

/// Proxy neighbours, both families.
fn proxies() -> String {
    ["-4", "-6"].map(|family| run("ip", &[family, "neigh", "show", "proxy"])).concat()
}

/// What is amiss with announcements: which, and how.
async fn amiss(k: &LinuxKernel, spec: &NodeSpec) -> Vec<String> {
    let problems = k.observe_node(spec).await.expect("observe");
    let outbound =
        |p| if let NodeProblem::Outbound { what, cause, .. } = p { Some(format!("{what}: {cause}")) } else { None };
    problems.into_iter().filter_map(outbound).collect()
}

#[test]
fn announcements_follow_the_endpoints_that_can_be_reached_and_others_entries_stay() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        for command in [
            "link add up0 type veth peer name up1",
            "link set up1 up",
            "link set up0 up",
            "addr add 10.0.0.9/8 dev up0",
            "addr add fd77:0:0:9::9/48 dev up0 nodad",
            // A link with a network that no pool is a part of.
            "link add far0 type veth peer name far1",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev far0",
            "neigh add proxy 10.0.0.7 dev up0",
        ] {
            run("ip", &command.split(' ').collect::<Vec<_>>());
        }
        let theirs = proxies();
        let (off, on) = (node_spec(), NodeSpec { announce: true, ..node_spec() });
        k.ensure_node(&off).await.expect("node");
        k.ensure_nat(&off).await.expect("off");
        let early = new_endpoint(&w, 1, 10).await;
        assert_eq!(proxies(), theirs, "off touches nothing");
        let missing = amiss(k, &on).await;
        assert_eq!(missing.len(), 2, "both families: {missing:?}");
        k.ensure_nat(&on).await.expect("on");
        let late = new_endpoint(&w, 2, 11).await;
        assert_eq!(amiss(k, &on).await, [""; 0]);
        assert_eq!(proxies().matches("proto 87").count(), 4, "{}", proxies());
        assert!(!proxies().contains("far0"), "{}", proxies());

        let address = early.ipv4.expect("IPv4").to_string();
        run("ip", &["neigh", "del", "proxy", &address, "dev", "up0"]);
        run("ip", &["neigh", "add", "proxy", "10.77.9.9", "dev", "up0", "protocol", "87"]);
        let found = amiss(k, &on).await;
        let names = |text: String| found.iter().any(|told| told.starts_with(&text));
        assert!(found.len() == 2 && names(format!("announcement of {address} on up0: expected")), "{found:?}");
        assert!(names("announcement of 10.77.9.9 on up0: is there".into()), "{found:?}");
        k.ensure_nat(&on).await.expect("mended");
        assert_eq!(amiss(k, &on).await, [""; 0]);

        delete(k, &early).await;
        assert_eq!(proxies().matches("proto 87").count(), 2, "{}", proxies());
        assert_eq!(amiss(k, &off).await.len(), 2, "of an agent before, which announced");
        k.ensure_nat(&off).await.expect("off again");
        assert_eq!(proxies(), theirs);
        delete(k, &late).await;
    });
}

#[test]
fn networks_of_the_node_are_found_in_the_tables_that_rules_lead_to() {
    in_namespaces(|_| {
        let ip = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
        ip("link add up0 type veth peer name up1");
        ip("addr add 198.18.0.1/24 dev up0");
        ip("link set up0 up");
        ip("link set up1 up");
        let found = || {
            let cidrs = ["10.50.0.0/16", "fd50::/64"].map(|cidr| cidr.parse().expect("CIDR"));
            let seen = observe_networks(&cidrs).expect("networks");
            seen.foreign.iter().map(|network| network.net.to_string()).collect::<Vec<_>>()
        };
        for route in ["10.50.3.0/24 via 198.18.0.2", "10.50.4.1/32 via 198.18.0.2"] {
            ip(&format!("route add {route} table 100"));
        }
        ip("route add blackhole 10.50.8.0/24 table 100");
        ip("-6 route add blackhole fd50::8:0/112 table 100");
        assert_eq!(found(), [""; 0], "no rule leads there");
        ip("rule add lookup 100 prio 50");
        ip("-6 rule add lookup 100 prio 50");
        ip("route add 10.50.9.0/24 via 198.18.0.2 table 200");
        let mut all = found();
        all.sort();
        assert_eq!(all, ["10.50.3.0/24", "10.50.4.1/32", "10.50.8.0/24", "fd50::8:0/112"]);
        ip("rule del lookup 100 prio 50");
        ip("-6 rule del lookup 100 prio 50");
        ip("route add 10.50.10.0/24 via 198.18.0.2 table default");
        assert_eq!(found(), ["10.50.10.0/24"], "the table default");
    });
}
