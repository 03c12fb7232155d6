//! Addresses of other nodes: the owner, the route, and the identity that policy sees.

use std::fs;

use wharf_api::{Explanation, Health, SubjectKind};
use wharf_cluster::routes::Routing;
use wharf_core::overlap::{NodeNetwork, Way};
use wharf_datapath::fake::Operation as Op;

use super::{explained, fact};
use crate::{policy::isolates, support::*};

const NODES: &str = "
[[node]]
name = 'test'
addresses = ['192.0.2.1']

[[node]]
name = 'b'
addresses = ['192.0.2.2']
pod-cidrs = ['10.101.0.0/24']
health-addresses = ['10.101.0.2']
router-addresses = ['10.101.0.1']
";

fn network(net: &str, way: Way) -> NodeNetwork {
    NodeNetwork { net: net.parse().expect("network"), way, ifname: Some("lan0".to_owned()) }
}

/// In a network with the other nodes.
fn machine() -> Machine {
    let machine = Machine::new();
    let lan = Way::OnLink { by_kernel: true, point_to_point: false };
    machine.kernel.set_networks(vec![network("192.0.2.0/24", lan), network("192.0.2.1/32", Way::Address)]);
    machine
}

/// With the nodes of [`NODES`], and these: name, last byte of the address, pod CIDRs.
fn with_file(others: &[(&str, u8, &str)]) -> Machine {
    let mut machine = machine();
    let file = machine.config.state_dir.join("nodes.toml");
    let other = |(name, n, cidrs): &(&str, u8, &str)| {
        format!("[[node]]\nname = '{name}'\naddresses = ['192.0.2.{n}']\npod-cidrs = [{cidrs}]\n")
    };
    fs::write(&file, NODES.to_owned() + &others.iter().map(other).collect::<String>()).expect("written");
    machine.config.cluster_file = Some(file);
    machine
}

fn has(told: &Explanation, name: &str) -> bool {
    told.facts.iter().any(|fact| fact.name == name)
}

#[test]
fn an_address_of_another_node_is_explained_with_the_identity_that_policy_sees() {
    let mut machine = with_file(&[("c", 3, "'10.102.0.0/24'")]);
    machine.config.service_cidr = vec!["10.102.0.128/25".parse().expect("network")];
    machine.life(async |agent| {
        agent.create("c1").await;
        let all = [
            ("192.0.2.2", "an address of node b of the cluster", "6 (reserved:remote-node)"),
            ("10.101.0.1", "in 10.101.0.0/24 of node b: packets to it go via 192.0.2.2", "6 (reserved:remote-node)"),
            ("10.101.0.2", "in 10.101.0.0/24 of node b: packets to it go via 192.0.2.2", "7 (reserved:unknown-pod)"),
            ("10.101.0.9", "in 10.101.0.0/24 of node b: packets to it go via 192.0.2.2", "7 (reserved:unknown-pod)"),
            ("10.102.0.9", "in 10.102.0.0/24 of node c, to which this node has no route", "7 (reserved:unknown-pod)"),
            ("10.102.0.129", "in 10.102.0.0/24 of node c, to which this node has no route", "2 (reserved:world)"),
        ];
        for (ip, summary, _) in all {
            let told = explained(&agent, ip).await;
            assert_eq!((told.kind, told.health), (SubjectKind::Address, Health::Ok), "{ip}");
            assert!(told.summary.starts_with(summary), "{ip}: {}", told.summary);
            assert_eq!(fact(&told, "identity"), "none until a policy is in force", "{ip}");
        }
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        for (ip, _, identity) in all {
            assert_eq!(fact(&explained(&agent, ip).await, "identity"), identity, "{ip}");
        }
        let router = explained(&agent, "10.101.0.1").await;
        assert_eq!(
            (fact(&router, "node"), fact(&router, "role")),
            ("b", "router address of the node, its containers' gateway")
        );
        assert_eq!(fact(&explained(&agent, "10.101.0.2").await, "role"), "address of the node's health endpoint");
        assert!(!has(&explained(&agent, "203.0.113.9").await, "identity"), "of no node");
    });
}

#[test]
fn a_kernel_that_does_not_answer_leaves_the_identity_unknown() {
    with_file(&[]).life(async |agent| {
        let hold = agent.kernel.hold(Op::ObservePolicy);
        let told = explained(&agent, "10.101.0.9").await;
        hold.release();
        let identity = fact(&told, "identity");
        assert!(identity.starts_with("unknown: ") && identity.contains("did not answer"), "{identity}");
    });
}

#[test]
fn a_network_without_a_route_is_explained_with_the_reason() {
    let mut machine = with_file(&[
        ("pools", 3, "'10.88.0.0/16'"),
        ("services", 4, "'10.102.0.0/24'"),
        ("taken", 5, "'10.103.0.0/24'"),
        ("far", 6, "'fd00:6::/64'"),
    ]);
    machine.config.service_cidr = vec!["10.102.0.0/16".parse().expect("network")];
    machine.config.routing = Routing::Native;
    let lan = Way::OnLink { by_kernel: true, point_to_point: false };
    let taken = network("10.103.0.77/32", Way::Address);
    let networks = vec![network("192.0.2.0/24", lan), network("192.0.2.1/32", Way::Address), taken];
    machine.kernel.set_networks(networks);
    machine.life(async |agent| {
        for (ip, summary) in [
            ("10.88.9.9", "in 10.88.0.0/16 of node pools, to which this node has no route: it overlaps 10.88.0.0/24, a pool of this node"),
            ("10.102.0.9", "in 10.102.0.0/24 of node services, to which this node has no route: it overlaps 10.102.0.0/16, a range of services (--service-cidr)"),
            ("10.103.0.9", "in 10.103.0.0/24 of node taken, to which this node has no route: it overlaps the node's address 10.103.0.77 on lan0"),
            ("fd00:6::9", "in fd00:6::/64 of node far, to which this node has no route: its node has no address of this family in a network of this node's links, and routing is native; a router between the nodes must know the way"),
        ] {
            assert_eq!(explained(&agent, ip).await.summary, summary);
        }
    });
}

#[test]
fn a_network_of_another_node_in_a_pool_is_named_for_each_address_of_the_pool() {
    let why =
        "in 10.88.0.0/28 of node d, to which this node has no route: it overlaps 10.88.0.0/24, a pool of this node";
    with_file(&[("d", 4, "'10.88.0.0/28'")]).life(async |agent| {
        let told = explained(&agent, "10.88.0.9").await;
        let free = "free; nobody has had it as far back as the agent remembers";
        assert_eq!((told.health, told.summary), (Health::Degraded, format!("{free}; but also {why}")));
        let held = agent.lease_to_caller("somebody").await.ip.to_string();
        let told = explained(&agent, &held).await;
        assert!(told.summary.contains("by a caller of the API"), "{}", told.summary);
        assert_eq!(fact(&told, "conflict"), why);
        let told = explained(&agent, "10.88.0.200").await;
        assert_eq!((told.health, told.summary.as_str()), (Health::Ok, free));
        assert_eq!(fact(&told, "overlap"), "with 10.88.0.0/28 of node d, to which this node has no route");
        assert!(!has(&told, "conflict"), "{:?}", told.facts);
    });
    with_file(&[]).life(async |agent| {
        let told = explained(&agent, "10.88.0.9").await;
        assert!(told.health == Health::Ok && !has(&told, "overlap") && !has(&told, "conflict"), "{told:?}");
    });
}

#[test]
fn a_pod_of_another_node_is_explained_with_its_name_labels_route_and_identity() {
    let mut machine = machine();
    machine.config.cluster_feed = Some(machine.config.run_dir.join("feed"));
    let nodes = r#"[{"name":"test","uid":"1","addresses":["192.0.2.1"],"pod_cidrs":[],"health_addresses":[]},
        {"name":"b","uid":"2","addresses":["192.0.2.2"],"pod_cidrs":["10.101.0.0/24"],"health_addresses":[]}]"#;
    let head = format!(r#"{{"boot_id":"boot","producer":"kube","cluster":"one","nodes":{nodes}}}"#);
    let pods = r#"[{"uid":"3","namespace":"shop","name":"web","addresses":["10.101.0.9"],"node":"b","label_set":0}]"#;
    let rest = format!(r#"{{"label_sets":[{{"app":"web"}}],"pods":{pods},"namespaces":[],"policies":[]}}"#);
    fs::write(machine.config.state_dir.join("feed.json"), format!("{head}\n{rest}")).expect("written");
    machine.life(async |agent| {
        agent.life.network.load_cluster("boot").await.expect("nodes");
        let feed = agent.life.network.cluster.feed().expect("the feed");
        feed.load_rest().await;
        feed.take(&*agent.life).await.expect("taken");
        agent.life.network.set_cluster().await.expect("networks of other nodes");
        agent.create("c1").await;
        let told = explained(&agent, "10.101.0.9").await;
        let summary = "an address of pod shop/web on node b of the cluster; its namespace has no row: rules by labels of \
                       it accept nothing";
        assert_eq!((told.health, told.summary.as_str()), (Health::Ok, summary));
        for (name, value) in [
            ("pod", "shop/web"),
            ("node", "b"),
            ("route", "in 10.101.0.0/24 of node b: packets to it go via 192.0.2.2"),
            ("labels", "k8s:app=web"),
            ("identity", "none until a policy is in force"),
        ] {
            assert_eq!(fact(&told, name), value);
        }
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        let told = explained(&agent, "10.101.0.9").await;
        assert!(fact(&told, "identity").parse::<u32>().is_ok_and(|number| number > 255), "{:?}", told.facts);
        let beside = explained(&agent, "10.101.0.8").await;
        assert_eq!(fact(&beside, "identity"), "7 (reserved:unknown-pod)");
    });
}
