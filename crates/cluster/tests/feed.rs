//! The cluster feed: each rule by hand, then random histories against a naive model.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use proptest::{collection::vec, prelude::*, sample::subsequence};
use wharf_cluster::{
    feed::{
        ApplyError, Change, Feed, FeedNamespace, FeedNode, FeedPod, FeedPolicy, Key, Kind, Limits, Refusal, Row, State,
    },
    nodes::{NodeRow, Nodes},
};
use wharf_core::nat::Protocol;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

fn net(text: &str) -> IpNet {
    text.parse().expect("network")
}

fn a_node(name: &str, addresses: &[&str], cidrs: &[&str]) -> FeedNode {
    FeedNode {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        addresses: addresses.iter().copied().map(ip).collect(),
        pod_cidrs: cidrs.iter().copied().map(net).collect(),
        health_addresses: Vec::new(),
        router_addresses: Vec::new(),
    }
}

fn a_pod(uid: &str, addresses: &[&str]) -> FeedPod {
    FeedPod {
        uid: uid.into(),
        namespace: "default".into(),
        name: uid.into(),
        addresses: addresses.iter().copied().map(ip).collect(),
        node: "a".into(),
        labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]).into(),
        named_ports: BTreeMap::from([((Protocol::Tcp, "http".to_owned()), 80)]).into(),
    }
}

fn node(name: &str, addresses: &[&str], cidrs: &[&str]) -> Row {
    Row::Node(a_node(name, addresses, cidrs))
}

fn pod(uid: &str, addresses: &[&str]) -> Row {
    Row::Pod(a_pod(uid, addresses))
}

fn changed_pod(change: impl FnOnce(&mut FeedPod)) -> Row {
    let mut pod = a_pod("p1", &["10.1.0.1"]);
    change(&mut pod);
    Row::Pod(pod)
}

fn namespace(name: &str, labels: &[(&str, &str)]) -> Row {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Row::Namespace(FeedNamespace { name: name.to_owned(), labels })
}

fn policy(key: &str, text: &str) -> Row {
    Row::Policy(FeedPolicy { key: key.to_owned(), text: text.to_owned() })
}

fn key_of(row: &Row) -> Key {
    let key = match row {
        Row::Node(row) => row.name.as_str(),
        Row::Pod(row) => &row.uid,
        Row::Namespace(row) => &row.name,
        Row::Policy(row) => &row.key,
    };
    Key { kind: row.kind(), key: key.to_owned() }
}

fn delete(row: &Row) -> Change {
    Change::Delete(key_of(row))
}

fn snapshot(kind: Kind, rows: &[Row]) -> Vec<Change> {
    let of_kind = rows.iter().filter(|row| row.kind() == kind).cloned();
    let begun = [Change::Begin(kind)].into_iter().chain(of_kind.map(Change::Put));
    begun.chain([Change::Complete(kind)]).collect()
}

/// Snapshots of all kinds.
fn snapshots(rows: &[Row]) -> Vec<Change> {
    Kind::ALL.into_iter().flat_map(|kind| snapshot(kind, rows)).collect()
}

/// Refused rows are ignored.
fn play(feed: &mut Feed, changes: impl IntoIterator<Item = Change>) {
    for change in changes {
        if let Err(ApplyError::Protocol(why)) = feed.apply(change) {
            panic!("{why}");
        }
    }
}

fn open(feed: &mut Feed) {
    feed.open(BTreeSet::from(Kind::ALL));
}

/// A feed with these rows, without pending effects.
fn synced(rows: &[Row]) -> Feed {
    let mut feed = Feed::new("a", Limits::default());
    open(&mut feed);
    play(&mut feed, snapshots(rows));
    let _ = feed.take_effects();
    feed
}

fn refuse(feed: &mut Feed, row: Row) -> Refusal {
    match feed.apply(Change::Put(row)) {
        Err(ApplyError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

fn nodes(feed: &Feed) -> Vec<String> {
    let shown = |node: &FeedNode| {
        let addresses = node.addresses.iter().map(IpAddr::to_string);
        let parts: Vec<String> = addresses.chain(node.pod_cidrs.iter().map(IpNet::to_string)).collect();
        format!("{}: {}", node.name, parts.join(" "))
    };
    feed.nodes().map(shown).collect()
}

fn pods(feed: &Feed) -> Vec<String> {
    let shown = |pod: &FeedPod| {
        let addresses: Vec<String> = pod.addresses.iter().map(IpAddr::to_string).collect();
        format!("{}: {}", pod.uid, addresses.join(" "))
    };
    feed.pods_in_force().map(shown).collect()
}

fn refusals(feed: &Feed) -> Vec<String> {
    feed.refused().map(|refusal| refusal.to_string()).collect()
}

#[test]
fn rows_replace_at_once_and_are_removed_when_every_kind_is_complete() {
    let mut feed = synced(&[pod("p1", &["10.1.0.1"]), pod("p2", &["10.1.0.2"]), namespace("shop", &[])]);
    open(&mut feed);
    assert!(feed.take_effects().is_empty());
    play(&mut feed, snapshot(Kind::Pod, &[pod("p1", &["10.1.0.9"])]));
    assert_eq!(pods(&feed), ["p1: 10.1.0.9", "p2: 10.1.0.2"]);
    assert!(feed.take_effects().pods.keys().map(|uid| &**uid).eq(["p1"]));
    play(&mut feed, snapshot(Kind::Node, &[]));
    play(&mut feed, snapshot(Kind::Policy, &[]));
    assert!(feed.take_effects().is_empty());
    assert!(feed.is_complete(Kind::Pod) && !feed.is_complete(Kind::Namespace));
    play(&mut feed, snapshot(Kind::Namespace, &[]));
    assert_eq!(pods(&feed), ["p1: 10.1.0.9"]);
    let effects = feed.take_effects();
    assert_eq!(effects.pods, BTreeMap::from([("p2".into(), None)]));
    assert_eq!(effects.namespaces, BTreeMap::from([("shop".into(), None)]));
}

#[test]
fn a_delete_waits_for_the_end_of_the_snapshot() {
    let [p1, p2] = [pod("p1", &["10.1.0.1"]), pod("p2", &["10.1.0.2"])];
    let both = ["p1: 10.1.0.1", "p2: 10.1.0.2"];
    let mut feed = synced(&[p1.clone(), p2.clone()]);
    open(&mut feed);
    play(&mut feed, [Change::Begin(Kind::Pod), Change::Put(p1.clone()), delete(&p1), Change::Put(p2.clone())]);
    play(&mut feed, [Change::Complete(Kind::Pod)]);
    assert_eq!(pods(&feed), both, "other kinds are not complete");
    for kind in [Kind::Node, Kind::Namespace, Kind::Policy] {
        play(&mut feed, snapshot(kind, &[]));
    }
    assert_eq!(pods(&feed), ["p2: 10.1.0.2"]);

    // After the snapshot of its kind, but before the others.
    feed = synced(&[p1.clone(), p2.clone()]);
    open(&mut feed);
    play(&mut feed, snapshot(Kind::Pod, &[p1.clone(), p2.clone()]));
    play(&mut feed, [delete(&p1)]);
    assert_eq!(pods(&feed), ["p2: 10.1.0.2"], "no other kind says more about it");
    play(&mut feed, [delete(&p2), delete(&p2)]);
    assert!(pods(&feed).is_empty());
}

#[test]
fn a_later_snapshot_waits_for_no_other_kind() {
    let [p1, p2] = [pod("p1", &["10.1.0.1"]), pod("p2", &["10.1.0.2"])];
    let mut feed = synced(&[p1.clone(), p2.clone(), node("a", &["192.0.2.1"], &[])]);
    play(&mut feed, [Change::Begin(Kind::Node), Change::Begin(Kind::Pod), Change::Put(p2), delete(&p1)]);
    assert_eq!(pods(&feed).len(), 2);
    play(&mut feed, [Change::Complete(Kind::Pod)]);
    assert_eq!((pods(&feed).len(), nodes(&feed).len()), (1, 1));
    play(&mut feed, [Change::Complete(Kind::Node)]);
    assert!(nodes(&feed).is_empty());
    assert!(feed.take_effects().nodes);
}

#[test]
fn a_change_out_of_place_is_a_protocol_error() {
    let row = pod("p1", &["10.1.0.1"]);
    let mut feed = Feed::new("a", Limits::default());
    let refuse = |feed: &mut Feed, change: Change| {
        let before = feed.state();
        assert!(matches!(feed.apply(change.clone()), Err(ApplyError::Protocol(_))), "{change:?}");
        assert_eq!(feed.state(), before);
    };
    refuse(&mut feed, Change::Begin(Kind::Pod));
    feed.open(BTreeSet::from([Kind::Pod]));
    refuse(&mut feed, Change::Begin(Kind::Node));
    refuse(&mut feed, Change::Put(node("a", &["192.0.2.1"], &[])));
    refuse(&mut feed, Change::Put(row.clone()));
    refuse(&mut feed, delete(&row));
    refuse(&mut feed, Change::Complete(Kind::Pod));
    play(&mut feed, snapshot(Kind::Pod, std::slice::from_ref(&row)));
    refuse(&mut feed, Change::Complete(Kind::Pod));
    feed.close();
    refuse(&mut feed, delete(&row));
    assert_eq!(pods(&feed), ["p1: 10.1.0.1"]);
    assert!(feed.is_complete(Kind::Pod));
}

#[test]
fn a_confirmed_row_precedes_an_unconfirmed_one() {
    let mut feed = synced(&[
        node("a", &["192.0.2.1"], &["10.1.0.0/16", "fd00:1::/64"]),
        node("b", &["192.0.2.2"], &["10.2.0.0/16", "fd00:2::/64"]),
        pod("old", &["10.1.0.1"]),
    ]);
    open(&mut feed);
    let moved = node("a", &["192.0.2.1"], &["10.2.0.0/16", "fd00:1::/64"]);
    play(&mut feed, [Change::Begin(Kind::Node), Change::Put(moved)]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1 10.2.0.0/16 fd00:1::/64", "b: 192.0.2.2 fd00:2::/64"]);
    play(&mut feed, [Change::Put(node("b", &["192.0.2.2"], &["10.1.0.0/16"]))]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1 10.2.0.0/16 fd00:1::/64", "b: 192.0.2.2 10.1.0.0/16"]);

    play(&mut feed, [Change::Begin(Kind::Pod), Change::Put(pod("new", &["10.1.0.1"]))]);
    assert_eq!(&*feed.owner_of(ip("10.1.0.1")).expect("owner").uid, "new");
    assert_eq!(pods(&feed), ["new: 10.1.0.1", "old: "]);
    assert_eq!(feed.take_effects().pods.len(), 2);
    assert_eq!(refusals(&feed), [""; 0], "an unconfirmed row is not in conflict");
}

#[test]
fn what_two_rows_claim_is_of_neither_until_the_conflict_ends() {
    let b = node("b", &["192.0.2.2"], &["10.1.9.0/24", "fd00:2::/64"]);
    let p2 = pod("p2", &["10.1.0.1"]);
    let mut feed = synced(&[
        node("a", &["192.0.2.1"], &["10.1.0.0/16", "fd00:1::/64"]),
        b.clone(),
        pod("p1", &["10.1.0.1", "fd00:1::1"]),
        p2.clone(),
    ]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1 fd00:1::/64", "b: 192.0.2.2 fd00:2::/64"]);
    assert_eq!(pods(&feed), ["p1: fd00:1::1", "p2: "]);
    assert_eq!(feed.owner_of(ip("10.1.0.1")), None);
    assert_eq!(
        refusals(&feed),
        [
            "node a: 10.1.0.0/16 overlaps 10.1.9.0/24 of node b",
            "node b: 10.1.9.0/24 overlaps 10.1.0.0/16 of node a",
            "pod default/p1: 10.1.0.1 is claimed by pod default/p2, too",
            "pod default/p2: 10.1.0.1 is claimed by pod default/p1, too",
        ]
    );
    assert!(feed.refused().all(|refusal| refusal.conflict && !refusal.stale));
    assert_eq!(feed.counts()[&Kind::Node].conflicts, 2);

    play(&mut feed, [Change::Put(node("b", &["192.0.2.2"], &["10.2.0.0/16"])), delete(&p2)]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1 10.1.0.0/16 fd00:1::/64", "b: 192.0.2.2 10.2.0.0/16"]);
    assert_eq!(pods(&feed), ["p1: 10.1.0.1 fd00:1::1"]);
    let effects = feed.take_effects();
    assert!(effects.nodes && effects.pods.keys().map(|uid| &**uid).eq(["p1", "p2"]));
    assert_eq!(refusals(&feed), [""; 0]);

    // A node without an address in force is not in force.
    play(&mut feed, [Change::Put(node("b", &["10.1.0.9"], &["10.2.0.0/16"]))]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1 fd00:1::/64"]);
    play(&mut feed, [Change::Put(node("a", &["192.0.2.1"], &[]))]);
    assert_eq!(nodes(&feed), ["a: 192.0.2.1", "b: 10.1.0.9 10.2.0.0/16"]);
}

#[test]
fn a_row_that_breaks_a_rule_is_refused() {
    let label = |key: &str, value: &str| {
        let label = (key.to_owned(), value.to_owned());
        changed_pod(|pod| Arc::make_mut(&mut pod.labels).extend([label]))
    };
    let port = |name: &str, number: u16| {
        let port = ((Protocol::Udp, name.to_owned()), number);
        changed_pod(|pod| Arc::make_mut(&mut pod.named_ports).extend([port]))
    };
    let nine: Vec<String> = (1..10).map(|i| format!("10.1.0.{i}")).collect();
    let nine: Vec<&str> = nine.iter().map(String::as_str).collect();
    for (row, why) in [
        (node("a b", &["192.0.2.1"], &[]), "a node's name has 1 to 253 letters"),
        (node("a", &[], &[]), "it has no address"),
        (node("a", &["127.0.0.1"], &[]), "127.0.0.1 is no address"),
        (node("a", &["192.0.2.1", "192.0.2.1"], &[]), "192.0.2.1 is listed twice"),
        (node("a", &nine, &[]), "it has 9 addresses; at most 8 fit"),
        (node("a", &["192.0.2.1"], &["10.1.0.1/16"]), "10.1.0.1/16 has host bits; write 10.1.0.0/16"),
        (node("a", &["192.0.2.1"], &["0.0.0.0/0"]), "0.0.0.0/0 is no range for containers"),
        (node("a", &["192.0.2.1"], &["10.0.0.0/8", "10.1.0.0/16"]), "10.1.0.0/16 overlaps 10.0.0.0/8"),
        (node("a", &["10.1.0.1"], &["10.1.0.0/16"]), "10.1.0.1 is in the pod CIDR 10.1.0.0/16"),
        (pod("", &["10.1.0.1"]), "a pod's uid"),
        (pod("p1", &["fe80::1"]), "fe80::1 is no address"),
        (pod("p1", &["::ffff:10.1.0.1"]), "is no address"),
        (pod("p1", &nine), "it has 9 addresses; at most 8 fit"),
        (changed_pod(|pod| pod.namespace = "-x".into()), "a namespace's name"),
        (changed_pod(|pod| pod.name = "a/b".into()), "a pod's name"),
        (changed_pod(|pod| pod.node = "".into()), "a node's name"),
        (label("a b", ""), "\"a b\" is no label key"),
        (label("x.Y/a", ""), "\"x.Y/a\" is no label key"),
        (label("x.y/a", "\u{1b}[2J"), "\"\\u{1b}[2J\" is no value of label x.y/a"),
        (label("a", &"x".repeat(1 << 20)), "\"xxx"),
        (port("HTTP", 80), "invalid port name"),
        (port("http", 0), "port http has the number 0"),
        (namespace("", &[]), "a namespace's name"),
        (namespace("shop", &[("=", "")]), "is no label key"),
        (policy("", ""), "a policy's key"),
        (policy("a\nb", ""), "a policy's key"),
        (policy("p", &"x".repeat((3 << 19) + 1)), "its text has 1572865 bytes; at most 1572864 fit"),
    ] {
        let mut feed = synced(&[]);
        let key = key_of(&row);
        let refusal = refuse(&mut feed, row);
        assert!(refusal.why.contains(why) && refusal.why.len() < 500, "{refusal} instead of {why}");
        assert_eq!((&refusal.key, refusal.stale, refusal.conflict), (&key, false, false));
        assert_eq!(feed.refused().collect::<Vec<_>>(), [refusal]);
        assert_eq!(feed.counts()[&key.kind].refused, 1);
        assert!(feed.take_effects().is_empty());
        play(&mut feed, [Change::Delete(key)]);
        assert_eq!(refusals(&feed), [""; 0]);
    }
}

#[test]
fn health_and_router_addresses_outside_the_pod_cidrs_in_force_have_no_effect() {
    let b = |cidrs: &[&str]| FeedNode {
        health_addresses: vec![ip("10.2.0.2"), ip("10.1.0.2")],
        router_addresses: vec![ip("10.2.0.1"), ip("192.0.2.9")],
        ..a_node("b", &["192.0.2.2"], cidrs)
    };
    let in_force = |feed: &Feed| {
        let row = NodeRow::from(feed.nodes().find(|node| node.name == "b").expect("node b"));
        (row.health_addresses, row.router_addresses)
    };
    let mut feed = synced(&[node("a", &["192.0.2.1"], &["10.1.0.0/16"]), Row::Node(b(&["10.2.0.0/16"]))]);
    assert_eq!(in_force(&feed), (vec![ip("10.2.0.2")], vec![ip("10.2.0.1")]));
    // Another node claims the network, too.
    play(&mut feed, [Change::Put(node("a", &["192.0.2.1"], &["10.2.0.0/16"]))]);
    assert_eq!(in_force(&feed), (Vec::new(), Vec::new()));
    let both = FeedNode { router_addresses: vec![ip("10.2.0.2")], ..b(&["10.2.0.0/16"]) };
    assert_eq!(refuse(&mut feed, Row::Node(both)).why, "10.2.0.2 is a health address and a router address");
}

#[test]
fn a_refused_update_leaves_its_predecessor_in_force() {
    let row = pod("p1", &["10.1.0.1"]);
    let mut feed = synced(std::slice::from_ref(&row));
    let refusal = refuse(&mut feed, pod("p1", &["127.0.0.1"]));
    assert!(refusal.stale);
    assert_eq!((refusal.name.as_str(), pods(&feed)), ("default/p1", vec!["p1: 10.1.0.1".to_owned()]));
    let count = feed.counts()[&Kind::Pod];
    assert_eq!((count.in_force, count.refused, count.stale, count.conflicts), (1, 1, 1, 0));

    // It survives a snapshot that sends the refused row again.
    open(&mut feed);
    play(&mut feed, snapshots(&[pod("p1", &["127.0.0.1"])]));
    assert_eq!(pods(&feed), ["p1: 10.1.0.1"]);
    // A confirmed row precedes it.
    play(&mut feed, [Change::Put(pod("p2", &["10.1.0.1"]))]);
    assert_eq!(pods(&feed), ["p1: ", "p2: 10.1.0.1"]);

    play(&mut feed, [delete(&row)]);
    assert_eq!((pods(&feed), refusals(&feed)), (vec!["p2: 10.1.0.1".to_owned()], vec![]));
    let _ = refuse(&mut feed, pod("p2", &["127.0.0.1"]));
    play(&mut feed, [Change::Put(pod("p2", &["10.1.0.2"]))]);
    assert_eq!((pods(&feed), refusals(&feed)), (vec!["p2: 10.1.0.2".to_owned()], vec![]));
}

#[test]
fn a_row_that_the_caller_cannot_read_is_refused_with_its_cause() {
    let row = policy("NetworkPolicy shop/web", "kind: Nothing");
    let mut feed = synced(&[policy("NetworkPolicy shop/web", "{}")]);
    assert!(matches!(feed.refuse(row.clone(), "no kind".to_owned()), Err(ApplyError::Refused(why)) if why.stale));
    assert_eq!(refusals(&feed), ["policy NetworkPolicy shop/web: no kind"]);
    assert!(feed.take_effects().is_empty());
    play(&mut feed, [delete(&row)]);
    assert_eq!((refusals(&feed), feed.take_effects().policies.len()), (vec![], 1));
    feed.close();
    assert!(matches!(feed.refuse(row, String::new()), Err(ApplyError::Protocol(_))));
}

#[test]
fn unchanged_rows_have_no_effect() {
    let rows = [
        node("a", &["192.0.2.1"], &["10.1.0.0/16"]),
        pod("p1", &["10.1.0.1", "fd00::1"]),
        namespace("shop", &[("team", "x")]),
        policy("NetworkPolicy shop/web", "{}"),
    ];
    let mut feed = synced(&rows);
    play(&mut feed, rows.iter().cloned().map(Change::Put));
    open(&mut feed);
    play(&mut feed, snapshots(&rows));
    // There and back.
    play(&mut feed, [Change::Put(pod("p1", &["10.1.0.9"])), Change::Put(rows[1].clone())]);
    play(&mut feed, [Change::Put(pod("p2", &[])), delete(&pod("p2", &[]))]);
    assert!(feed.take_effects().is_empty());
}

#[test]
fn a_namespace_has_its_name_as_a_label() {
    let mut feed = Feed::new("a", Limits::default());
    open(&mut feed);
    play(&mut feed, snapshots(&[namespace("shop", &[("team", "x")])]));
    let row = feed.take_effects().namespaces.remove("shop").flatten().expect("a row");
    let labels: Vec<_> = row.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(labels, [("kubernetes.io/metadata.name", "shop"), ("team", "x")]);
}

#[test]
fn rows_beyond_a_limit_are_refused() {
    let pod = |uid: &str| pod(uid, &[]);
    let limits = Limits { pods: 2, labels: 1, ..Limits::default() };
    let mut feed = Feed::new("a", limits);
    open(&mut feed);
    play(&mut feed, snapshots(&[pod("p1"), pod("p2")]));
    for i in 3..10 {
        assert!(refuse(&mut feed, pod(&format!("p{i}"))).why.contains("2 rows of this kind are the limit"));
    }
    assert_eq!((pods(&feed).len(), refusals(&feed).len()), (2, 2), "refusals are bounded, too");
    play(&mut feed, [Change::Put(pod("p1")), delete(&pod("p1")), Change::Put(pod("p3"))]);
    assert_eq!(pods(&feed), ["p2: ", "p3: "]);

    // A snapshot may replace all rows.
    open(&mut feed);
    let changes = snapshots(&[pod("q1"), pod("q2"), pod("q3"), pod("p2")]);
    play(&mut feed, changes);
    assert_eq!(pods(&feed), ["q1: ", "q2: "]);
    assert_eq!(refusals(&feed).len(), 2);
    // Streams that never end do not add rows without a bound.
    for i in 0..10 {
        open(&mut feed);
        play(&mut feed, [Change::Begin(Kind::Pod), Change::Put(pod(&format!("r{i}"))), Change::Put(pod("s"))]);
    }
    assert_eq!(pods(&feed).len(), 4);

    play(&mut feed, snapshots(&[]));
    assert_eq!(refuse(&mut feed, namespace_with(&["a", "b"])).why, "it has 2 labels; at most 1 fit");
    assert_eq!(feed.refused_namespaces(), ["x".to_owned()].into());
    play(&mut feed, [Change::Put(namespace_with(&["a", "kubernetes.io/metadata.name"]))]);
    assert!(refuse(&mut feed, namespace_with(&["a", "b"])).stale);
    assert!(feed.refused_namespaces().is_empty(), "its earlier labels are in force");

    // Keys are cut.
    let long = pod(&"ä".repeat(10_000));
    feed = synced(&[]);
    let refusal = refuse(&mut feed, long.clone());
    assert!(refusal.key.key.len() < 520 && refusal.name.len() < 520);
    play(&mut feed, [delete(&long)]);
    assert_eq!(refusals(&feed), [""; 0]);
}

#[test]
fn the_bytes_of_a_kind_are_bounded() {
    let text = |bytes: usize| "x".repeat(bytes);
    let mut feed = Feed::new("a", Limits { bytes: 2_000, ..Limits::default() });
    open(&mut feed);
    let two = [policy("p1", &text(800)), policy("p2", &text(800))];
    play(&mut feed, snapshots(&two));
    let beyond = "the rows of this kind have 2000 bytes, which is the limit";
    assert_eq!(refuse(&mut feed, policy("p3", &text(800))).why, beyond);
    let refusal = refuse(&mut feed, policy("p1", &text(1_400)));
    assert!(refusal.why == beyond && refusal.stale, "{refusal:?}");
    play(&mut feed, [Change::Put(policy("p1", &text(10))), Change::Put(policy("p3", &text(700)))]);
    assert_eq!(refusals(&feed), [""; 0]);
    // A file of an agent with a higher limit.
    let state = feed.state();
    let restored = Feed::restore("a", Limits { bytes: 1_000, ..Limits::default() }, state);
    assert_eq!(restored.counts()[&Kind::Policy].in_force, 2);
    // Another stream, and the end of its snapshot.
    open(&mut feed);
    play(&mut feed, snapshots(&[policy("p4", &text(1_800))]));
    assert_eq!(refusals(&feed), [format!("policy p4: {beyond}")], "the earlier rows count until the end");
    play(&mut feed, [Change::Put(policy("p4", &text(1_800)))]);
    assert_eq!(refusals(&feed), [""; 0]);
}

fn namespace_with(keys: &[&str]) -> Row {
    let labels: Vec<_> = keys.iter().map(|key| (*key, "x")).collect();
    namespace("x", &labels)
}

#[test]
fn the_state_in_force_survives_a_restart() {
    let mut feed = synced(&[
        node("a", &["192.0.2.1"], &["10.1.0.0/16", "fd00:1::/64"]),
        node("b", &["192.0.2.2"], &["10.1.0.0/24"]),
        pod("p1", &["10.1.0.1", "10.1.0.2"]),
        pod("p2", &["10.1.0.1"]),
        namespace("shop", &[("team", "x")]),
        policy("NetworkPolicy shop/web", "{}"),
    ]);
    let state = feed.state();
    let written = toml::Value::try_from(state.rest()).expect("written");
    let read: State = written.try_into().expect("read");
    assert_eq!(read.nodes(), []);
    assert_eq!(read.with_nodes(state.nodes().to_vec()), state);

    let mut restored = Feed::restore("a", Limits::default(), state.clone());
    assert_eq!(restored.state(), state);
    let effects = restored.take_effects();
    assert!(effects.nodes);
    assert_eq!((effects.pods.len(), effects.namespaces.len(), effects.policies.len()), (2, 1, 1));
    assert_eq!(effects.pods.into_values().flatten().filter(|pod| pod.is_of("a")).count(), 2);
    assert_eq!(restored.own_node().expect("own node").addresses, [ip("192.0.2.1")]);
    assert!(!restored.is_complete(Kind::Pod));

    for feed in [&mut feed, &mut restored] {
        open(feed);
        feed.close();
        assert_eq!(feed.state(), state);
        assert!(feed.take_effects().is_empty());
        open(feed);
        play(feed, snapshots(&[pod("p1", &["10.1.0.1", "10.1.0.2"])]));
        assert_eq!((pods(feed), nodes(feed)), (vec!["p1: 10.1.0.1 10.1.0.2".to_owned()], vec![]));
    }
}

#[test]
fn pods_share_equal_values_also_after_a_restart() {
    let feed = synced(&[pod("p1", &["10.1.0.1"]), pod("p2", &["10.1.0.2"])]);
    let written = toml::Value::try_from(feed.state().rest()).expect("written");
    let mut restored = Feed::restore("a", Limits::default(), written.try_into().expect("read"));
    open(&mut restored);
    play(&mut restored, [Change::Begin(Kind::Pod), Change::Put(pod("p3", &["10.1.0.3"]))]);
    for mut feed in [feed, restored] {
        let first = feed.pod("p1").expect("a pod").clone();
        for pod in feed.pods_in_force() {
            assert!(Arc::ptr_eq(&pod.labels, &first.labels) && Arc::ptr_eq(&pod.named_ports, &first.named_ports));
            assert!(Arc::ptr_eq(&pod.namespace, &first.namespace) && Arc::ptr_eq(&pod.node, &first.node));
        }
        play(&mut feed, [Change::Put(pod("p1", &["10.1.0.9"]))]);
        let changed = feed.pod("p1").expect("a pod").clone();
        assert!(Arc::ptr_eq(&changed.labels, &first.labels) && Arc::ptr_eq(&changed.uid, &first.uid));
        let effects = feed.take_effects().pods;
        let (uid, taken) = effects.get_key_value("p1").expect("an effect");
        let taken = taken.as_ref().expect("the pod");
        assert!(Arc::ptr_eq(uid, &first.uid) && Arc::ptr_eq(&taken.addresses, &changed.addresses));
    }
}

#[test]
fn a_set_of_labels_is_written_once_and_a_file_of_an_earlier_version_is_read() {
    let other = |pod: &mut FeedPod| pod.uid = "p2".into();
    let bare = |pod: &mut FeedPod| (pod.uid, pod.labels) = ("p3".into(), Arc::default());
    let state = synced(&[changed_pod(|_| {}), changed_pod(other), changed_pod(bare)]).state();
    let written = toml::Value::try_from(state.rest()).expect("written");
    let index = |pod: usize| written["pods"][pod]["label_set"].as_integer();
    assert_eq!([0, 1, 2].map(index), [Some(0), Some(0), Some(1)]);
    assert_eq!(written["label_sets"].as_array().map(Vec::len), Some(2));
    let read = |change: &dyn Fn(&mut toml::Table, toml::Value)| {
        let mut written = written.clone();
        let sets = written["label_sets"].clone();
        for pod in written["pods"].as_array_mut().expect("pods") {
            let pod = pod.as_table_mut().expect("a pod");
            let set = usize::try_from(pod["label_set"].as_integer().expect("an index")).expect("positive");
            change(pod, sets[set].clone());
        }
        written.try_into::<State>()
    };
    let earlier = read(&|pod, labels| drop((pod.remove("label_set"), pod.insert("labels".to_owned(), labels))));
    assert_eq!(earlier.expect("read"), state);
    let damaged = |change: &dyn Fn(&mut toml::Table, toml::Value)| read(change).expect_err("damaged").to_string();
    assert!(damaged(&|pod, _| drop(pod.insert("label_set".to_owned(), 2.into()))).contains("no set of labels"));
    assert!(damaged(&|pod, _| drop(pod.remove("label_set"))).contains("no set of labels"));
    assert!(damaged(&|pod, labels| drop(pod.insert("labels".to_owned(), labels))).contains("no set of labels"));
    damaged(&|pod, _| drop(pod.insert("label_set".to_owned(), (-1).into())));
}

/// A pod costs the same, whatever the others are: quadratic costs would take hours.
#[test]
fn many_pods_of_one_address_cost_as_much_as_others() {
    let count = 30_000;
    let uid = |i: usize| format!("p{i:05}");
    let mut feed = synced(&[]);
    let shared = (0..count).map(|i| Change::Put(pod(&uid(i), &["10.1.0.1", "fd00::1"])));
    play(&mut feed, shared);
    assert_eq!(feed.owner_of(ip("10.1.0.1")), None);
    assert_eq!(feed.counts()[&Kind::Pod].conflicts, count);
    play(&mut feed, (1..count).map(|i| delete(&pod(&uid(i), &[]))));
    assert_eq!(pods(&feed), ["p00000: 10.1.0.1 fd00::1"]);
}

// Random histories.

const NODE_ADDRESSES: [&str; 5] = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "10.1.1.9", "127.0.0.1"];
const CIDRS: [&str; 7] =
    ["10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24", "10.2.0.0/16", "10.2.0.0/24", "fd00::/48", "fd00:0:0:1::/64"];
const POD_ADDRESSES: [&str; 4] = ["10.1.1.1", "10.1.1.2", "fd00::1", "224.0.0.1"];

fn node_row() -> impl Strategy<Value = Row> {
    let parts = ("[a-d]", subsequence(NODE_ADDRESSES.to_vec(), 1..=2), subsequence(CIDRS.to_vec(), 0..=2));
    parts.prop_map(|(name, addresses, cidrs)| node(&name, &addresses, &cidrs))
}

fn pod_row() -> impl Strategy<Value = Row> {
    let parts = ("[p-s]", subsequence(POD_ADDRESSES.to_vec(), 0..=2), "[ab]");
    parts.prop_map(|(uid, addresses, node)| Row::Pod(FeedPod { node: node.into(), ..a_pod(&uid, &addresses) }))
}

fn other_row() -> impl Strategy<Value = Row> {
    let name = prop_oneof![3 => Just("shop"), 1 => Just("Bad name\n"), 2 => Just("db")];
    let labels = |value: String| [("team".to_owned(), value)].into();
    (name, "[xy]", any::<bool>()).prop_map(move |(name, value, is_policy)| {
        if is_policy {
            policy(name, &value)
        } else {
            Row::Namespace(FeedNamespace { name: name.to_owned(), labels: labels(value) })
        }
    })
}

/// Rows with different keys.
fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = prop_oneof![3 => node_row(), 3 => pod_row(), 1 => other_row()];
    vec(row, 0..14).prop_map(|rows| {
        let mut seen = BTreeSet::new();
        rows.into_iter().filter(|row| seen.insert(key_of(row))).collect()
    })
}

fn permuted_rows() -> impl Strategy<Value = (Vec<Row>, Vec<Row>)> {
    rows().prop_flat_map(|rows| (Just(rows.clone()), Just(rows).prop_shuffle()))
}

/// Snapshots of all kinds at the same time.
fn interleaved(rows: &[Row], turns: &[usize]) -> Vec<Change> {
    let mut queues = Kind::ALL.map(|kind| VecDeque::from(snapshot(kind, rows)));
    let mut changes: Vec<Change> = turns.iter().filter_map(|turn| queues[*turn].pop_front()).collect();
    changes.extend(queues.into_iter().flatten());
    changes
}

proptest! {
    #[test]
    fn the_order_of_rows_and_kinds_has_no_influence(
        before in rows(),
        (rows, shuffled) in permuted_rows(),
        turns in vec(0..4_usize, 0..40),
    ) {
        let mut one = synced(&before);
        let mut other = one.clone();
        open(&mut one);
        play(&mut one, snapshots(&rows));
        open(&mut other);
        play(&mut other, interleaved(&shuffled, &turns));
        prop_assert_eq!(one.state(), other.state());
        prop_assert_eq!(one.refused().collect::<Vec<_>>(), other.refused().collect::<Vec<_>>());
        prop_assert_eq!(one.counts(), other.counts());
        prop_assert_eq!(one.take_effects(), other.take_effects());
    }
}

#[derive(Debug, Clone)]
enum Op {
    Open(BTreeSet<Kind>),
    Apply(Change),
    Take,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let kind = prop_oneof![Just(Kind::Node), Just(Kind::Pod)];
    let kinds = subsequence(vec![Kind::Node, Kind::Pod], 1..=2);
    prop_oneof![
        10 => node_row().prop_map(|row| Op::Apply(Change::Put(row))),
        10 => pod_row().prop_map(|row| Op::Apply(Change::Put(row))),
        3 => node_row().prop_map(|row| Op::Apply(delete(&row))),
        3 => pod_row().prop_map(|row| Op::Apply(delete(&row))),
        3 => kind.clone().prop_map(|kind| Op::Apply(Change::Begin(kind))),
        5 => kind.prop_map(|kind| Op::Apply(Change::Complete(kind))),
        2 => kinds.prop_map(|kinds| Op::Open(kinds.into_iter().collect())),
        3 => Just(Op::Take),
        1 => Just(Op::Restart),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Confirmed,
    Stale,
    Unconfirmed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Snapshot,
    Complete,
}

/// The rules, without an index.
#[derive(Debug, Default)]
struct Naive {
    rows: BTreeMap<Key, (Row, Standing)>,
    phases: BTreeMap<Kind, Phase>,
    is_synced: bool,
}

fn claims(row: &Row) -> Vec<IpNet> {
    match row {
        Row::Node(node) => {
            node.addresses.iter().copied().map(IpNet::from).chain(node.pod_cidrs.iter().copied()).collect()
        }
        Row::Pod(pod) => pod.addresses.iter().copied().map(IpNet::from).collect(),
        Row::Namespace(_) | Row::Policy(_) => Vec::new(),
    }
}

impl Naive {
    fn owns(&self, key: &Key, standing: Standing, net: IpNet) -> bool {
        let mut others = self.rows.iter().filter(|(other, _)| other.kind == key.kind && *other != key);
        !others.any(|(_, (row, of_other))| {
            *of_other <= standing && claims(row).iter().any(|other| other.contains(&net) || net.contains(other))
        })
    }

    fn in_force(&self) -> BTreeMap<Key, Row> {
        let reduced = |(key, (row, standing)): (&Key, &(Row, Standing))| {
            let mut row = row.clone();
            match &mut row {
                Row::Node(node) => {
                    node.addresses.retain(|address| self.owns(key, *standing, IpNet::from(*address)));
                    node.pod_cidrs.retain(|cidr| self.owns(key, *standing, *cidr));
                    if node.addresses.is_empty() {
                        return None;
                    }
                }
                Row::Pod(pod) => {
                    let owns = |address: &IpAddr| self.owns(key, *standing, IpNet::from(*address));
                    pod.addresses = pod.addresses.iter().copied().filter(owns).collect();
                }
                Row::Namespace(_) | Row::Policy(_) => {}
            }
            Some((key.clone(), row))
        };
        self.rows.iter().filter_map(reduced).collect()
    }

    fn unconfirm(&mut self, kinds: &[Kind]) {
        let in_force = self.in_force();
        self.rows.retain(|key, _| !kinds.contains(&key.kind));
        let unconfirmed = in_force.into_iter().filter(|(key, _)| kinds.contains(&key.kind));
        self.rows.extend(unconfirmed.map(|(key, row)| (key, (row, Standing::Unconfirmed))));
    }

    fn open(&mut self, kinds: &BTreeSet<Kind>) {
        self.unconfirm(&Kind::ALL);
        self.phases = kinds.iter().map(|kind| (*kind, Phase::Waiting)).collect();
        self.is_synced = false;
    }

    /// `false`: a protocol error. `refused`: the row breaks a rule.
    fn apply(&mut self, change: Change, refused: bool) -> bool {
        let kind = change.kind();
        let Some(phase) = self.phases.get(&kind).copied() else { return false };
        match change {
            Change::Begin(_) => {
                if phase != Phase::Waiting {
                    self.unconfirm(&[kind]);
                }
                self.phases.insert(kind, Phase::Snapshot);
            }
            Change::Complete(_) => {
                if phase != Phase::Snapshot {
                    return false;
                }
                self.phases.insert(kind, Phase::Complete);
                let all = self.phases.values().all(|phase| *phase == Phase::Complete);
                let ends = |of: Kind| if self.is_synced { of == kind } else { all && self.phases.contains_key(&of) };
                self.rows.retain(|key, (_, standing)| !ends(key.kind) || *standing != Standing::Unconfirmed);
                self.is_synced |= all;
            }
            _ if phase == Phase::Waiting => return false,
            Change::Put(row) if refused => {
                if let Some((_, standing)) = self.rows.get_mut(&key_of(&row)) {
                    *standing = Standing::Stale;
                }
            }
            Change::Put(row) => drop(self.rows.insert(key_of(&row), (row, Standing::Confirmed))),
            Change::Delete(key) if phase == Phase::Complete => drop(self.rows.remove(&key)),
            Change::Delete(key) => {
                if let Some((_, standing)) = self.rows.get_mut(&key) {
                    *standing = Standing::Unconfirmed;
                }
            }
        }
        true
    }
}

fn in_force(feed: &Feed) -> BTreeMap<Key, Row> {
    let nodes = feed.nodes().cloned().map(Row::Node);
    nodes.chain(feed.pods_in_force().cloned().map(Row::Pod)).map(|row| (key_of(&row), row)).collect()
}

/// What a consumer of effects knows.
#[derive(Default)]
struct Consumer {
    nodes: Vec<FeedNode>,
    pods: BTreeMap<Arc<str>, Arc<FeedPod>>,
}

impl Consumer {
    fn take(&mut self, feed: &mut Feed) {
        let effects = feed.take_effects();
        let nodes: Vec<FeedNode> = feed.nodes().cloned().collect();
        assert_eq!(effects.nodes, nodes != self.nodes);
        self.nodes = nodes;
        for (uid, pod) in effects.pods {
            assert_ne!(self.pods.get(&uid), pod.as_ref(), "no change of {uid}");
            match pod {
                Some(pod) => drop(self.pods.insert(uid, pod)),
                None => drop(self.pods.remove(&uid)),
            }
        }
        assert!(self.pods.values().map(|pod| &**pod).eq(feed.pods_in_force()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_history_has_the_rows_in_force_of_the_naive_rules(ops in vec(op(), 1..80)) {
        let mut feed = Feed::new("a", Limits::default());
        let mut naive = Naive::default();
        let mut consumer = Consumer::default();
        let kinds = BTreeSet::from([Kind::Node, Kind::Pod]);
        let begun = [Kind::Node, Kind::Pod].map(|kind| Op::Apply(Change::Begin(kind)));
        for op in [Op::Open(kinds)].into_iter().chain(begun).chain(ops) {
            match op {
                Op::Open(kinds) => {
                    naive.open(&kinds);
                    feed.open(kinds);
                }
                Op::Apply(change) => {
                    let result = feed.apply(change.clone());
                    let refused = matches!(result, Err(ApplyError::Refused(_)));
                    prop_assert_eq!(naive.apply(change, refused), !matches!(result, Err(ApplyError::Protocol(_))));
                }
                Op::Take => consumer.take(&mut feed),
                Op::Restart => {
                    feed = Feed::restore("a", Limits::default(), feed.state());
                    naive.open(&BTreeSet::new());
                    consumer = Consumer::default();
                }
            }
            let wanted = naive.in_force();
            let found = in_force(&feed);
            prop_assert_eq!(&found, &wanted);
            for address in POD_ADDRESSES.map(ip) {
                let owner = wanted.values().find(|row| matches!(row, Row::Pod(pod) if pod.addresses.contains(&address)));
                prop_assert_eq!(feed.owner_of(address).cloned().map(Row::Pod), owner.cloned());
            }
            prop_assert!(Nodes::new(feed.nodes().map(NodeRow::from).collect()).is_ok());
        }
        consumer.take(&mut feed);
    }
}
