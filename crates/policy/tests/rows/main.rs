//! The compiled rows against the oracle, in a small universe of policies and flows.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::sync::Arc;

use proptest::{collection::vec, prelude::*, strategy::ValueTree, test_runner::TestRunner};
use wharf_policy::{
    compile::{EndpointKey, Event, Identity, Limits, Member, Tables, compile},
    model::Endpoint,
    oracle::{Flow, Names, Verdict, judge},
};

mod by_hand;
mod engine;
mod limits;
mod names;
mod transition;
mod universe;
mod unknown;

use universe::{Probe, Step, World};

/// More rows than any test needs.
const ROOMY: Limits = Limits { ipcache: 1 << 20, ports: 1 << 20, rules: 1 << 20, sets: 1 << 20, listeners: 1 << 10 };

fn member(endpoint: &Endpoint) -> Member {
    Member { identity: Identity(universe::identity(endpoint)), endpoint: Arc::new(endpoint.clone()) }
}

/// The endpoint's key in the tables: neighbours are of one share, or of two.
fn key(endpoint: u32) -> EndpointKey {
    EndpointKey(9 * endpoint)
}

/// The world as events that begin with nothing.
fn events(world: &World) -> Vec<Event> {
    let policies = world.policies.values().map(|policy| Event::Policy(policy.clone()));
    let endpoints = world.endpoints.iter().map(|(n, e)| Event::Endpoint(key(*n), member(e)));
    let names = world.names.iter().map(|(name, addresses)| Event::Name(Arc::clone(name), addresses.clone()));
    policies
        .chain(endpoints)
        .chain([
            Event::Node(world.node.clone()),
            Event::OtherNodes(world.other_nodes.clone()),
            Event::Pods(world.pods.clone()),
        ])
        .chain(names)
        .collect()
}

fn event(step: &Step) -> Event {
    match step.clone() {
        Step::Policy(policy) => Event::Policy(policy),
        Step::NoPolicy(name) => Event::NoPolicy(name),
        Step::Endpoint(n, endpoint) => Event::Endpoint(key(n), member(&endpoint)),
        Step::NoEndpoint(n) => Event::NoEndpoint(key(n)),
        Step::Node(node) => Event::Node(node),
        Step::OtherNodes(nodes) => Event::OtherNodes(nodes),
        Step::Pods(pods) => Event::Pods(pods),
        Step::Name(name, addresses) => Event::Name(name, addresses),
    }
}

/// What the rows decide about a probe, in the oracle's words.
fn verdict<'a>(tables: &'a Tables, probe: &Probe) -> Option<Verdict<'a>> {
    let key = key(probe.endpoint);
    let decision = tables.decide(key, probe.direction, probe.peer, probe.destination)?;
    tables.explain(key, probe.direction, decision)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_rows_decide_what_the_policies_say(world in universe::world(), probes in vec(universe::probe(), 24)) {
        let tables = compile(events(&world), ROOMY).expect("it fits");
        for probe in &probes {
            let said = world.flow(probe).map(|flow| judge(world.policies.values(), &flow));
            prop_assert_eq!(verdict(&tables, probe), said, "{:?}", probe);
        }
    }
}

#[test]
fn random_flows_meet_every_kind_of_verdict() {
    let mut runner = TestRunner::deterministic();
    let (mut kinds, mut named) = ([0; 6], 0);
    for _ in 0..200 {
        let world = universe::world().new_tree(&mut runner).expect("a world").current();
        let probes = vec(universe::probe(), 20).new_tree(&mut runner).expect("probes").current();
        for flow in probes.iter().filter_map(|probe| world.flow(probe)) {
            let verdict = judge(world.policies.values(), &flow);
            named += u32::from(judge(world.policies.values(), &Flow { names: &Names::new(), ..flow }) != verdict);
            let kind = match verdict {
                Verdict::Accept { rule: None, .. } => 0,
                Verdict::Accept { rule: Some(_), requests: None } => 1,
                Verdict::Accept { rule: Some(_), requests: Some(_) } => 4,
                Verdict::Deny { rule: None, .. } => 2,
                Verdict::Deny { rule: Some(_), .. } => 3,
                Verdict::DenyUnknown => 5,
            };
            kinds[kind] += 1;
        }
    }
    let all: u32 = kinds.iter().sum();
    assert!(kinds[..4].iter().all(|kind| kind * 20 > all), "each is more than a twentieth: {kinds:?}");
    assert!(
        kinds[4..].iter().all(|kind| kind * 100 > all),
        "requests and unknown headers are more than a hundredth: {kinds:?}"
    );
    assert!(named * 100 > all, "names decide more than a hundredth: {named} of {all}");
}
