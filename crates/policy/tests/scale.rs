//! Numbers of rows at the sizes that the look-up is made for. The times are printed: `--release --no-capture` shows
//! them.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net};
use wharf_policy::{
    compile::{Change, EndpointKey, Engine, Event, Identity, Limits, Member, Sizes},
    model::{
        Action, Direction, Directions, Endpoint, Entity, Holds, LabelOf, Origin, Peer, Policy, PolicyName, Port,
        PortRange, Protocol, Requirement, Rule, Selector, Tier,
    },
    names::NamePattern,
};

const ROOMY: Limits = Limits { ipcache: 1 << 20, ports: 1 << 20, rules: 1 << 20, sets: 1 << 20, listeners: 1 << 10 };

fn app(identity: u32) -> Selector {
    let holds = Holds::In([format!("app-{identity}")].into());
    Selector([Requirement { of: LabelOf::Endpoint, key: "k8s:app".to_owned(), holds }].into())
}

fn endpoint(key: u32, identity: u32) -> Event {
    let v4 = IpAddr::from(Ipv4Addr::from_bits(0x0a4d_0000 + key));
    let v6 = IpAddr::from(Ipv6Addr::from_bits((0xfd77 << 112) + u128::from(key)));
    let labels = [("k8s:app".to_owned(), format!("app-{identity}")), ("k8s:part-of".to_owned(), "shop".to_owned())];
    let labels = Arc::new(labels.into());
    let endpoint = Endpoint { addresses: [v4, v6].into(), labels, ..Endpoint::default() };
    Event::Endpoint(EndpointKey(key), Member { identity: Identity(identity), endpoint: Arc::new(endpoint) })
}

fn rule(action: Action, peers: Vec<Peer>, ports: &[u16]) -> Rule {
    let port = |port: &u16| Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: *port, last: *port } };
    let origin = Origin { file: "p.yaml".into(), line: 1, document: "p".into(), field: "spec.ingress[0]".to_owned() };
    let ports = (!ports.is_empty()).then(|| ports.iter().map(port).collect());
    Rule { direction: Direction::Ingress, action, peers: Some(peers), ports, requests: None, origin }
}

fn policy(number: u32, subject: Selector, rules: Vec<Rule>) -> Event {
    Event::Policy(Policy {
        name: PolicyName { kind: "NetworkPolicy".to_owned(), namespace: "shop".to_owned(), name: format!("p{number}") },
        subject,
        tier: Tier::Namespaced,
        priority: 0,
        isolates: Directions { ingress: true, egress: false },
        origin: rules[0].origin.clone(),
        rules,
    })
}

/// Networks of a length, side by side.
fn networks(first: Ipv4Addr, length: u8, number: u32) -> Vec<Peer> {
    let step = 1 << (32 - length);
    let net = |n| IpNet::from(Ipv4Net::new(Ipv4Addr::from_bits(first.to_bits() + n * step), length).expect("length"));
    (0..number).map(|n| Peer::Network { net: net(n), except: Vec::new() }).collect()
}

fn timed(what: &str, engine: &mut Engine, events: Vec<Event>) -> Vec<Change> {
    let start = Instant::now();
    let changes = engine.apply(events).expect("it fits");
    println!("{what}: {:?}, {} changes, {:?}", start.elapsed(), changes.len(), engine.tables().sizes());
    changes
}

/// 1,000 endpoints of 100 identities; 100 policies of five rules, each about one identity.
fn cluster() -> Engine {
    let mut engine = Engine::new(ROOMY);
    let events = (0..100)
        .map(|subject| of_identity(subject, false))
        .chain((0..1_000).map(|key| endpoint(key, key % 100)))
        .collect();
    timed("1,000 endpoints, 500 rules", &mut engine, events);
    engine
}

#[test]
fn a_thousand_endpoints_and_five_hundred_rules_take_rows_for_identities_alone() {
    let mut engine = cluster();
    let Sizes { ipcache, rules, sets, .. } = engine.tables().sizes();
    assert_eq!((ipcache, sets), (2_002, 100));
    assert!(
        rules <= 100 * (1 + 5 * 3 * 3),
        "{rules}: isolation, and for each rule three identities, each with two classes of ports and the unknown port"
    );

    let added = rule(Action::Accept, vec![Peer::Endpoints(app(3))], &[8080]);
    let changes = timed("one rule more", &mut engine, vec![policy(500, app(7), vec![added])]);
    assert!(changes.len() < 120, "{}: the rows of one rule set, twice, and ten endpoints", changes.len());

    let mut rule_of_network = rule(Action::Deny, networks(Ipv4Addr::new(10, 77, 1, 0), 24, 1), &[]);
    rule_of_network.peers.as_mut().expect("peers").push(Peer::Entity(Entity::World));
    timed("one rule with a network of endpoints", &mut engine, vec![policy(501, app(8), vec![rule_of_network])]);
    let all = rule(Action::Deny, vec![Peer::Endpoints(app(5))], &[]);
    timed("one rule for every endpoint", &mut engine, vec![policy(502, Selector::default(), vec![all])]);

    let changes = timed("one endpoint more", &mut engine, vec![endpoint(2_000, 42)]);
    assert!(
        matches!(changes[..], [Change::PutAddress(..), Change::PutAddress(..), Change::PutSets(..)]),
        "{changes:?}"
    );
    let changes = timed("one endpoint less", &mut engine, vec![Event::NoEndpoint(EndpointKey(2_000))]);
    assert!(
        matches!(changes[..], [Change::DropSets(_), Change::DropAddress(_), Change::DropAddress(_)]),
        "{changes:?}"
    );
}

#[test]
fn a_thousand_denied_and_a_thousand_accepted_networks_take_a_cell_each() {
    let accepted = || networks(Ipv4Addr::new(20, 0, 0, 0), 24, 1_000);
    let apart = networks(Ipv4Addr::new(100, 64, 0, 0), 24, 1_000);
    // The first half of every accepted network.
    let halves = networks(Ipv4Addr::new(20, 0, 0, 0), 25, 2_000).into_iter().step_by(2).collect();
    for (what, denied) in [("apart", apart), ("nested", halves)] {
        let mut engine = Engine::new(ROOMY);
        let rules = vec![rule(Action::Deny, denied, &[]), rule(Action::Accept, accepted(), &[])];
        timed(what, &mut engine, vec![policy(0, app(0), rules), endpoint(1, 0)]);
        let Sizes { ipcache, rules, .. } = engine.tables().sizes();
        assert_eq!((ipcache, rules), (2 + 2 + 2_000, 2_000 + 1), "{what}: isolation is the last cell");
    }
}

#[test]
fn one_address_more_of_ten_thousand_names_is_one_change() {
    let mut engine = cluster();
    let pattern = NamePattern::pattern("*.example").expect("a pattern");
    let mut names = rule(Action::Accept, vec![Peer::Names(pattern)], &[443]);
    names.direction = Direction::Egress;
    timed("a pattern of names", &mut engine, vec![policy(500, app(7), vec![names])]);
    let name = |n: u32, count: u32| {
        let address = |at| IpAddr::from(Ipv4Addr::from_bits(0xcb00_0000 + 4 * n + at));
        Event::Name(format!("n{n}.example").into(), (0..count).map(address).collect())
    };
    // The median time of one address more, and of one less.
    let median = |engine: &mut Engine| {
        let mut times = Vec::new();
        for n in 0..50 {
            for count in [2, 1] {
                let start = Instant::now();
                let changes = engine.apply([name(n, count)]).expect("it fits");
                times.push(start.elapsed());
                assert!(matches!(changes[..], [Change::PutAddress(..) | Change::DropAddress(_)]), "{changes:?}");
            }
        }
        times.sort_unstable();
        times[50]
    };
    timed("100 names", &mut engine, (0..100).map(|n| name(n, 1)).collect());
    let few = median(&mut engine);
    timed("10,000 names", &mut engine, (100..10_000).map(|n| name(n, 1)).collect());
    let many = median(&mut engine);
    println!("one address more: {few:?} with 100 names, {many:?} with 10,000");
    assert!(many < 8 * few, "{many:?} with many, {few:?} with few");
    assert_eq!(engine.tables().sizes().ipcache, 2_002 + 10_000);
}

/// The median time of an added rule, and the changes of rows of each.
fn added_rules(engine: &mut Engine, what: &str) -> (Duration, Vec<usize>) {
    let before: Vec<Event> = (0..50).map(|subject| of_identity(subject, false)).collect();
    let (mut times, mut written) = (Vec::new(), Vec::new());
    for (subject, before) in (0..50).zip(before) {
        let start = Instant::now();
        // As the agent does: what the kernel has is kept until it has the new rows.
        let mut next = engine.clone();
        let changes = next.apply([of_identity(subject, true)]).expect("it fits");
        times.push(start.elapsed());
        written.push(changes.iter().filter(|c| !matches!(c, Change::PutOrigin(..))).count());
        next.apply([before]).expect("it fits");
        *engine = next;
    }
    times.sort_unstable();
    println!("one rule more, {what}: median {:?}, most {:?}", times[25], times[49]);
    (times[25], written)
}

/// The policy of one identity, as in [`cluster`]; with one rule more in front of the others.
fn of_identity(subject: u32, more: bool) -> Event {
    let rules = (0..5u32).map(|n| {
        let peers = (0..3).map(|p| Peer::Endpoints(app((subject * 7 + n * 13 + p) % 100))).collect();
        rule(Action::Accept, peers, &[80 + u16::try_from(n).expect("small"), 443])
    });
    let more = more.then(|| rule(Action::Accept, vec![Peer::Endpoints(app((subject + 3) % 100))], &[6_000]));
    policy(subject, app(subject), more.into_iter().chain(rules).collect())
}

#[test]
fn an_added_rule_costs_what_it_changes_and_not_what_there_is() {
    // Without optimization, fewer are enough to tell a cost that grows from one that does not.
    let many = if cfg!(debug_assertions) { 5_000 } else { 50_000 };
    let (few, written) = added_rules(&mut cluster(), "100 identities");

    let mut engine = cluster();
    let others = (100..many).map(|identity| endpoint(2_000 + identity, identity)).collect();
    timed("many identities", &mut engine, others);
    let of_identities = added_rules(&mut engine, "many identities");

    let mut engine = cluster();
    let mut wide = rule(Action::Accept, networks(Ipv4Addr::new(20, 0, 0, 0), 32, many), &[]);
    wide.direction = Direction::Egress;
    timed("many networks", &mut engine, vec![policy(500, app(7), vec![wide])]);
    let of_networks = added_rules(&mut engine, "many networks");
    for (what, (time, rows)) in [("identities", of_identities), ("networks", of_networks)] {
        assert_eq!(rows, written, "{what}");
        assert!(time < 8 * few, "{what}: {time:?} with {many}, {few:?} with few");
    }
}
