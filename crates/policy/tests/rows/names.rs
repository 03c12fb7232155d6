//! Names of DNS whose addresses change, and patterns that come into use and go.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use wharf_policy::{
    compile::{Change, EndpointKey, Engine, Event, Known, Limits, Refused, Table},
    model::{Direction, Directions, Peer, Policy},
    names::NamePattern,
    oracle::Destination,
};

use crate::{
    ROOMY,
    by_hand::{admits, labelled},
    member,
};

fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().expect("address")).collect()
}

fn name(name: &str, texts: &[&str]) -> Event {
    Event::Name(name.into(), addresses(texts))
}

fn endpoint(key: u32, app: &str) -> Event {
    Event::Endpoint(EndpointKey(key), member(&labelled(key, app)))
}

/// Endpoints "a" may send to the names, and to nobody else.
fn sends(number: u32, patterns: &[&str]) -> Policy {
    let mut policy = admits(number, "a", &[]);
    let peer = |text: &&str| Peer::Names(NamePattern::pattern(text).expect("a pattern"));
    policy.isolates = Directions { ingress: false, egress: true };
    policy.rules[0].direction = Direction::Egress;
    policy.rules[0].peers = Some(patterns.iter().map(peer).collect());
    policy
}

/// An endpoint "a" that may send to `*.example`, of which one name is known.
fn engine() -> Engine {
    let mut engine = Engine::new(ROOMY);
    let policy = Event::Policy(sends(0, &["*.example"]));
    engine.apply([policy, endpoint(1, "a"), name("a.example", &["203.0.113.1"])]).expect("it fits");
    engine
}

fn row(engine: &Engine, address: &str) -> Option<Known> {
    engine.tables().ipcache.get(&IpNet::from(address.parse::<IpAddr>().expect("address"))).copied()
}

fn net(address: &str) -> IpNet {
    IpNet::from(address.parse::<IpAddr>().expect("address"))
}

fn passes(engine: &Engine, address: &str) -> bool {
    let (peer, destination) = (address.parse().expect("address"), Destination::Other(47));
    engine.tables().decide(EndpointKey(1), Direction::Egress, peer, destination).expect("the endpoint").accept
}

#[test]
fn an_address_that_joins_or_leaves_a_class_that_is_there_changes_one_row() {
    let mut engine = engine();
    let first = row(&engine, "203.0.113.1").expect("a row");
    for (texts, changes) in [
        (&["203.0.113.2"][..], vec![Change::PutAddress(net("203.0.113.2"), first)]),
        (&["203.0.113.2", "2001:db8::7"], vec![Change::PutAddress(net("2001:db8::7"), first)]),
        (&["203.0.113.2", "2001:db8::7"], vec![]),
        (&["2001:db8::7"], vec![Change::DropAddress(net("203.0.113.2"))]),
        (&[], vec![Change::DropAddress(net("2001:db8::7"))]),
        (&[], vec![]),
    ] {
        assert_eq!(engine.apply([name("b.example", texts)]).expect("it fits"), changes, "{texts:?}");
        assert_eq!(passes(&engine, "203.0.113.2"), texts.contains(&"203.0.113.2"));
    }
}

#[test]
fn a_name_that_no_pattern_in_use_matches_changes_nothing_until_one_does() {
    let mut engine = engine();
    let nobodys = Policy { subject: crate::by_hand::app("nobody"), ..sends(1, &["b.test"]) };
    let changes = engine.apply([Event::Policy(nobodys)]).expect("it fits");
    assert!(changes.iter().all(|change| matches!(change, Change::PutOrigin(..))), "{changes:?}");
    let events = [name("b.test", &["203.0.113.2"]), name("c.test", &["203.0.113.3"])];
    assert_eq!(engine.apply(events).expect("it fits"), []);
    assert!(!passes(&engine, "203.0.113.2"));

    // Two patterns with the same meaning to all rules: a class each, whose names were there before the pattern.
    engine.apply([Event::Policy(sends(2, &["b.test", "C.test"]))]).expect("it fits");
    assert_eq!(["203.0.113.2", "203.0.113.3", "203.0.113.4"].map(|to| passes(&engine, to)), [true, true, false]);
    let changes = engine.apply([Event::NoPolicy(sends(2, &[]).name)]).expect("it fits");
    assert!(changes.contains(&Change::DropAddress(net("203.0.113.2"))), "{changes:?}");
    assert!(!passes(&engine, "203.0.113.2") && passes(&engine, "203.0.113.1"));
}

#[test]
fn an_address_of_two_names_stays_until_neither_has_it() {
    let mut engine = engine();
    assert_eq!(engine.apply([name("b.example", &["203.0.113.1"])]).expect("it fits"), []);
    assert_eq!(engine.apply([name("a.example", &[])]).expect("it fits"), []);
    let moved = [name("b.example", &[]), name("c.example", &["203.0.113.1"])];
    assert_eq!(engine.apply(moved).expect("it fits"), []);
    assert!(passes(&engine, "203.0.113.1"));
    let changes = engine.apply([name("c.example", &[])]).expect("it fits");
    assert!(changes.contains(&Change::DropAddress(net("203.0.113.1"))), "{changes:?}");
    assert!(!passes(&engine, "203.0.113.1"));
}

#[test]
fn addresses_of_endpoints_and_of_the_node_stay_theirs_and_those_of_networks_may_be_of_names_too() {
    let mut engine = engine();
    let node = Event::Node(addresses(&["192.0.2.1"]));
    let mut others = admits(1, "a", &["b"]);
    let all = Peer::Network { net: "203.0.113.0/24".parse().expect("network"), except: Vec::new() };
    others.rules[0].peers.iter_mut().for_each(|peers| peers.push(all.clone()));
    engine.apply([node, Event::Policy(others), endpoint(2, "b"), endpoint(3, "b")]).expect("it fits");
    let alike = |engine: &Engine| row(engine, "10.0.0.2") == row(engine, "10.0.0.3");
    let before = engine.tables().ipcache.clone();
    assert!(alike(&engine) && !passes(&engine, "10.0.0.2"));

    let texts = ["10.0.0.2", "192.0.2.1", "203.0.113.7"];
    engine.apply([name("b.example", &texts)]).expect("it fits");
    assert_eq!(texts.map(|text| passes(&engine, text)), [false, false, true]);
    assert!(alike(&engine));
    // Each of them is still what it was to the other rules: "b" and the network may send to "a".
    let class = |text: &str| {
        let probe = (EndpointKey(1), Direction::Ingress, text.parse().expect("address"), Destination::Other(47));
        engine.tables().decide(probe.0, probe.1, probe.2, probe.3).expect("the endpoint").accept
    };
    assert_eq!(texts.map(class), [true, false, true]);

    engine.apply([name("b.example", &[])]).expect("it fits");
    assert_eq!(engine.tables().ipcache.clone(), before, "as if it had never been");
}

#[test]
fn names_that_do_not_fit_are_refused_and_the_rule_is_told() {
    let mut engine = Engine::new(Limits { ipcache: 14, ..ROOMY });
    engine.apply([Event::Policy(sends(7, &["*.example"])), endpoint(1, "a")]).expect("it fits");
    let many: Vec<String> = (1..=11).map(|n| format!("203.0.113.{n}")).collect();
    let of = |count: usize| name("a.example", &many[..count].iter().map(String::as_str).collect::<Vec<_>>());
    let error = match engine.apply([of(11)]) {
        Err(Refused::TooLarge(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!((error.table, error.needed, error.limit), (Table::Ipcache, 15, 14), "{error}");
    assert_eq!((error.largest[0].0.line, error.largest[0].1), (7, 11), "{error}");
    assert!(!passes(&engine, "203.0.113.1"));
    engine.apply([of(10)]).expect("it fits");
    assert!(passes(&engine, "203.0.113.10") && !passes(&engine, "203.0.113.11"));
}

#[test]
fn no_answer_of_dns_opens_an_endpoint_or_the_node() {
    let mut engine = engine();
    let own = |key| labelled(key, "b");
    let address = own(2).addresses[0];
    let text = address.to_string();
    let all = ["203.0.113.1", "203.0.113.9", &text];
    engine
        .apply([name("a.example", &all), Event::Node(addresses(&["203.0.113.9"])), endpoint(2, "b")])
        .expect("it fits");
    assert_eq!(all.map(|address| passes(&engine, address)), [true, false, false]);
    // The address is the world's when they are gone.
    engine.apply([Event::Node(BTreeSet::new()), Event::NoEndpoint(EndpointKey(2))]).expect("it fits");
    assert_eq!(all.map(|address| passes(&engine, address)), [true; 3]);
    engine.apply([endpoint(2, "b")]).expect("it fits");
    assert!(!passes(&engine, &text));
}
