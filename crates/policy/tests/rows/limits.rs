//! What does not fit is refused before anything changes.

use std::sync::Arc;

use ipnet::IpNet;
use wharf_policy::{
    compile::{EndpointKey, Engine, Event, Identity, Limits, Member, Refused, Sizes, Table, TooLarge},
    model::{Endpoint, Peer, Policy, Port, PortRange, Protocol, Rule},
};

use crate::{
    ROOMY,
    by_hand::{admits, labelled},
    member,
};

fn too_large(refused: Result<Vec<wharf_policy::compile::Change>, Refused>) -> TooLarge {
    match refused {
        Err(Refused::TooLarge(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// A policy for "a" whose only rule is about so many networks, each of its own class, and so many ports.
fn wide(number: u32, networks: u16, ports: u16) -> Event {
    let mut policy = admits(number, "a", &[]);
    let net = |n| Peer::Network {
        net: format!("172.16.{}.{}/32", n / 256, n % 256).parse().expect("network"),
        except: Vec::new(),
    };
    policy.rules[0].peers = Some((0..networks).map(net).collect());
    let port = |n| Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: 2 * n, last: 2 * n } };
    policy.rules[0].ports = (ports > 0).then(|| (0..ports).map(port).collect());
    Event::Policy(policy)
}

fn start(limits: Limits) -> Engine {
    let mut engine = Engine::new(limits);
    let first = [wide(0, 1, 1), Event::Endpoint(EndpointKey(1), member(&labelled(1, "a")))];
    engine.apply(first).expect("it fits");
    engine
}

#[test]
fn each_table_has_its_limit_and_the_error_names_the_largest_rules() {
    let small = Limits { ipcache: 35, ports: 30, rules: 30, sets: 3, listeners: 2 };
    let other = |n: u8| {
        let app = char::from(b'b' + n).to_string();
        let policy = admits(10 + u32::from(n), &app, &[&app]);
        let endpoint = Event::Endpoint(
            EndpointKey(10 + u32::from(n)),
            member(&Endpoint { addresses: [].into(), ..labelled(1, &app) }),
        );
        [Event::Policy(policy), endpoint]
    };
    for (events, table, needed, line, rows) in [
        (vec![wide(1, 40, 0)], Table::Ipcache, 2 + 2 + 40, 1, 40),
        (vec![wide(1, 1, 40)], Table::Ports, 40, 1, 40),
        (vec![wide(1, 1, 0), wide(2, 29, 0)], Table::Rules, 31, 2, 29),
        (other(0).into_iter().chain(other(1)).chain(other(2)).collect(), Table::Sets, 4, 0, 1),
    ] {
        let mut engine = start(small);
        let before = engine.tables().clone();
        let error = too_large(engine.apply(events.clone()));
        assert_eq!((error.table, error.needed, error.during), (table, needed, false), "{error}");
        assert_eq!((error.largest[0].0.line, error.largest[0].1), (line, rows), "{error}");
        assert_eq!(*engine.tables(), before);
        let mut roomy = start(ROOMY);
        roomy.apply(events).expect("it fits");
    }
}

#[test]
fn the_old_rows_and_the_new_ones_fit_at_once_or_the_change_is_refused() {
    let limits = Sizes { rules: 30, ..ROOMY };
    let mut engine = start(limits);
    engine.apply([wide(0, 20, 0)]).expect("21 rows beside 3");
    let error = too_large(engine.apply([wide(0, 19, 0)]));
    assert_eq!((error.table, error.needed, error.limit, error.during), (Table::Rules, 41, 30, true));
    engine.apply([Event::NoPolicy(admits(0, "a", &[]).name)]).expect("fewer rows");
    engine.apply([wide(0, 19, 0)]).expect("20 rows alone");
}

#[test]
fn networks_of_rules_have_a_limit_of_their_own_and_other_addresses_do_not_count() {
    let mut engine = Engine::new(ROOMY).with_networks_at_most(20);
    let first = [wide(0, 20, 0), Event::Endpoint(EndpointKey(1), member(&labelled(1, "a")))];
    engine.apply(first).expect("as many as fit");
    let error = too_large(engine.apply([wide(1, 21, 0)]));
    assert_eq!((error.table, error.needed, error.limit, error.during), (Table::Networks, 21, 20, false), "{error}");
    let pods = (0..40).map(|n| format!("10.1.{n}.0/24").parse().expect("network")).collect();
    engine.apply([Event::Pods(pods)]).expect("they are of no rule");
    engine.apply([wide(0, 5, 0)]).expect("fewer");
    engine.apply([wide(1, 20, 0)]).expect("equal networks count once");
}

#[test]
fn an_error_says_what_does_not_fit_and_what_to_do() {
    let mut engine = start(Sizes { rules: 30, ..ROOMY });
    let error = too_large(engine.apply([wide(1, 40, 0)]));
    assert_eq!(
        error.to_string(),
        "compile the policies: at least 42 rule rows are needed, 12 more than the 30 that fit; most are of policies.yaml:1: a document, spec \
         (40); policies.yaml:0: a document, spec (2); narrow or merge these rules, or remove policies first"
    );
}

#[test]
fn rows_far_beyond_the_limit_are_counted_and_not_made() {
    // Every network of one rule has a cell for every port that the others name.
    let mut engine = start(Sizes { rules: 1 << 16, ..ROOMY });
    let Event::Policy(mut policy) = wide(1, 4_000, 0) else { panic!("a policy") };
    let all = Port::Numbers { protocol: Protocol::Tcp, ports: PortRange::ALL };
    policy.rules[0].ports = Some(vec![all]);
    let single = |port| Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: port, last: port } };
    let rule = policy.rules[0].clone();
    let one = |port| Rule { ports: Some(vec![single(port)]), peers: Some(Vec::new()), ..rule.clone() };
    policy.rules.extend((0..2_000).map(one));
    let error = too_large(engine.apply([Event::Policy(policy)]));
    assert_eq!((error.table, error.during, error.largest[0].1), (Table::Rules, false, 4_000 * 2_002), "{error}");
    assert!(error.needed > 7_000_000, "{error}");
}

#[test]
fn an_identity_with_two_sets_of_labels_is_refused() {
    let mut engine = start(ROOMY);
    let before = engine.tables().clone();
    let identity = member(&labelled(1, "a")).identity;
    let stranger = Member { identity, endpoint: Arc::new(labelled(2, "b")) };
    let policy: Policy = admits(1, "a", &["a"]);
    let events = [Event::Policy(policy), Event::Endpoint(EndpointKey(2), stranger.clone())];
    let error = engine.apply(events).expect_err("two labels");
    assert_eq!(
        error.to_string(),
        format!(
            "take in endpoint 2: other endpoints with identity {} have other labels or another namespace; give each set of labels an \
             identity of its own",
            identity.0
        )
    );
    assert_eq!(*engine.tables(), before);
    let events = [Event::NoEndpoint(EndpointKey(1)), Event::Endpoint(EndpointKey(2), stranger)];
    engine.apply(events).expect("the number is free");
    assert_ne!(engine.tables().ipcache[&IpNet::from(labelled(2, "b").addresses[0])].identity, Identity::NONE);
}
