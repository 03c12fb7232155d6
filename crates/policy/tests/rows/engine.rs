//! The tables of an engine whose policies and endpoints change, against tables that are compiled from nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;
use proptest::{collection::vec, prelude::*};
use wharf_policy::{
    compile::{
        Cell, Change, EndpointKey, Engine, Event, Hit, Identity, Listener, ListenerId, PeerClass, PortClass,
        PortPrefix, Rows, Ruling, SetId, Share, Tables, compile,
    },
    model::{Action, Direction, Endpoint, Origin, Peer, Policy, PolicyName, Port, PortRange, Protocol, Rule},
    names::NamePattern,
    requests::{HttpRule, Requests},
};

use crate::{
    ROOMY,
    by_hand::{admits, labelled},
    event, events, member,
    transition::{carry_out, rows_alone},
    universe,
};

/// A rule set by the first endpoint that has it.
type SetName = Option<(u32, Direction)>;
/// A class by its first prefix; `None` for every address.
type ClassName = Option<IpNet>;
/// A hit with the rule's origin, and with its listener.
type HitOf = Option<(Hit, Option<Origin>, Option<Listener>)>;

/// Ports, cells and isolating policies of a rule set.
type RowsOf = (Vec<(PortPrefix, PortClass)>, BTreeMap<(ClassName, PortClass), (HitOf, HitOf)>, Vec<PolicyName>);

/// Tables without the numbers that engines choose.
#[derive(Debug, PartialEq)]
struct Canonical {
    sets: BTreeMap<u32, (SetName, SetName)>,
    ipcache: BTreeMap<IpNet, (Identity, ClassName)>,
    rules: BTreeMap<SetName, RowsOf>,
    origins: BTreeSet<Origin>,
    listeners: BTreeSet<Listener>,
    redirects: BTreeMap<(Listener, SetName), usize>,
}

fn canonical(tables: &Tables) -> Canonical {
    let mut set_names: BTreeMap<SetId, (u32, Direction)> = BTreeMap::new();
    for (key, sets) in &tables.sets {
        for direction in [Direction::Ingress, Direction::Egress] {
            set_names.entry(sets.of(direction)).or_insert((key.0, direction));
        }
    }
    set_names.remove(&SetId::NONE);
    let mut class_names: BTreeMap<PeerClass, IpNet> = BTreeMap::new();
    for (net, known) in tables.ipcache.iter() {
        assert_ne!(known.class, PeerClass::ANY);
        class_names.entry(known.class).or_insert(*net);
    }
    let listener = |id: ListenerId| Listener::clone(tables.listeners.get(&id).expect("the cell's listener"));
    let hit = |hit: Option<Hit>| {
        hit.map(|hit| {
            let origin = hit.rule.map(|rule| Origin::clone(tables.origins.get(&rule).expect("the rule's origin")));
            let (ruling, listener) = match hit.ruling {
                Ruling::Redirect { listener: id, open } => {
                    assert_eq!(open, listener(id).requests.fails_open);
                    (Ruling::Accept, Some(listener(id)))
                }
                ruling => (ruling, None),
            };
            (Hit { rule: None, ruling, ..hit }, origin, listener)
        })
    };
    let class = |class: PeerClass| {
        (class != PeerClass::ANY).then(|| *class_names.get(&class).expect("an address has the class"))
    };
    let cells = |((peer, port), cell): (&(PeerClass, PortClass), &Cell)| {
        ((class(*peer), *port), (hit(cell.admin), hit(cell.rest)))
    };
    let name = |set: SetId| set_names.get(&set).copied();
    let rules = tables.rules.iter().map(|(set, rows)| {
        assert!(name(*set).is_some(), "an endpoint has {set:?}");
        let ports = rows.ports.iter().map(|(prefix, class)| (*prefix, *class)).collect();
        (name(*set), (ports, rows.cells.iter().map(cells).collect(), rows.isolated_by.clone()))
    });
    Canonical {
        sets: tables.sets.iter().map(|(key, sets)| (key.0, (name(sets.ingress), name(sets.egress)))).collect(),
        ipcache: tables.ipcache.iter().map(|(net, known)| (*net, (known.identity, class(known.class)))).collect(),
        rules: rules.collect(),
        origins: tables.origins.values().map(|origin| Origin::clone(origin)).collect(),
        listeners: tables.listeners.values().map(|listener| Listener::clone(listener)).collect(),
        redirects: tables.redirects.iter().map(|((id, set), cells)| ((listener(*id), name(*set)), *cells)).collect(),
    }
}

/// What a difference rests on: a rule set and a class of both tables mean the same in both.
fn check_that_meanings_stay(old: &Tables, new: &Tables) -> Result<(), TestCaseError> {
    let classes =
        |tables: &Tables| -> BTreeSet<PeerClass> { tables.ipcache.values().map(|known| known.class).collect() };
    let mut both = &classes(old) & &classes(new);
    both.insert(PeerClass::ANY);
    for (set, rows) in &old.rules {
        let Some(after) = new.rules.get(set) else { continue };
        prop_assert_eq!(&rows.ports, &after.ports);
        let shared = |rows: &Rows| -> Vec<_> {
            rows.cells.iter().filter(|((class, _), _)| both.contains(class)).map(|(key, cell)| (*key, *cell)).collect()
        };
        prop_assert_eq!(shared(rows), shared(after), "{:?}", set);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_tables_of_a_history_are_those_of_its_end(
        world in universe::world(),
        history in vec(vec(universe::step(), 1..3), 1..8),
    ) {
        let mut world = world;
        let mut engine = Engine::new(ROOMY);
        let mut maps = Tables::default();
        for change in engine.apply(events(&world)).expect("it fits") {
            carry_out(&change, &mut maps);
        }
        for steps in history {
            let old = engine.tables().clone();
            for change in engine.apply(steps.iter().map(event)).expect("it fits") {
                carry_out(&change, &mut maps);
            }
            steps.iter().for_each(|step| step.apply(&mut world));
            let fresh = compile(events(&world), ROOMY).expect("it fits");
            prop_assert_eq!(canonical(engine.tables()), canonical(&fresh));
            prop_assert_eq!(engine.tables().listeners.len(), fresh.listeners.len(), "each content once");
            prop_assert_eq!(rows_alone(&maps), rows_alone(engine.tables()));
            prop_assert_eq!(engine.sizes(), engine.tables().sizes());
            check_that_meanings_stay(&old, engine.tables())?;
        }
    }
}

fn endpoint(key: u32, app: &str) -> Event {
    Event::Endpoint(EndpointKey(key), member(&labelled(key, app)))
}

/// An engine with two labels, of which each admits the other and a network.
fn engine() -> Engine {
    let mut engine = Engine::new(ROOMY);
    let network = |policy: Policy| {
        let net = Peer::Network { net: "10.0.1.0/24".parse().expect("network"), except: Vec::new() };
        let mut rules = policy.rules;
        rules.iter_mut().for_each(|rule| rule.peers.iter_mut().for_each(|peers| peers.push(net.clone())));
        Event::Policy(Policy { rules, ..policy })
    };
    let policies = [network(admits(0, "a", &["b"])), network(admits(1, "b", &["a"]))];
    engine.apply(policies.into_iter().chain([endpoint(1, "a"), endpoint(2, "b")])).expect("it fits");
    engine
}

#[test]
fn endpoints_of_two_shares_share_rule_sets_but_no_listener_of_the_proxy() {
    let endpoints = [(1, "a"), (15, "a"), (16, "a"), (17, "b")].map(|(key, app)| endpoint(key, app));
    let with = |requests: Option<Requests>| {
        let mut policy = admits(0, "a", &["b"]);
        let ports = PortRange { first: 80, last: 80 };
        policy.rules[0].ports = Some(vec![Port::Numbers { protocol: Protocol::Tcp, ports }]);
        policy.rules[0].requests = requests.map(Arc::new);
        let tables = compile(endpoints.iter().cloned().chain([Event::Policy(policy)]), ROOMY).expect("it fits");
        let [first, second, third] = [1, 15, 16].map(|key| tables.sets[&EndpointKey(key)].ingress);
        assert_eq!(first, second, "of one share");
        (first == third, tables.listeners.values().map(|listener| listener.share).collect::<Vec<_>>())
    };
    let http = Requests { http: [HttpRule::default()].into(), ..Requests::default() };
    assert_eq!(with(Some(http)), (false, [1, 16].map(|key| Share::of(EndpointKey(key))).into()));
    // The agent's own.
    let names = [NamePattern::pattern("*.test").expect("a pattern")].into();
    assert_eq!(with(Some(Requests { names, ..Requests::default() })), (true, vec![Share::default()]));
    assert_eq!(with(None), (true, Vec::new()));
}

#[test]
fn an_endpoint_of_a_known_kind_adds_its_addresses_alone() {
    let mut engine = engine();
    let of_first = engine.tables().sets[&EndpointKey(1)];
    let changes = engine.apply([endpoint(3, "a")]).expect("it fits");
    let expected: Vec<_> = labelled(3, "a").addresses.iter().rev().copied().collect();
    let known = engine.tables().ipcache[&IpNet::from(expected[0])];
    let mut expected: Vec<_> = expected.into_iter().map(|ip| Change::PutAddress(ip.into(), known)).collect();
    expected.push(Change::PutSets(EndpointKey(3), of_first));
    assert_eq!(changes, expected);

    let changes = engine.apply([Event::NoEndpoint(EndpointKey(3))]).expect("it fits");
    assert!(
        matches!(changes[..], [Change::DropSets(_), Change::DropAddress(_), Change::DropAddress(_)]),
        "{changes:?}"
    );
}

#[test]
fn a_policy_that_was_moved_in_its_file_changes_its_origin_alone() {
    let mut engine = engine();
    let mut policy = admits(2, "a", &["b"]);
    engine.apply([Event::Policy(policy.clone())]).expect("it fits");
    policy.rules[0].origin.line += 1;
    let changes = engine.apply([Event::Policy(policy)]).expect("it fits");
    assert!(matches!(changes[..], [Change::PutOrigin(..)]), "{changes:?}");
}

#[test]
fn a_rule_put_in_front_leaves_the_others_their_numbers_and_the_other_direction_its_rows() {
    let mut engine = engine();
    let policy = admits(2, "a", &["b"]);
    let rule = |direction, line: u32| {
        let mut rule = policy.rules[0].clone();
        (rule.direction, rule.origin.line) = (direction, line);
        rule
    };
    let of = |rules: &[_]| Event::Policy(Policy { rules: rules.to_vec(), ..policy.clone() });
    // The last two are equal but for their places.
    let others = [1, 2, 3].map(|line| rule(if line == 1 { Direction::Ingress } else { Direction::Egress }, line));
    engine.apply([of(&others)]).expect("it fits");
    let old = engine.tables().clone();
    let first = Rule { action: Action::Deny, ..rule(Direction::Ingress, 0) };
    engine.apply([of(&[&[first][..], &others].concat())]).expect("it fits");
    let new = engine.tables();
    assert!(old.origins.iter().all(|(number, origin)| new.origins.get(number) == Some(origin)));
    assert_eq!(new.origins.len(), old.origins.len() + 1);
    let (before, after) = (old.sets[&EndpointKey(1)], new.sets[&EndpointKey(1)]);
    assert_eq!(before.egress, after.egress);
    assert_ne!(before.ingress, after.ingress);
}

#[test]
fn a_rule_about_some_endpoints_leaves_the_rule_sets_and_classes_of_the_others() {
    let mut engine = engine();
    let old = engine.tables().clone();
    let mut policy = admits(2, "a", &[]);
    let net = Peer::Network { net: "10.0.1.128/25".parse().expect("network"), except: Vec::new() };
    policy.rules[0].peers = Some(vec![net]);
    policy.rules[0].action = Action::Deny;
    engine.apply([Event::Policy(policy)]).expect("it fits");
    let new = engine.tables();
    assert_eq!(old.sets[&EndpointKey(2)], new.sets[&EndpointKey(2)]);
    assert_ne!(old.sets[&EndpointKey(1)], new.sets[&EndpointKey(1)]);
    for (net, known) in old.ipcache.iter() {
        assert_eq!(new.ipcache[net], *known);
    }
    let set = old.sets[&EndpointKey(2)].ingress;
    assert_eq!(
        new.rules[&set].cells.len(),
        old.rules[&set].cells.len() + 1,
        "the part of the network that is a class now"
    );
}

#[test]
fn numbers_of_rules_and_sets_are_not_reused_by_the_change_that_frees_them() {
    let mut engine = engine();
    let mut policy = admits(2, "b", &["b"]);
    policy.rules[0].action = Action::Deny;
    let name = admits(0, "a", &[]).name;
    let old = engine.tables().clone();
    engine.apply([Event::NoPolicy(name), Event::Policy(policy)]).expect("it fits");
    let new = engine.tables();
    let origins =
        new.origins.keys().filter(|rule| old.origins.get(*rule).is_some_and(|origin| *origin != new.origins[*rule]));
    assert_eq!(origins.count(), 0, "{:?} {:?}", old.origins, new.origins);
    assert!(!old.rules.contains_key(&new.sets[&EndpointKey(2)].ingress));
}

#[test]
fn a_number_of_a_named_port_that_is_new_reaches_the_senders() {
    let mut engine = engine();
    let named = || Port::Named { protocol: Protocol::Tcp, name: "web".to_owned() };
    let mut policy = admits(2, "a", &["b"]);
    policy.rules[0].direction = Direction::Egress;
    policy.rules[0].ports = Some(vec![named()]);
    engine.apply([Event::Policy(policy)]).expect("it fits");
    let before = engine.tables().sets[&EndpointKey(1)].egress;
    assert!(engine.tables().rules[&before].ports.is_empty());
    let web = |key, number| {
        let ports = Arc::new([((Protocol::Tcp, "web".to_owned()), number)].into());
        Event::Endpoint(EndpointKey(key), member(&Endpoint { ports, ..labelled(key, "b") }))
    };
    engine.apply([web(3, 80)]).expect("it fits");
    let after = engine.tables().sets[&EndpointKey(1)].egress;
    assert_ne!(before, after);
    engine.apply([web(4, 80)]).expect("it fits");
    assert_eq!(engine.tables().sets[&EndpointKey(1)].egress, after, "a number that is known");
    engine.apply([web(5, 81)]).expect("it fits");
    let last = engine.tables().sets[&EndpointKey(1)].egress;
    assert_eq!(engine.tables().rules[&last].ports.len(), 2);
    engine.apply([Event::NoEndpoint(EndpointKey(5))]).expect("it fits");
    assert_eq!(engine.tables().rules[&engine.tables().sets[&EndpointKey(1)].egress].ports.len(), 1);
}

#[test]
fn an_address_is_the_nodes_before_an_endpoints_and_the_first_endpoints_before_anothers() {
    let mut engine = engine();
    let of = |engine: &Engine, key: u32| engine.tables().ipcache[&IpNet::from(labelled(key, "a").addresses[0])];
    let b = of(&engine, 2);
    let twin = Endpoint { addresses: labelled(2, "b").addresses, ..labelled(7, "a") };
    engine.apply([Event::Endpoint(EndpointKey(7), member(&twin))]).expect("it fits");
    assert_eq!(of(&engine, 2), b);
    engine.apply([Event::NoEndpoint(EndpointKey(2))]).expect("it fits");
    assert_eq!(of(&engine, 2), of(&engine, 1));
    engine.apply([Event::Node(labelled(2, "a").addresses.iter().copied().collect())]).expect("it fits");
    assert_eq!(of(&engine, 2).identity, Identity::NODE);
    engine.apply([Event::Node(BTreeSet::new()), Event::NoEndpoint(EndpointKey(7))]).expect("it fits");
    assert!(!engine.tables().ipcache.contains_key(&IpNet::from(twin.addresses[0])));
}

#[test]
fn an_address_that_moves_between_nodes_changes_its_row_although_no_rule_tells_them_apart() {
    let mut engine = engine();
    let address = labelled(9, "x").addresses[0];
    let net = IpNet::from(address);
    let nodes = |has: bool| if has { BTreeSet::from([address]) } else { BTreeSet::new() };
    let mut seen = Vec::new();
    // The node's address is in the list of another node, too, before it leaves this one.
    for (own, other) in [(true, false), (true, true), (false, true), (true, true), (false, false)] {
        let changes = engine.apply([Event::Node(nodes(own)), Event::OtherNodes(nodes(other))]).expect("it fits");
        let row = engine.tables().ipcache.get(&net).map(|known| known.identity);
        seen.push((row, !changes.is_empty()));
    }
    let (node, other) = (Some(Identity::NODE), Some(Identity::OTHER_NODE));
    assert_eq!(seen, [(node, true), (node, false), (other, true), (node, true), (None, true)]);
}
