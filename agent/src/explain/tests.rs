use std::{net::IpAddr, sync::Arc};

use wharf_cluster::{
    feed::{Change, Feed, FeedNode, FeedPod, Kind, Limits, Row},
    nodes::{NodeRow, Nodes},
    paths::Detours,
    routes::{self, Routing},
};
use wharf_core::{
    ids::Epoch,
    overlap::{NodeNetwork, Way},
};
use wharf_policy::{
    compile::{Listener, Share},
    model::Direction,
    requests::{HttpRule, Pattern, Requests},
};

use super::{cluster::Rows, *};
use crate::{cluster::InForce, proxy::Redirect};

#[test]
fn redirects_are_facts_of_their_endpoint_alone() {
    let id = |n: u16| EndpointId::try_from(n).expect("id");
    let path = |path: &str| HttpRule { path: Some(Pattern::Prefix(path.to_owned())), ..HttpRule::default() };
    let requests = Arc::new(Requests { http: [path("/a"), path("/b")].into(), ..Requests::default() });
    let listener = Arc::new(Listener { direction: Direction::Egress, requests, share: Share::default() });
    let redirect = Redirect { listener, members: [((id(7), Epoch(1)), Vec::new())].into(), rounds: [].into() };
    let look = Look { wanted: [(15_001, redirect)].into(), ..Look::default() };
    let words =
        "egress, port 15001 of the proxy: any method /a...; any method /b...; no proxy serves (Envoy is absent)";
    assert_eq!(redirects(&look, id(7)), [fact("redirect", words)]);
    assert_eq!(redirects(&look, id(8)), []);
}

fn node(name: &str, n: u8, cidr: &str) -> Row {
    Row::Node(FeedNode {
        name: name.to_owned(),
        uid: name.to_owned(),
        addresses: vec![[192, 0, 2, n].into()],
        pod_cidrs: vec![cidr.parse().expect("CIDR")],
        health_addresses: Vec::new(),
        router_addresses: Vec::new(),
    })
}

fn pod(name: &str, on: &str, address: &str) -> Row {
    Row::Pod(FeedPod {
        uid: format!("uid-of-{name}-{on}").into(),
        namespace: "shop".into(),
        name: name.into(),
        addresses: [address.parse().expect("address")].into(),
        node: on.into(),
        labels: Arc::default(),
        named_ports: Arc::default(),
    })
}

/// What node `a` knows of an address after these rows of the feed.
fn rows_of(rows: impl IntoIterator<Item = Row>, ip: &str) -> Rows<'static> {
    let mut feed = Feed::new("a", Limits::default());
    feed.open([Kind::Node, Kind::Pod].into());
    let begin = [Kind::Node, Kind::Pod].map(Change::Begin);
    for change in begin.into_iter().chain(rows.into_iter().map(Change::Put)) {
        feed.apply(change).expect("applied");
    }
    let network = |net: &str, way| NodeNetwork { net: net.parse().expect("network"), way, ifname: None };
    let lan = Way::OnLink { by_kernel: true, point_to_point: false };
    let networks = [network("192.0.2.0/24", lan), network("192.0.2.1/32", Way::Address)];
    let nodes = Nodes::new(feed.nodes().map(NodeRow::from).collect()).expect("nodes");
    let destinations = routes::destinations(&nodes, "a", Routing::Auto, &Detours::new(), &[], &[], &networks);
    let ip: IpAddr = ip.parse().expect("address");
    Rows {
        ip,
        own: "a",
        in_force: Arc::new(InForce { nodes, destinations, ..InForce::default() }),
        pod: feed.owner_of(ip).map(|pod| (pod.clone(), true)),
        conflicts: [Kind::Node, Kind::Pod].map(|kind| feed.conflicts_at(kind, ip)),
    }
}

fn explained(rows: &Rows<'_>) -> (Health, String, Vec<String>) {
    let elsewhere = rows.elsewhere().expect("a row claims it");
    let facts = elsewhere.facts.iter().map(|fact| format!("{}: {}", fact.name, fact.value)).collect();
    (elsewhere.health, elsewhere.summary, facts)
}

#[test]
fn a_network_that_several_nodes_claim_is_of_none() {
    let claims =
        |text: &str| format!("{text}, and this node has no route to it; `wharf cluster feed` lists the conflict");
    for (rows, ip, expected) in [
        (
            vec![node("c", 3, "10.9.0.0/24"), node("d", 4, "10.9.0.0/24")],
            "10.9.0.7",
            "nodes c and d both claim 10.9.0.0/24, so neither of them has it",
        ),
        (
            vec![node("c", 3, "10.9.0.0/24"), node("d", 4, "10.9.0.0/24"), node("a", 1, "10.9.0.0/24")],
            "10.9.0.7",
            "nodes a (this node), c and d all claim 10.9.0.0/24, so none of them has it",
        ),
        (
            vec![node("c", 3, "10.9.0.0/16"), node("d", 4, "10.9.5.0/24")],
            "10.9.7.1",
            "node c claims 10.9.0.0/16 and node d claims 10.9.5.0/24, which overlap, so neither of them has its claim",
        ),
    ] {
        assert_eq!(explained(&rows_of(rows, ip)), (Health::Degraded, claims(expected), Vec::new()));
    }
    let others = [node("c", 3, "10.9.0.0/24"), node("d", 4, "10.9.0.0/24")];
    assert!(rows_of(others, "10.9.1.7").elsewhere().is_none(), "outside the network in conflict");
}

#[test]
fn an_address_that_several_pods_claim_is_of_none() {
    let of_node = ["node: c", "route: in 10.9.0.0/24 of node c: packets to it go via 192.0.2.3"];
    let rows = [node("c", 3, "10.9.0.0/24"), pod("x", "c", "10.9.0.7"), pod("y", "d", "10.9.0.7")];
    let (health, summary, facts) = explained(&rows_of(rows, "10.9.0.7"));
    let expected = "pods shop/x and shop/y both claim 10.9.0.7, so neither of them has it; `wharf cluster feed` lists the conflict";
    assert_eq!((health, summary.as_str()), (Health::Degraded, expected));
    assert_eq!(facts, of_node);
    let rows = [node("c", 3, "10.9.0.0/24"), pod("x", "c", "10.9.0.7"), pod("x", "d", "10.9.0.7")];
    let (_, summary, _) = explained(&rows_of(rows, "10.9.0.7"));
    assert!(summary.starts_with("several rows of pod shop/x claim 10.9.0.7, so none of them has it;"), "{summary}");
}

#[test]
fn a_pod_in_a_network_that_several_nodes_claim_has_no_route() {
    let rows = [node("c", 3, "10.9.0.0/24"), node("d", 4, "10.9.0.0/24"), pod("x", "c", "10.9.0.7")];
    let (health, summary, facts) = explained(&rows_of(rows, "10.9.0.7"));
    assert_eq!((health, summary.as_str()), (Health::Degraded, "an address of pod shop/x on node c of the cluster"));
    assert_eq!(facts[..2], ["pod: shop/x", "node: c"]);
    assert!(facts[2].starts_with("route: nodes c and d both claim 10.9.0.0/24"), "{facts:?}");
    assert_eq!(facts[3..], ["labels: none"]);
}
