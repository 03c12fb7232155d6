//! Changes of rows, carried out one by one.

use std::sync::Arc;

use ipnet::IpNet;
use proptest::{collection::vec, prelude::*, sample::subsequence};
use wharf_policy::{
    compile::{
        Cell, Change, Decision, EndpointKey, Engine, Event, Hit, Identity, Known, PeerClass, PortClass, Rows, Ruling,
        SetId, Sets, Sizes, Tables, compile, diff,
    },
    model::Direction,
    oracle::Destination,
};

use crate::{
    ROOMY,
    by_hand::{admits, labelled, pairs},
    event, events, member,
    universe::{self, Probe},
};

/// What a program's maps become by one change.
pub(crate) fn carry_out(change: &Change, tables: &mut Tables) {
    match change.clone() {
        Change::PutListener(id, listener) => {
            assert_eq!(tables.listeners.insert(id, listener), None, "{change:?}");
        }
        Change::DropListener(id) => {
            let leads = |hit: Option<Hit>| {
                hit.is_some_and(|hit| matches!(hit.ruling, Ruling::Redirect { listener, .. } if listener == id))
            };
            let used = tables.rules.values().flat_map(|rows| rows.cells.values()).any(|cell| leads(cell.rest));
            assert!(!used && tables.listeners.remove(&id).is_some(), "{change:?}");
        }
        Change::PutOrigin(rule, origin) => drop(tables.origins.insert(rule, origin)),
        Change::DropOrigin(rule) => assert!(tables.origins.remove(&rule).is_some(), "{change:?}"),
        Change::PutSets(key, sets) => {
            tables.sets.insert(key, sets);
        }
        Change::DropSets(key) => assert!(tables.sets.remove(&key).is_some(), "{change:?}"),
        Change::PutAddress(net, known) => {
            tables.ipcache.insert(net, known);
        }
        Change::DropAddress(net) => assert!(tables.ipcache.remove(&net).is_some(), "{change:?}"),
        Change::PutPorts(set, prefix, class) => {
            let rows = Arc::make_mut(tables.rules.entry(set).or_default());
            assert_eq!(rows.ports.insert(prefix, class), None, "{change:?}");
        }
        Change::PutCell(set, key, cell) => {
            let rows = Arc::make_mut(tables.rules.entry(set).or_default());
            assert_eq!(rows.cells.insert(key, cell), None, "{change:?}");
        }
        Change::DropPorts(set, prefix) => {
            let rows = Arc::make_mut(tables.rules.get_mut(&set).expect("set"));
            assert!(rows.ports.remove(&prefix).is_some(), "{change:?}");
        }
        Change::DropCell(set, key) => {
            let rows = Arc::make_mut(tables.rules.get_mut(&set).expect("set"));
            assert!(rows.cells.remove(&key).is_some(), "{change:?}");
        }
    }
}

/// The tables as the programs' maps have them: without sets that have no rows, and without what is not for the
/// programs.
pub(crate) fn rows_alone(tables: &Tables) -> Tables {
    let rows = tables.rules.iter().filter(|(_, rows)| !rows.ports.is_empty() || !rows.cells.is_empty());
    let rules = rows.map(|(set, rows)| (*set, Arc::new(Rows { isolated_by: Vec::new(), ..Rows::clone(rows) })));
    Tables { rules: rules.collect(), redirects: Default::default(), ..tables.clone() }
}

fn decide(tables: &Tables, probe: &Probe) -> Option<Decision> {
    tables.decide(EndpointKey(probe.endpoint), probe.direction, probe.peer, probe.destination)
}

/// Carries out the difference, and fails where a flow of an endpoint of both states is decided in another way than
/// before and after.
fn check(old: &Tables, new: &Tables, probes: &[Probe]) -> Result<(), TestCaseError> {
    let diff = diff(old, new);
    let mut now = rows_alone(old);
    let mut peak = now.sizes();
    let both: Vec<_> = probes.iter().filter_map(|p| Some((p, decide(old, p)?, decide(new, p)?))).collect();
    for (at, change) in diff.changes.iter().enumerate() {
        carry_out(change, &mut now);
        let sizes = now.sizes();
        peak.ipcache = peak.ipcache.max(sizes.ipcache);
        peak.ports = peak.ports.max(sizes.ports);
        peak.rules = peak.rules.max(sizes.rules);
        peak.listeners = peak.listeners.max(sizes.listeners);
        for (probe, before, after) in &both {
            let decided = decide(&now, probe).expect("the endpoint is there");
            prop_assert!(
                decided == *before || decided == *after,
                "{:?} is decided as {:?}, before as {:?}, after as {:?}, at change {} of {:#?}",
                probe,
                decided,
                before,
                after,
                at,
                diff.changes
            );
        }
    }
    prop_assert_eq!(rows_alone(&now), rows_alone(new));
    let moved = old.moved(new);
    for (probe, before, after) in &both {
        let Some(listener) = before.listener.filter(|before| after.accept && after.listener != Some(*before)) else {
            continue;
        };
        let set = new.sets[&EndpointKey(probe.endpoint)].of(probe.direction);
        let stays = new.redirects.contains_key(&(listener, set));
        // An endpoint that came or went has the address, or had it.
        let is_endpoint = |tables: &Tables| {
            tables.ipcache.get(&IpNet::from(probe.peer)).filter(|known| known.identity.is_of_endpoints()).is_some()
        };
        if stays && is_endpoint(old) == is_endpoint(new) {
            let member = (listener, EndpointKey(probe.endpoint));
            prop_assert!(moved.contains(&member), "{probe:?} led to {before:?}, leads to {after:?}, and nobody tells");
        }
    }
    let of = |sizes: Sizes| [sizes.ipcache, sizes.ports, sizes.rules, sizes.listeners];
    prop_assert_eq!(of(peak), of(diff.peak));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_flow_is_decided_as_before_or_as_after_at_every_change(
        world in universe::world(),
        steps in vec(universe::step(), 1..5),
        probes in vec(universe::probe(), 48),
    ) {
        let mut engine = Engine::new(ROOMY);
        engine.apply(events(&world)).expect("it fits");
        let old = engine.tables().clone();
        let changes = engine.apply(steps.iter().map(event)).expect("it fits");
        prop_assert_eq!(changes, diff(&old, engine.tables()).changes);
        check(&old, engine.tables(), &probes)?;
    }

    #[test]
    fn an_engine_that_begins_anew_takes_over_without_another_verdict(
        world in universe::world(),
        steps in vec(universe::step(), 0..3),
        probes in vec(universe::probe(), 24),
    ) {
        let mut first = Engine::new(ROOMY);
        first.apply(events(&world)).expect("it fits");
        let mut world = world;
        steps.iter().for_each(|step| step.apply(&mut world));
        let mut second = Engine::after(ROOMY, first.tables().clone());
        let changes = second.apply(events(&world)).expect("it fits");
        check(first.tables(), second.tables(), &probes)?;
        if steps.is_empty() {
            let is_row = |change: &&Change| !matches!(change, Change::PutOrigin(..) | Change::DropOrigin(_));
            prop_assert_eq!(changes.iter().filter(is_row).collect::<Vec<_>>(), Vec::<&Change>::new());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The agent was killed: its successor finds rows of both states, and what was to be there during the change alone.
    #[test]
    fn an_engine_that_begins_amid_a_change_takes_over_without_another_verdict(
        world in universe::world(),
        steps in vec(universe::step(), 1..5),
        done in any::<prop::sample::Index>(),
        more in vec(universe::step(), 1..5),
        probes in vec(universe::probe(), 24),
    ) {
        let mut first = Engine::new(ROOMY);
        first.apply(events(&world)).expect("it fits");
        let mut found = rows_alone(first.tables());
        let changes = first.apply(steps.iter().map(event)).expect("it fits");
        changes.iter().take(done.index(changes.len() + 1)).for_each(|change| carry_out(change, &mut found));
        // Rule sets without rows are seen by the endpoints that have them.
        let used = found.sets.values().flat_map(|sets| [sets.ingress, sets.egress]).filter(|set| *set != SetId::NONE);
        for set in used.collect::<Vec<_>>() {
            found.rules.entry(set).or_default();
        }
        let mut world = world;
        steps.iter().for_each(|step| step.apply(&mut world));
        let mut second = Engine::after(ROOMY, found.clone());
        second.apply(events(&world)).expect("it fits");
        check(&found, second.tables(), &probes)?;
        // From now on numbers of before are given again.
        for step in &more {
            step.apply(&mut world);
            let before = second.tables().clone();
            second.apply([event(step)]).expect("it fits");
            check(&before, second.tables(), &probes)?;
        }
        let anew = compile(events(&world), ROOMY).expect("it fits");
        for probe in &probes {
            let accepts = |tables: &Tables| decide(tables, probe).map(|decision| decision.accept);
            prop_assert_eq!(accepts(second.tables()), accepts(&anew), "{:?}", probe);
        }
    }
}

/// Endpoints by their labels, in the order of their keys.
fn endpoints(labels: &[&'static str]) -> Vec<Event> {
    let endpoint = |(key, label): (u32, &&str)| Event::Endpoint(EndpointKey(key), member(&labelled(key, label)));
    (1..).zip(labels).map(endpoint).collect()
}

/// Checks the step between two assignments of labels under policies that say which labels admit which.
fn check_labels(
    policies: [&[(&'static str, &[&'static str])]; 2],
    labels: [&[&'static str]; 2],
) -> Result<(), TestCaseError> {
    let set = |of: &[(&str, &[&str])]| -> Vec<Event> {
        (0..).zip(of).map(|(number, (subject, from))| Event::Policy(admits(number, subject, from))).collect()
    };
    let mut engine = Engine::new(ROOMY);
    engine.apply(set(policies[0]).into_iter().chain(endpoints(labels[0]))).expect("it fits");
    let old = engine.tables().clone();
    engine.apply(set(policies[1]).into_iter().chain(endpoints(labels[1]))).expect("it fits");
    check(&old, engine.tables(), &pairs(u32::try_from(labels[0].len()).expect("few")))
}

#[test]
fn endpoints_that_change_labels_together_do_not_pass_as_half_changed() {
    // 1 and 2 never admit each other: neither as two a's nor as two b's. An a that met a b would. 3 and 4 keep the rule
    // sets.
    let policies: &[(_, &[_])] = &[("a", &["b"]), ("b", &["a"])];
    check_labels([policies; 2], [&["a", "a", "a", "b"], &["b", "b", "a", "b"]]).expect("a copy of the rule set of a");
    // 2 is the last c: its class is there no longer.
    let policies: &[(_, &[_])] = &[("a", &["b"]), ("b", &["c"])];
    check_labels([policies; 2], [&["a", "c", "a", "b"], &["b", "b", "a", "b"]])
        .expect("a class for the time of the change");
}

fn admit_each_other(labels: &[&'static str]) -> Vec<Event> {
    let policies = [admits(0, "a", &["b"]), admits(1, "b", &["a"])];
    policies.into_iter().map(Event::Policy).chain(endpoints(labels)).collect()
}

#[test]
fn an_endpoint_that_changed_while_no_engine_was_there_leaves_the_numbers_of_the_others() {
    let mut first = Engine::new(ROOMY);
    first.apply(admit_each_other(&["a", "a", "a", "b", "b"])).expect("it fits");
    let mut second = Engine::after(ROOMY, first.tables().clone());
    second.apply(admit_each_other(&["b", "a", "a", "b", "b"])).expect("it fits");
    for key in (2..=5).map(EndpointKey) {
        let sets = second.tables().sets[&key];
        assert_eq!(sets, first.tables().sets[&key]);
        assert_eq!(second.tables().rules[&sets.ingress], first.tables().rules[&sets.ingress]);
    }
}

#[test]
fn no_address_gets_the_class_of_every_peer_from_a_damaged_row() {
    let mut first = Engine::new(ROOMY);
    first.apply(admit_each_other(&["a", "a", "b"])).expect("it fits");
    let mut damaged = first.tables().clone();
    for (net, known) in first.tables().ipcache.iter() {
        damaged.ipcache.insert(*net, Known { class: PeerClass::ANY, ..*known });
    }
    let mut second = Engine::after(ROOMY, damaged);
    second.apply(admit_each_other(&["a", "a", "b"])).expect("it fits");
    assert!(second.tables().ipcache.values().all(|known| known.class != PeerClass::ANY));
}

/// One endpoint whose rule set denies class 2 and accepts the rest.
fn tables(ipcache: &[(&str, u32)]) -> Tables {
    let known = |class| Known { identity: Identity::NONE, class: PeerClass(class) };
    let hit = |rank, ruling| Cell { admin: None, rest: Some(Hit { rank, ruling, rule: None }) };
    let any = ((PeerClass::ANY, PortClass::ANY), hit(2, Ruling::Accept));
    let cells = [any, ((PeerClass(2), PortClass::ANY), hit(1, Ruling::Deny))].into_iter().collect();
    Tables {
        sets: [(EndpointKey(1), Sets { ingress: SetId(1), egress: SetId::NONE })].into_iter().collect(),
        ipcache: ipcache.iter().map(|(net, class)| (net.parse().expect("network"), known(*class))).collect(),
        rules: [(SetId(1), Arc::new(Rows { cells, ..Rows::default() }))].into_iter().collect(),
        ..Tables::default()
    }
}

#[test]
fn an_address_never_takes_the_class_of_a_prefix_around_its_own() {
    let inner = tables(&[("0.0.0.0/0", 1), ("10.0.0.0/8", 2), ("10.1.0.0/16", 1), ("10.1.1.0/24", 2)]);
    let outer = tables(&[("0.0.0.0/0", 1), ("10.0.0.0/8", 2), ("10.1.1.0/24", 2)]);
    let none = tables(&[("0.0.0.0/0", 1)]);
    let all = tables(&[("0.0.0.0/0", 2)]);
    let probe = |address: &str| Probe {
        endpoint: 1,
        direction: Direction::Ingress,
        peer: address.parse().expect("address"),
        destination: Destination::Other(47),
    };
    let probes = ["9.0.0.1", "10.0.0.1", "10.1.0.1", "10.1.1.1"].map(probe);
    for old in [&inner, &outer, &none, &all] {
        for new in [&inner, &outer, &none, &all] {
            check(old, new, &probes).expect("old or new");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Few labels and many endpoints: rule sets that some endpoints leave, others join and others keep.
    #[test]
    fn labels_and_policies_that_change_at_once_never_mix(
        before in vec(proptest::sample::select(vec!["a", "b", "c"]), 6),
        after in vec(proptest::sample::select(vec!["a", "b", "c"]), 6),
        admitted in vec(vec(subsequence(vec!["a", "b", "c"], 0..3), 3), 2),
        both in any::<bool>(),
    ) {
        let policies = |of: usize| -> Vec<(&'static str, &[&'static str])> {
            ["a", "b", "c"].into_iter().zip(admitted[of].iter().map(Vec::as_slice)).collect()
        };
        check_labels([&policies(0), &policies(usize::from(both))], [&before, &after])?;
    }
}
