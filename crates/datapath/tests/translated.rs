//! The way of packets to services with a backend on another node.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use support::*;
use wharf_core::{
    finding::NodeProblem,
    kernel::{NextHop, NodeKernel as _, NodeSpec, PeerRoute},
    nat::Masquerade,
};

const TABLE: &str = "table 2003304449";

fn peer(to: &str, via: &str) -> PeerRoute {
    PeerRoute { to: to.parse().expect("network"), via: NextHop::Direct(via.parse().expect("address")) }
}

/// Containers of this node have IPv4 alone.
fn spec() -> NodeSpec {
    let mut spec = node_spec();
    spec.cidrs.retain(|cidr| cidr.addr().is_ipv4());
    spec.masquerade = Some(Masquerade { pools: spec.cidrs.clone(), services: true, ..Masquerade::default() });
    spec.peers = vec![peer("10.78.0.0/24", "192.0.2.2"), peer("fd78::/64", "2001:db8::2")];
    spec
}

/// Containers of another node, which other programs' routes lead to.
fn spec_with_network(net: &str) -> NodeSpec {
    let mut spec = spec();
    let masquerade = spec.masquerade.as_mut().expect("masquerading");
    masquerade.excluded.push(net.parse().expect("network"));
    spec
}

/// Rules, and routes of the table in both families.
fn made() -> [String; 3] {
    let ask = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
    let rules = ask("-4 rule show priority 90");
    // A table without routes does not exist.
    let routes = |family: &str| {
        let all = ask(&format!("{family} route show table all"));
        all.lines().filter(|line| line.contains(TABLE)).collect::<Vec<_>>().join("\n")
    };
    [rules, routes("-4"), routes("-6")]
}

fn has_problem(problems: &[NodeProblem]) -> bool {
    problems.iter().any(|problem| matches!(problem, NodeProblem::Outbound { what, .. } if what.contains("0x77680001")))
}

#[test]
fn a_hook_that_the_kernel_refuses_stops_nothing_else() {
    in_linux_world(None, |w| async move {
        let LinuxWorld { kernel: k, .. } = &w;
        let wanted = spec();
        k.ensure_node(&NodeSpec { peers: Vec::new(), ..wanted.clone() }).await.expect("node");
        assert_eq!(made(), ["", "", ""], "without other nodes");
        // Another program's qdisc, which has no egress hook.
        run("tc", &["qdisc", "add", "dev", "wharf0", "ingress"]);
        k.ensure_node(&wanted).await.expect("the node's other parts");
        assert_eq!(made(), ["", "", ""], "the filter comes first");
        assert!(has_problem(&k.observe_node(&wanted).await.expect("observe")));
        run("tc", &["qdisc", "del", "dev", "wharf0", "ingress"]);
        k.ensure_node(&wanted).await.expect("node");
        let [rules, v4, v6] = made();
        assert!(
            rules.contains("fwmark 0x40/0x40") && v4.contains("10.78.0.0/24 via 169.254.88.1 dev wharf0"),
            "{rules}{v4}"
        );
        assert_eq!(v6, "", "containers of this node have no IPv6");
        let beyond = spec_with_network("10.79.0.0/24");
        k.ensure_node(&beyond).await.expect("node");
        let both = |v4: &str| ["10.78.0.0/24", "10.79.0.0/24"].iter().all(|to| v4.contains(to));
        assert!(both(&made()[1]), "also without a route of Wharf's to the network: {:?}", made());
        assert!(!has_problem(&k.observe_node(&beyond).await.expect("observe")));
        k.ensure_node(&wanted).await.expect("node");
        assert!(!has_problem(&k.observe_node(&wanted).await.expect("observe")));
        k.ensure_node(&NodeSpec { peers: Vec::new(), ..wanted }).await.expect("node");
        assert_eq!(made(), ["", "", ""], "taken away");
    });
}
