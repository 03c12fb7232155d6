//! The oracle, by hand: each sentence of the model's precedence, and each kind of peer and port.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_policy::{
    model::{
        Action, Direction, Directions, Endpoint, Enforcement, Entity, Origin, Peer, Policy, PolicyName, Port,
        PortRange, Protocol, Rule, Selector, Tier,
    },
    names::NamePattern,
    oracle::{Destination, Flow, Names, PeerOf, Verdict, judge},
    requests::{HttpRule, Pattern, Requests},
};

fn origin(line: u32) -> Origin {
    Origin { file: "p.yaml".into(), line, document: "p".into(), field: "spec".into() }
}

fn rule(line: u32, action: Action) -> Rule {
    Rule { direction: Direction::Ingress, action, peers: None, ports: None, requests: None, origin: origin(line) }
}

fn policy(name: &str, tier: Tier, priority: u16, rules: Vec<Rule>) -> Policy {
    let name = PolicyName { kind: "P".to_owned(), namespace: String::new(), name: name.to_owned() };
    let isolates = Directions::default();
    Policy { name, subject: Selector::default(), tier, priority, isolates, rules, origin: origin(0) }
}

fn isolating(name: &str, rules: Vec<Rule>) -> Policy {
    let isolates = Directions { ingress: true, egress: false };
    Policy { isolates, ..policy(name, Tier::Namespaced, 0, rules) }
}

fn endpoint(ports: &[(&str, u16)]) -> Endpoint {
    let ports = ports.iter().map(|(name, port)| ((Protocol::Tcp, (*name).to_owned()), *port));
    let ports = Arc::new(ports.collect());
    Endpoint { addresses: ["10.0.0.2".parse().unwrap()].into(), ports, ..Endpoint::default() }
}

fn tcp(port: u16) -> Destination {
    Destination::Ports { protocol: Protocol::Tcp, port }
}

fn flow<'a>(subject: &'a Endpoint, peer: PeerOf<'a>, destination: Destination) -> Flow<'a> {
    static NO_NAMES: Names = Names::new();
    Flow { direction: Direction::Ingress, subject, peer, destination, names: &NO_NAMES }
}

/// The line of the rule that decides about a flow from outside, and whether it passes.
fn decides(policies: &[Policy]) -> (Option<u32>, bool) {
    let subject = endpoint(&[]);
    let verdict = judge(policies, &flow(&subject, PeerOf::Outside("192.0.2.7".parse().unwrap()), tcp(80)));
    let rule = match &verdict {
        Verdict::Accept { rule, .. } | Verdict::Deny { rule, .. } => *rule,
        Verdict::DenyUnknown => None,
    };
    (rule.map(|origin| origin.line), verdict.accepts())
}

use Action::{Accept, Deny, Pass};
use Tier::{Admin, Baseline, Namespaced};

#[test]
fn what_no_tier_decides_passes() {
    assert_eq!(decides(&[]), (None, true));
    assert_eq!(decides(&[policy("a", Admin, 0, vec![rule(1, Pass)])]), (None, true));
    assert_eq!(decides(&[policy("a", Baseline, 0, vec![rule(1, Pass), rule(2, Deny)])]), (None, true));
}

#[test]
fn the_first_matching_admin_rule_decides_by_priority_then_name_then_order() {
    let low = policy("z", Admin, 1, vec![rule(1, Deny), rule(2, Accept)]);
    let high = policy("b", Admin, 2, vec![rule(3, Accept)]);
    let equal = policy("y", Admin, 1, vec![rule(4, Accept)]);
    assert_eq!(decides(&[high.clone(), low.clone()]), (Some(1), false));
    assert_eq!(decides(&[high.clone(), low, equal]), (Some(4), true));
    assert_eq!(decides(&[high, policy("n", Namespaced, 0, vec![rule(5, Deny)])]), (Some(3), true));
}

#[test]
fn pass_goes_to_the_next_tier_past_later_rules_of_its_own() {
    let pass = policy("a", Admin, 0, vec![rule(1, Pass), rule(2, Deny)]);
    assert_eq!(decides(&[pass.clone(), policy("b", Admin, 1, vec![rule(3, Deny)])]), (None, true));
    assert_eq!(decides(&[pass, policy("n", Namespaced, 0, vec![rule(4, Deny)])]), (Some(4), false));
}

#[test]
fn in_a_namespace_deny_comes_before_accept_and_isolation_after_both() {
    let accept = policy("a", Namespaced, 0, vec![rule(1, Accept)]);
    let deny = policy("b", Namespaced, 0, vec![rule(2, Deny)]);
    assert_eq!(decides(&[accept.clone(), deny]), (Some(2), false));
    assert_eq!(decides(&[accept, isolating("i", vec![])]), (Some(1), true));
    let baseline = policy("c", Baseline, 0, vec![rule(3, Accept)]);
    let policies = [isolating("j", vec![]), baseline, isolating("i", vec![])];
    let subject = endpoint(&[]);
    let verdict = judge(&policies, &flow(&subject, PeerOf::Node("192.0.2.1".parse().unwrap()), tcp(80)));
    let isolated_by = vec![&policies[2].name, &policies[0].name];
    assert_eq!(verdict, Verdict::Deny { rule: None, isolated_by }, "isolation hides the baseline");
}

#[test]
fn isolation_of_one_direction_leaves_the_other() {
    let subject = endpoint(&[]);
    let ingress = flow(&subject, PeerOf::Outside("192.0.2.7".parse().unwrap()), tcp(80));
    let policies = [isolating("i", vec![])];
    assert!(!judge(&policies, &ingress).accepts());
    assert!(judge(&policies, &Flow { direction: Direction::Egress, ..ingress }).accepts());
}

#[test]
fn a_rule_without_requests_accepts_whatever_is_carried_and_others_add_up() {
    let get = |path: &str| {
        let path = Some(Pattern::Exact(path.to_owned()));
        Requests { http: [HttpRule { path, ..HttpRule::default() }].into(), ..Requests::default() }
    };
    let at = |port| Some(vec![Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: port, last: port } }]);
    let with = |line, port, path| Rule { ports: at(port), requests: Some(Arc::new(get(path))), ..rule(line, Accept) };
    let subject = endpoint(&[]);
    let carried = |rules: Vec<Rule>| {
        let policies = [isolating("i", rules)];
        let flow = flow(&subject, PeerOf::Outside("192.0.2.7".parse().unwrap()), tcp(80));
        match judge(&policies, &flow) {
            Verdict::Accept { rule, requests } => {
                Some((rule.map(|origin| origin.line), requests.map(std::borrow::Cow::into_owned)))
            }
            Verdict::Deny { .. } | Verdict::DenyUnknown => None,
        }
    };
    let both = get("/a").union(&get("/b"));
    assert_eq!(carried(vec![with(1, 80, "/a"), with(2, 80, "/b"), with(3, 81, "/c")]), Some((Some(1), Some(both))));
    assert_eq!(carried(vec![with(1, 80, "/a"), rule(2, Accept)]), Some((Some(2), None)));
    assert_eq!(carried(vec![with(1, 80, "/a"), rule(2, Deny)]), None);
    assert_eq!(carried(vec![Rule { ports: None, ..with(1, 80, "/a") }]), None, "without ports it matches nothing");
}

/// Whether a rule with these peers and ports matches.
fn matches(peers: Option<Vec<Peer>>, ports: Option<Vec<Port>>, flow: &Flow<'_>) -> bool {
    let policies = [isolating("i", vec![Rule { direction: flow.direction, peers, ports, ..rule(1, Accept) }])];
    let policies = policies.map(|p| Policy { isolates: Directions { ingress: true, egress: true }, ..p });
    judge(&policies, flow).accepts()
}

#[test]
fn entities_are_told_from_each_other_and_networks_match_every_address() {
    let subject = endpoint(&[]);
    let health = Endpoint { health: true, ..endpoint(&[]) };
    let address = "10.0.0.2".parse().unwrap();
    let peers = [
        PeerOf::Endpoint(&subject, address),
        PeerOf::Endpoint(&health, address),
        PeerOf::Node(address),
        PeerOf::Outside(address),
        PeerOf::Pod(address),
        PeerOf::OtherNode(address),
    ];
    let network = |except: &[&str]| Peer::Network {
        net: "10.0.0.0/8".parse().unwrap(),
        except: except.iter().map(|e| e.parse().unwrap()).collect(),
    };
    for (peer, expected) in [
        (Peer::Entity(Entity::All), [true, true, true, true, true, true]),
        (Peer::Entity(Entity::Cluster), [true, true, false, false, false, true]),
        (Peer::Entity(Entity::Health), [false, true, false, false, false, false]),
        (Peer::Entity(Entity::Host), [false, false, true, false, false, false]),
        (Peer::Entity(Entity::World), [false, false, false, true, false, false]),
        (Peer::Entity(Entity::RemoteNode), [false, false, false, false, false, true]),
        (Peer::Endpoints(Selector::default()), [true, true, false, false, false, false]),
        (network(&[]), [true, true, true, true, true, true]),
        (network(&["10.0.0.0/30"]), [false, false, false, false, false, false]),
        (network(&["10.0.0.4/30"]), [true, true, true, true, true, true]),
    ] {
        let seen = peers.map(|other| matches(Some(vec![peer.clone()]), None, &flow(&subject, other, tcp(80))));
        assert_eq!(seen, expected, "{peer:?}");
    }
    assert!(!matches(Some(vec![]), None, &flow(&subject, peers[0], tcp(80))), "an empty list matches nothing");
}

#[test]
fn exceptions_behind_services_deny_after_every_accept_rule_of_isolated_endpoints() {
    let subject = endpoint(&[]);
    let net = |text: &str| text.parse::<IpNet>().expect("network");
    let to =
        |cidr: &str, except: &[&str]| Peer::Network { net: net(cidr), except: except.iter().map(|e| net(e)).collect() };
    let rule = |peer: Peer, line| Rule {
        direction: Direction::Egress,
        action: Action::Accept,
        peers: Some(vec![peer]),
        ports: Some(vec![Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: 80, last: 80 } }]),
        requests: None,
        origin: origin(line),
    };
    let policy = |rules, egress| Policy {
        isolates: Directions { ingress: false, egress },
        ..policy("wide", Namespaced, 0, rules)
    };
    let services = [net("10.96.0.0/12")];
    let wide = || rule(to("10.0.0.0/8", &["10.1.0.0/16"]), 1);
    let count = |policy: Policy| policy.with_exceptions_behind(&services).rules.len();
    assert_eq!(count(policy(vec![wide()], true)), 2);
    assert_eq!(count(policy(vec![rule(to("10.0.0.0/8", &["10.64.0.0/10"]), 1)], true)), 1, "services are excepted");
    assert_eq!(count(policy(vec![rule(to("10.0.0.0/9", &["10.1.0.0/16"]), 1)], true)), 2);
    assert_eq!(count(policy(vec![rule(to("10.96.0.0/16", &["10.96.0.9/32"]), 1)], true)), 1, "about services");
    assert_eq!(count(policy(vec![Rule { direction: Direction::Ingress, ..wide() }], true)), 1);

    let verdict = |policies: &[Policy], address: &str, port| {
        let address: IpAddr = address.parse().expect("address");
        let policies: Vec<Policy> = policies.iter().cloned().map(|p| p.with_exceptions_behind(&services)).collect();
        let flow = Flow { direction: Direction::Egress, ..flow(&subject, PeerOf::Pod(address), tcp(port)) };
        match judge(&policies, &flow) {
            Verdict::Accept { .. } => "accepted",
            Verdict::Deny { rule: Some(_), .. } => "denied by a rule",
            Verdict::Deny { rule: None, .. } => "isolated",
            Verdict::DenyUnknown => "unknown",
        }
    };
    let isolated = [policy(vec![wide()], true)];
    assert_eq!(verdict(&isolated, "10.1.0.1", 80), "denied by a rule");
    assert_eq!(verdict(&isolated, "10.1.0.1", 8080), "denied by a rule", "a service may have another port");
    assert_eq!(verdict(&isolated, "10.2.0.1", 80), "accepted");
    assert_eq!(verdict(&isolated, "10.2.0.1", 8080), "isolated");
    let also = [policy(vec![wide(), rule(to("10.1.0.0/24", &[]), 2)], true)];
    assert_eq!(verdict(&also, "10.1.0.1", 80), "accepted", "by another rule");
    assert_eq!(verdict(&[policy(vec![wide()], false)], "10.1.0.1", 80), "accepted", "nothing isolates");
}

#[test]
fn names_match_what_is_outside_and_has_an_address_of_theirs() {
    let (subject, other) = (endpoint(&[]), endpoint(&[]));
    let [own, another] = ["10.0.0.3", "10.0.0.4"].map(|address| address.parse().unwrap());
    let names: Names = [("a.example".into(), [own].into()), ("b.example".into(), [own, another].into())].into();
    for (pattern, expected) in [
        ("a.example", [true, false]),
        ("*.example", [true, true]),
        ("b.*", [true, true]),
        ("*", [true, true]),
        ("example", [false, false]),
    ] {
        let peers = vec![Peer::Names(NamePattern::pattern(pattern).unwrap())];
        for (address, expected) in [own, another].into_iter().zip(expected) {
            let others = [
                PeerOf::Endpoint(&other, address),
                PeerOf::Node(address),
                PeerOf::OtherNode(address),
                PeerOf::Pod(address),
                PeerOf::Outside(address),
            ];
            for other in others {
                let flow = Flow { names: &names, ..flow(&subject, other, tcp(80)) };
                let expected = expected && matches!(other, PeerOf::Outside(_));
                assert_eq!(matches(Some(peers.clone()), None, &flow), expected, "{pattern} {other:?}");
                let nameless = Flow { names: &Names::new(), ..flow };
                assert!(!matches(Some(peers.clone()), None, &nameless), "{pattern} {other:?}");
            }
        }
    }
}

#[test]
fn a_named_port_is_the_receivers() {
    let (subject, other) = (endpoint(&[("web", 8080)]), endpoint(&[("web", 80)]));
    let named = || Some(vec![Port::Named { protocol: Protocol::Tcp, name: "web".to_owned() }]);
    let address = "10.0.0.3".parse().unwrap();
    for (direction, peer, port, expected) in [
        (Direction::Ingress, PeerOf::Endpoint(&other, address), 8080, true),
        (Direction::Ingress, PeerOf::Endpoint(&other, address), 80, false),
        (Direction::Ingress, PeerOf::Outside(address), 8080, true),
        (Direction::Egress, PeerOf::Endpoint(&other, address), 80, true),
        (Direction::Egress, PeerOf::Endpoint(&other, address), 8080, false),
        (Direction::Egress, PeerOf::Outside(address), 8080, false),
        (Direction::Egress, PeerOf::Node(address), 8080, false),
    ] {
        let flow = Flow { direction, ..flow(&subject, peer, tcp(port)) };
        assert_eq!(matches(None, named(), &flow), expected, "{direction:?} {port}");
    }
}

#[test]
fn ports_are_of_their_protocol_and_both_ends_of_a_range_count() {
    let subject = endpoint(&[]);
    let range = Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: 80, last: 90 } };
    let ping = Port::Icmp { v6: false, kind: Some(8) };
    let any6 = Port::Icmp { v6: true, kind: None };
    let udp = Destination::Ports { protocol: Protocol::Udp, port: 80 };
    let icmp = |v6, kind| Destination::Icmp { v6, kind };
    for (destination, expected) in [
        (tcp(79), [false, false, false]),
        (tcp(80), [true, false, false]),
        (tcp(90), [true, false, false]),
        (tcp(91), [false, false, false]),
        (udp, [false, false, false]),
        (icmp(false, 8), [false, true, false]),
        (icmp(false, 0), [false, false, false]),
        (icmp(true, 8), [false, false, true]),
        (Destination::Other(6), [false, false, false]),
    ] {
        let flow = flow(&subject, PeerOf::Outside("192.0.2.7".parse().unwrap()), destination);
        let seen = [&range, &ping, &any6].map(|port| matches(None, Some(vec![port.clone()]), &flow));
        assert_eq!(seen, expected, "{destination:?}");
        assert!(matches(None, None, &flow));
        assert!(!matches(None, Some(vec![]), &flow));
    }
}

#[test]
fn an_unknown_transport_header_is_denied_where_a_rule_with_ports_comes_first() {
    let port = || Some(vec![Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: 80, last: 80 } }]);
    let of_port = |line, action| Rule { ports: port(), ..rule(line, action) };
    let subject = endpoint(&[("http", 8080)]);
    let outside = PeerOf::Outside("192.0.2.7".parse().unwrap());
    let said = |policies: &[Policy]| {
        let verdict = judge(policies, &flow(&subject, outside, Destination::Unknown));
        if verdict == Verdict::DenyUnknown { None } else { Some(verdict.accepts()) }
    };
    let admin = |rules| policy("a", Admin, 0, rules);
    for (policies, expected) in [
        (vec![], Some(true)),
        (vec![admin(vec![of_port(1, Deny)])], None),
        (vec![admin(vec![of_port(1, Accept)])], None),
        (vec![admin(vec![of_port(1, Pass)])], None),
        (vec![admin(vec![rule(1, Accept), of_port(2, Deny)])], Some(true)),
        (vec![admin(vec![rule(1, Pass), of_port(2, Deny)])], Some(true)),
        (vec![admin(vec![rule(1, Deny), of_port(2, Accept)])], Some(false)),
        (vec![isolating("i", vec![])], Some(false)),
        (vec![isolating("i", vec![rule(1, Accept)])], Some(true)),
        (vec![isolating("i", vec![of_port(1, Accept)])], None),
        (vec![isolating("i", vec![rule(1, Accept), of_port(2, Deny)])], None),
        (vec![policy("b", Baseline, 0, vec![of_port(1, Deny)])], None),
        (vec![policy("b", Baseline, 0, vec![of_port(1, Pass)])], None),
    ] {
        assert_eq!(said(&policies), expected, "{policies:?}");
    }
    // A name that the receiver does not declare stands for no port.
    for (name, expected) in [("http", None), ("dns", Some(true))] {
        let ports = Some(vec![Port::Named { protocol: Protocol::Tcp, name: name.to_owned() }]);
        assert_eq!(said(&[admin(vec![Rule { ports, ..rule(1, Deny) }])]), expected, "{name}");
    }
}

#[test]
fn an_endpoint_may_be_isolated_without_a_policy_and_be_the_subject_of_none() {
    let by = PolicyName { kind: "own".to_owned(), namespace: String::new(), name: "isolation".to_owned() };
    let always = Endpoint { enforcement: Enforcement::Always(by.clone().into()), ..endpoint(&[]) };
    let outside = PeerOf::Outside("192.0.2.7".parse().unwrap());
    let ingress = flow(&always, outside, tcp(80));
    for direction in [Direction::Ingress, Direction::Egress] {
        let verdict = judge(&[], &Flow { direction, ..ingress });
        assert_eq!(verdict, Verdict::Deny { rule: None, isolated_by: vec![&by] });
    }
    let allow = policy("allow", Baseline, 0, vec![rule(1, Accept)]);
    assert!(!judge(&[allow], &ingress).accepts(), "nothing of the baseline tier where something isolates");
    let never = Endpoint { enforcement: Enforcement::Never, ..endpoint(&[]) };
    let deny = policy("deny", Admin, 0, vec![rule(1, Deny)]);
    assert!(judge(&[deny], &flow(&never, outside, tcp(80))).accepts());
}
