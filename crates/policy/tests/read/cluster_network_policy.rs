//! `ClusterNetworkPolicy`.

use crate::{accepted, refused, shown};

fn document(spec: &str) -> String {
    format!(
        "{{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {{name: p}},\n spec: {spec}}}"
    )
}

fn with_rule(section: &str, rule: &str) -> String {
    document(&format!("{{tier: Admin, priority: 5, subject: {{namespaces: {{}}}}, {section}: [{rule}]}}"))
}

#[test]
fn tiers_and_priorities_order_policies_that_never_isolate() {
    for (spec, expected) in [
        ("{tier: Admin, priority: 0, subject: {namespaces: {}}}", "Admin 0, isolates nothing: ns?"),
        ("{tier: Baseline, priority: 1000, subject: {namespaces: {}}}", "Baseline 1000, isolates nothing: ns?"),
        (
            "{tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: a}}}}",
            "Admin 1, isolates nothing: ns.team=a",
        ),
        (
            "{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}}",
            "Admin 1, isolates nothing: ns? & k8s:app=a",
        ),
        (
            "{tier: Admin, priority: 1, subject: {pods: {podSelector: {}}}, ingress: [], egress: []}",
            "Admin 1, isolates nothing: ns?",
        ),
    ] {
        let policies = accepted(&document(spec));
        assert_eq!(shown(&policies[0]), [expected], "{spec}");
        assert_eq!(policies[0].name.to_string(), "ClusterNetworkPolicy p");
    }
}

#[test]
fn rules_keep_their_order_action_peers_and_ports() {
    let spec = "{tier: Admin, priority: 5, subject: {namespaces: {}},
      egress: [
        {name: dns, action: Accept, to: [{pods: {podSelector: {matchLabels: {app: dns}}}}],
         protocols: [{udp: {destinationPort: {number: 53}}}, {tcp: {destinationPort: {number: 53}}}]},
        {action: Pass, to: [{namespaces: {}}, {networks: [10.0.0.0/8, 'fd00::/8']}]},
        {action: Deny, to: [{networks: [0.0.0.0/0]}], protocols: [{sctp: {destinationPort: {range: {start: 1, end: 99}}}}]}],
      ingress: [
        {action: Deny, from: [{namespaces: {matchExpressions: [{key: team, operator: NotIn, values: [a]}]}}],
         protocols: [{destinationNamedPort: metrics}]}]}";
    let policies = accepted(&document(spec));
    assert_eq!(
        shown(&policies[0])[1..],
        [
            "Ingress Deny [<ns? & ns.team!=a>] [Tcp metrics, Udp metrics, Sctp metrics]",
            "Egress Accept [<ns? & k8s:app=dns>] [Udp 53-53, Tcp 53-53]",
            "Egress Pass [<ns?>, 10.0.0.0/8, fd00::/8] *",
            "Egress Deny [0.0.0.0/0] [Sctp 1-99]",
        ]
    );
    assert_eq!(policies[0].rules[3].origin.to_string(), "test.yaml:7: ClusterNetworkPolicy p, spec.egress[2]");
}

#[test]
fn the_newer_version_is_read_as_the_older() {
    let older = with_rule("ingress", "{action: Pass, from: [{namespaces: {}}]}");
    assert_eq!(accepted(&older), accepted(&older.replace("v1alpha2", "v1beta1")));
}

#[test]
fn rules_that_the_api_refuses_are_refused() {
    let peer = "{namespaces: {}}";
    let many = vec![peer; 26].join(", ");
    for (section, rule, expected) in [
        ("ingress", "{from: [PEER]}", "ingress[0].action: is missing; write Accept, Deny or Pass"),
        (
            "ingress",
            "{action: Allow, from: [PEER]}",
            "ingress[0].action: is \"Allow\"; write one of Accept, Deny, Pass",
        ),
        ("ingress", "{action: Deny}", "ingress[0].from: is missing"),
        ("ingress", "{action: Deny, from: []}", "ingress[0].from: is empty"),
        ("ingress", "{action: Deny, from: [{}]}", "ingress[0].from[0]: is empty; write one of namespaces, pods"),
        (
            "ingress",
            "{action: Deny, from: [{namespaces: {}, pods: {podSelector: {}}}]}",
            "from[0]: has namespaces and pods",
        ),
        ("ingress", "{action: Deny, from: [{pods: {namespaceSelector: {}}}]}", "from[0].pods.podSelector: is missing"),
        ("ingress", "{action: Deny, from: [{networks: [10.0.0.0/8]}]}", "from[0].networks: is no field here"),
        ("ingress", "{action: Deny, from: [MANY]}", "ingress[0].from: has 26 items; write at most 25"),
        ("egress", "{action: Deny, to: [{networks: []}]}", "to[0].networks: is empty"),
        (
            "egress",
            "{action: Deny, to: [{networks: [10.0.0.1/8]}]}",
            "networks[0]: 10.0.0.1/8 has host bits; write 10.0.0.0/8",
        ),
        ("egress", "{action: Deny, to: [{networks: [10.0.0.1]}]}", "networks[0]: \"10.0.0.1\" is no network"),
        ("egress", "{action: Deny, to: [{nodes: {}}]}", "to[0].nodes: is not supported; write the nodes' addresses"),
        (
            "egress",
            "{action: Accept, to: [{domainNames: [example.org]}]}",
            "to[0].domainNames: is not supported; write the names'",
        ),
        (
            "egress",
            "{action: Deny, to: [{networks: [10.0.0.0/8]}], protocols: [{destinationNamedPort: a}]}",
            "egress[0].protocols: name a port",
        ),
        ("ingress", "{action: Deny, from: [PEER], ports: []}", "ingress[0].ports: is no field here"),
        ("ingress", "{action: Deny, from: [PEER], protocols: []}", "protocols: is empty"),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{}]}",
            "protocols[0]: is empty; write one of tcp, udp, sctp",
        ),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{tcp: {}}]}",
            "protocols[0].tcp.destinationPort: is missing",
        ),
        ("ingress", "{action: Deny, from: [PEER], protocols: [{icmp: {}}]}", "protocols[0].icmp: is no field here"),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{tcp: {destinationPort: {}}}]}",
            "destinationPort: is empty",
        ),
        ("ingress", "{action: Deny, from: [PEER], protocols: [{tcp: {destinationPort: {number: 0}}}]}", "number: is 0"),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{tcp: {destinationPort: {number: '80'}}}]}",
            "number: is text",
        ),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{udp: {destinationPort: {range: {start: 5, end: 5}}}}]}",
            "range: starts at 5 and ends at 5",
        ),
        (
            "ingress",
            "{action: Deny, from: [PEER], protocols: [{udp: {destinationPort: {range: {start: 5}}}}]}",
            "range.end: is missing",
        ),
        ("ingress", "{action: Deny, from: [PEER], name: LONG}", "ingress[0].name: has 101 characters"),
    ] {
        let rule = rule.replace("PEER", peer).replace("MANY", &many).replace("LONG", &"x".repeat(101));
        let refusals = refused(&with_rule(section, &rule));
        assert!(refusals.starts_with("test.yaml:2: ClusterNetworkPolicy p, spec."), "{refusals}");
        assert!(refusals.contains(expected), "{rule}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{rule}: {refusals}");
    }
    let rules = vec!["{action: Deny, from: [{namespaces: {}}]}"; 26].join(", ");
    assert!(refused(&with_rule("ingress", &rules)).contains("spec.ingress: has 26 rules; write at most 25"));
}

#[test]
fn a_policy_without_tier_priority_or_subject_is_refused() {
    for (spec, expected) in [
        ("{priority: 1, subject: {namespaces: {}}}", "spec.tier: is missing"),
        (
            "{tier: admin, priority: 1, subject: {namespaces: {}}}",
            "spec.tier: is \"admin\"; write one of Admin, Baseline",
        ),
        ("{tier: Admin, subject: {namespaces: {}}}", "spec.priority: is missing"),
        (
            "{tier: Admin, priority: 1001, subject: {namespaces: {}}}",
            "spec.priority: is 1001; write a whole number from 0 to 1000",
        ),
        ("{tier: Admin, priority: -1, subject: {namespaces: {}}}", "spec.priority: is -1"),
        ("{tier: Admin, priority: 1}", "spec.subject: is missing"),
        ("{tier: Admin, priority: 1, subject: {}}", "spec.subject: is empty"),
        ("{tier: Admin, priority: 1, subject: {namespaces: null}}", "spec.subject: is empty"),
        (
            "{tier: Admin, priority: 1, subject: {namespaces: {}, pods: {podSelector: {}}}}",
            "spec.subject: has namespaces and pods",
        ),
    ] {
        let refusals = refused(&document(spec));
        assert!(refusals.contains(expected), "{spec}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{spec}: {refusals}");
    }
}
