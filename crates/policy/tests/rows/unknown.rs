//! Namespaces whose labels are unknown.

use std::{collections::BTreeMap, sync::Arc};

use proptest::{collection::vec, option, prelude::*, sample::select};
use wharf_policy::{
    compile::{Engine, compile},
    model::{
        Action, Direction, Endpoint, Holds, LabelOf, NAMESPACE_NAME, Peer, Policy, Requirement, Selector, Tier,
        UNKNOWN_LABELS,
    },
    oracle::{Destination, Flow, Names, PeerOf, judge},
};

use crate::{
    ROOMY,
    by_hand::{admits, labelled},
    event, events,
    universe::{self, Step, TEAM, World},
    verdict,
};

/// A label of an endpoint's namespace, by the endpoint's number.
type Teams = BTreeMap<u32, Option<&'static str>>;

/// Each selector of a namespace by its name selects it by its team.
fn by_team(policy: &Policy) -> Policy {
    let selector = |selector: &Selector| {
        let of_team = |requirement: &Requirement| match requirement.of {
            LabelOf::Namespace => Requirement { key: TEAM.to_owned(), ..requirement.clone() },
            LabelOf::Endpoint => requirement.clone(),
        };
        Selector(selector.0.iter().map(of_team).collect())
    };
    let mut policy = policy.clone();
    policy.subject = selector(&policy.subject);
    for peer in policy.rules.iter_mut().flat_map(|rule| rule.peers.iter_mut().flatten()) {
        if let Peer::Endpoints(of) = peer {
            *of = selector(of);
        }
    }
    policy
}

/// The namespace's name is its team, or unknown.
fn in_team(endpoint: &Endpoint, is_known: bool) -> Endpoint {
    let namespace = endpoint.namespace.as_ref().map(|labels| {
        let team = labels.get(NAMESPACE_NAME).map(|name| (TEAM.to_owned(), name.clone()));
        let unknown = (UNKNOWN_LABELS.to_owned(), String::new());
        Arc::new(if is_known { team.into_iter().collect() } else { [unknown].into() })
    });
    Endpoint { namespace, ..endpoint.clone() }
}

/// Of each endpoint that is in a namespace, these labels.
fn with_teams(world: &World, teams: &Teams) -> World {
    let mut world = world.clone();
    for (number, endpoint) in &mut world.endpoints {
        if let Some(labels) = endpoint.namespace.as_mut().map(Arc::make_mut)
            && labels.remove(UNKNOWN_LABELS).is_some()
            && let Some(team) = teams.get(number).copied().flatten()
        {
            labels.insert(TEAM.to_owned(), team.to_owned());
        }
    }
    world
}

/// A world whose policies select by team, with unknown teams of some endpoints.
fn worlds() -> impl Strategy<Value = World> {
    (universe::world(), vec(any::<bool>(), 8)).prop_map(|(world, known)| World {
        policies: world.policies.iter().map(|(name, policy)| (name.clone(), by_team(policy))).collect(),
        endpoints: world
            .endpoints
            .iter()
            .zip(known)
            .map(|((number, endpoint), is_known)| (*number, in_team(endpoint, is_known)))
            .collect(),
        ..world
    })
}

fn a_step() -> impl Strategy<Value = Step> {
    (universe::step(), any::<bool>()).prop_map(|(step, is_known)| match step {
        Step::Policy(policy) => Step::Policy(by_team(&policy)),
        Step::Endpoint(number, endpoint) => Step::Endpoint(number, in_team(&endpoint, is_known)),
        other => other,
    })
}

fn some_teams() -> impl Strategy<Value = Teams> {
    vec(option::of(select(vec!["a", "b"])), 8).prop_map(|teams| (1..).zip(teams).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn what_passes_while_labels_are_unknown_passes_with_any_labels(
        world in worlds(),
        teams in some_teams(),
        probes in vec(universe::probe(), 24),
    ) {
        let known = with_teams(&world, &teams);
        // Without a transport header, an accept rule about other ports denies.
        for probe in probes.iter().filter(|probe| probe.destination != Destination::Unknown) {
            let passes = |world: &World| world.flow(probe).map(|flow| judge(world.policies.values(), &flow).accepts());
            let (before, after) = (passes(&world), passes(&known));
            prop_assert!(before != Some(true) || after == Some(true), "{:?} with {:?}", probe, teams);
        }
    }

    #[test]
    fn the_rows_decide_the_same_while_labels_are_unknown_and_when_they_become_known(
        world in worlds(),
        steps in vec(vec(a_step(), 1..3), 0..5),
        teams in some_teams(),
        probes in vec(universe::probe(), 24),
    ) {
        let mut world = world;
        let mut engine = Engine::new(ROOMY);
        engine.apply(events(&world)).expect("it fits");
        for steps in steps {
            engine.apply(steps.iter().map(event)).expect("it fits");
            steps.iter().for_each(|step| step.apply(&mut world));
        }
        for known in [false, true] {
            if known {
                world = with_teams(&world, &teams);
                let renewed = world.endpoints.iter().map(|(n, e)| event(&Step::Endpoint(*n, e.clone())));
                engine.apply(renewed).expect("it fits");
            }
            let fresh = compile(events(&world), ROOMY).expect("it fits");
            for probe in &probes {
                let said = world.flow(probe).map(|flow| judge(world.policies.values(), &flow));
                prop_assert_eq!(verdict(engine.tables(), probe), said.clone(), "{:?}", probe);
                prop_assert_eq!(verdict(&fresh, probe), said, "{:?} compiled from nothing", probe);
            }
        }
    }
}

fn team(holds: Holds) -> Selector {
    Selector([Requirement { of: LabelOf::Namespace, key: TEAM.to_owned(), holds }].into())
}

fn red() -> Holds {
    Holds::In(["red".to_owned()].into())
}

fn not_red() -> Holds {
    Holds::NotIn(["red".to_owned()].into())
}

/// In the namespace `shop`, with these labels of the namespace or with unknown ones.
fn in_shop(key: u32, team: Option<&str>) -> Endpoint {
    let name = (NAMESPACE_NAME.to_owned(), "shop".to_owned());
    let label = match team {
        Some(team) => (TEAM.to_owned(), team.to_owned()),
        None => (UNKNOWN_LABELS.to_owned(), String::new()),
    };
    Endpoint { namespace: Some(Arc::new([name, label].into())), ..labelled(key, "a") }
}

/// Whether an ingress flow to `subject` from `peer` passes.
fn passes(policies: &[Policy], subject: &Endpoint, peer: &Endpoint) -> bool {
    let names = Names::new();
    let (direction, destination) = (Direction::Ingress, Destination::Other(47));
    let peer = PeerOf::Endpoint(peer, peer.addresses[0]);
    judge(policies, &Flow { direction, subject, peer, destination, names: &names }).accepts()
}

/// A policy about every endpoint with one rule about these peers.
fn about(tier: Tier, action: Action, peers: Selector) -> Policy {
    let mut policy = Policy { subject: Selector::default(), tier, ..admits(1, "a", &[]) };
    policy.isolates.ingress = tier == Tier::Namespaced && action == Action::Accept;
    policy.rules[0].action = action;
    policy.rules[0].peers = Some(vec![Peer::Endpoints(peers)]);
    policy
}

#[test]
fn an_accept_rule_matches_no_peer_whose_namespace_may_not_be_selected() {
    let subject = labelled(1, "a");
    for holds in [red(), not_red(), Holds::Exists, Holds::DoesNotExist] {
        let policies = [about(Tier::Namespaced, Action::Accept, team(holds))];
        assert!(!passes(&policies, &subject, &in_shop(2, None)), "{policies:?}");
    }
    let policies = [about(Tier::Namespaced, Action::Accept, team(not_red()))];
    assert!(
        passes(&policies, &subject, &in_shop(2, Some("blue")))
            && !passes(&policies, &subject, &in_shop(2, Some("red")))
    );
    // The name is always known.
    let requirement = |holds| Requirement { of: LabelOf::Namespace, key: NAMESPACE_NAME.to_owned(), holds };
    for holds in [Holds::In(["shop".to_owned()].into()), Holds::NotIn(["other".to_owned()].into()), Holds::Exists] {
        let policies = [about(Tier::Namespaced, Action::Accept, Selector([requirement(holds)].into()))];
        assert!(passes(&policies, &subject, &in_shop(2, None)), "{policies:?}");
    }
}

#[test]
fn a_deny_rule_matches_each_peer_whose_namespace_may_be_selected() {
    let subject = labelled(1, "a");
    for tier in [Tier::Admin, Tier::Namespaced, Tier::Baseline] {
        for holds in [red(), not_red(), Holds::Exists, Holds::DoesNotExist] {
            let policies = [about(tier, Action::Deny, team(holds))];
            assert!(!passes(&policies, &subject, &in_shop(2, None)), "{policies:?}");
        }
        let policies = [about(tier, Action::Deny, team(red()))];
        assert!(passes(&policies, &subject, &in_shop(2, Some("blue"))), "{tier:?}");
        assert!(passes(&policies, &subject, &labelled(2, "a")), "{tier:?}: without a namespace");
    }
}

#[test]
fn a_pass_that_may_match_denies_in_the_admin_tier_alone() {
    let subject = labelled(1, "a");
    let pass = |tier| [about(tier, Action::Pass, team(red()))];
    assert!(!passes(&pass(Tier::Admin), &subject, &in_shop(2, None)));
    assert!(passes(&pass(Tier::Admin), &subject, &in_shop(2, Some("red"))));
    assert!(passes(&pass(Tier::Admin), &subject, &in_shop(2, Some("blue"))));
    assert!(passes(&pass(Tier::Baseline), &subject, &in_shop(2, None)));
}

#[test]
fn a_policy_that_may_select_its_subject_denies_and_isolates_but_accepts_nothing() {
    let peer = labelled(2, "a");
    let of_red = |policy: Policy| [Policy { subject: team(red()), ..policy }];
    let accepts = of_red(about(Tier::Namespaced, Action::Accept, Selector::default()));
    let denies = of_red(about(Tier::Admin, Action::Deny, Selector::default()));
    let open = of_red(about(Tier::Admin, Action::Accept, Selector::default()));
    for (team, expected) in [(None, [false, false]), (Some("red"), [true, false]), (Some("blue"), [true, true])] {
        let found = [&accepts, &denies].map(|policies| passes(policies, &in_shop(1, team), &peer));
        assert_eq!(found, expected, "{team:?}");
    }
    let denied = about(Tier::Baseline, Action::Deny, Selector::default());
    let both = [open[0].clone(), Policy { name: admits(9, "a", &[]).name, ..denied }];
    assert!(!passes(&both, &in_shop(1, None), &peer), "the accept rule may not apply");
    assert!(passes(&both, &in_shop(1, Some("red")), &peer));
}

#[test]
fn a_deny_rule_about_labels_of_namespaces_takes_no_more_classes_than_an_accept_rule() {
    let count = |action| {
        let policies =
            [about(Tier::Namespaced, Action::Accept, team(not_red())), about(Tier::Admin, action, team(red()))];
        let mut world = World {
            policies: BTreeMap::new(),
            endpoints: (1..4).zip(["red", "blue", "green"]).map(|(n, team)| (n, in_shop(n, Some(team)))).collect(),
            node: Default::default(),
            other_nodes: Default::default(),
            pods: Default::default(),
            names: Names::new(),
        };
        for (n, policy) in (1..).zip(policies) {
            let policy = Policy { name: admits(n, "a", &[]).name, ..policy };
            world.policies.insert(policy.name.clone(), policy);
        }
        let tables = compile(events(&world), ROOMY).expect("it fits");
        tables.sizes()
    };
    assert_eq!(count(Action::Deny), count(Action::Accept));
    assert_eq!(count(Action::Pass), count(Action::Accept));
}
