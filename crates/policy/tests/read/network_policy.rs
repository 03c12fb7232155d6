//! `NetworkPolicy`.

use crate::{accepted, refused, shown};

fn document(spec: &str) -> String {
    format!(
        "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: p, namespace: shop}},\n spec: {spec}}}"
    )
}

fn table(rows: &[(&str, &[&str])]) {
    for (spec, expected) in rows {
        let policies = accepted(&document(spec));
        assert_eq!(policies.len(), 1, "{spec}");
        assert_eq!(shown(&policies[0]), *expected, "{spec}");
    }
}

#[test]
fn absent_and_empty_lists_mean_what_they_mean_in_kubernetes() {
    table(&[
        ("{podSelector: {}}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, ingress: []}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, ingress: null, egress: null}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, egress: []}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, policyTypes: []}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, policyTypes: [Ingress]}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{podSelector: {}, policyTypes: [Egress]}", &["Namespaced 0, isolates egress: ns=shop"]),
        ("{podSelector: {}, policyTypes: [Egress, Ingress]}", &["Namespaced 0, isolates both: ns=shop"]),
        ("{podSelector: {}, ingress: [{}]}", &["Namespaced 0, isolates ingress: ns=shop", "Ingress Accept * *"]),
        ("{podSelector: {}, egress: [{}]}", &["Namespaced 0, isolates both: ns=shop", "Egress Accept * *"]),
        ("{ingress: [{from: [], ports: []}]}", &["Namespaced 0, isolates ingress: ns=shop", "Ingress Accept * *"]),
        ("{ingress: [{from: null, ports: null}]}", &["Namespaced 0, isolates ingress: ns=shop", "Ingress Accept * *"]),
        (
            "{ingress: [{ports: [{port: 80}]}, {from: [{podSelector: {}}]}]}",
            &[
                "Namespaced 0, isolates ingress: ns=shop",
                "Ingress Accept * [Tcp 80-80]",
                "Ingress Accept [<ns=shop>] *",
            ],
        ),
    ]);
}

#[test]
fn rules_of_a_direction_that_the_policy_is_not_about_have_no_effect() {
    table(&[
        ("{policyTypes: [Ingress], egress: [{}]}", &["Namespaced 0, isolates ingress: ns=shop"]),
        ("{policyTypes: [Egress], ingress: [{}]}", &["Namespaced 0, isolates egress: ns=shop"]),
    ]);
}

#[test]
fn selectors_of_pods_are_of_the_policys_namespace_unless_they_name_others() {
    let head = "Namespaced 0, isolates ingress: ns=shop";
    for (peer, expected) in [
        ("podSelector: {}", "<ns=shop>"),
        (
            "podSelector: {matchLabels: {app: web, example.org/tier: ''}}",
            "<ns=shop & k8s:app=web & k8s:example.org/tier=>",
        ),
        ("namespaceSelector: {}", "<ns?>"),
        ("namespaceSelector: {}, podSelector: {}", "<ns?>"),
        ("namespaceSelector: {matchLabels: {team: a}}", "<ns.team=a>"),
        (
            "namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchLabels: {app: web}}",
            "<ns.team=a & k8s:app=web>",
        ),
        ("namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: b}}", "<ns=b>"),
        ("namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [a]}]}", "<ns? & ns.team!=a>"),
        ("namespaceSelector: {matchExpressions: [{key: team, operator: DoesNotExist}]}", "<ns? & !ns.team>"),
        ("namespaceSelector: {matchExpressions: [{key: team, operator: Exists, values: []}]}", "<ns.team?>"),
        ("podSelector: {matchExpressions: [{key: app, operator: In, values: [b, a, b]}]}", "<ns=shop & k8s:app=a|b>"),
    ] {
        let rule = format!("Ingress Accept [{expected}] *");
        table(&[(&format!("{{ingress: [{{from: [{{{peer}}}]}}]}}"), &[head, &rule])]);
    }
    table(&[(
        "{podSelector: {matchLabels: {app: db}, matchExpressions: [{key: old, operator: DoesNotExist}]}}",
        &["Namespaced 0, isolates ingress: ns=shop & k8s:app=db & !k8s:old"],
    )]);
}

#[test]
fn networks_have_exceptions_and_no_host_bits() {
    for (block, expected) in [
        ("{cidr: 10.0.0.0/8}", "10.0.0.0/8"),
        ("{cidr: 10.1.2.3/8}", "10.0.0.0/8"),
        ("{cidr: '2001:db8::/32', except: ['2001:db8:1::/48']}", "2001:db8::/32 but [2001:db8:1::/48]"),
        ("{cidr: 0.0.0.0/0, except: [10.0.0.0/8, 192.168.0.0/16]}", "0.0.0.0/0 but [10.0.0.0/8, 192.168.0.0/16]"),
    ] {
        let rule = format!("Egress Accept [{expected}] *");
        let spec = format!("{{policyTypes: [Egress], egress: [{{to: [{{ipBlock: {block}}}]}}]}}");
        table(&[(&spec, &["Namespaced 0, isolates egress: ns=shop", &rule])]);
    }
}

#[test]
fn ports_are_numbers_ranges_names_or_a_whole_protocol() {
    for (port, expected) in [
        ("{}", "Tcp"),
        ("{protocol: UDP}", "Udp"),
        ("{protocol: SCTP, port: 132}", "Sctp 132-132"),
        ("{port: 80}", "Tcp 80-80"),
        ("{port: 32000, endPort: 32768}", "Tcp 32000-32768"),
        ("{port: 1, endPort: 65535}", "Tcp 1-65535"),
        ("{port: 80, endPort: 80}", "Tcp 80-80"),
        ("{protocol: UDP, port: dns}", "Udp dns"),
        ("{port: 0x50}", "Tcp 80-80"),
    ] {
        let rule = format!("Ingress Accept * [{expected}]");
        table(&[(&format!("{{ingress: [{{ports: [{port}]}}]}}"), &["Namespaced 0, isolates ingress: ns=shop", &rule])]);
    }
}

#[test]
fn what_kubernetes_refuses_is_refused() {
    for (spec, expected) in [
        ("{podSelector: {}, ingres: []}", "spec.ingres: is no field here; remove it, or write one of podSelector"),
        ("{ingress: {}}", "spec.ingress: is a mapping; write a list"),
        ("{ingress: [null]}", "spec.ingress[0]: is nothing; write a mapping"),
        ("{ingress: [{to: []}]}", "spec.ingress[0].to: is no field here"),
        ("{ingress: [{from: [{}]}]}", "spec.ingress[0].from[0]: names no peer"),
        ("{ingress: [{from: [{podSelector: null}]}]}", "spec.ingress[0].from[0]: names no peer"),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]}]}",
            "spec.egress[0].to[0]: has ipBlock and a selector",
        ),
        ("{egress: [{to: [{ipBlock: {}}]}]}", "spec.egress[0].to[0].ipBlock.cidr: is missing"),
        ("{egress: [{to: [{ipBlock: {cidr: 10.0.0.0}}]}]}", "ipBlock.cidr: \"10.0.0.0\" is no network"),
        ("{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/33}}]}]}", "ipBlock.cidr: \"10.0.0.0/33\" is no network"),
        ("{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/08}}]}]}", "ipBlock.cidr: \"10.0.0.0/08\" is no network"),
        (
            "{egress: [{to: [{ipBlock: {cidr: '::ffff:10.0.0.0/104'}}]}]}",
            "ipBlock.cidr: \"::ffff:10.0.0.0/104\" is an IPv4 address",
        ),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}]}",
            "except[0]: 10.0.0.0/8 is not strictly inside 10.0.0.0/8",
        ),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/9]}}]}]}",
            "except[0]: 11.0.0.0/9 is not strictly inside",
        ),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: ['::/96']}}]}]}",
            "except[0]: ::/96 is not strictly inside",
        ),
        ("{policyTypes: [ingress]}", "spec.policyTypes[0]: is \"ingress\"; write one of Ingress, Egress"),
        ("{ingress: [{ports: [{endPort: 90}]}]}", "ports[0].endPort: is there without port"),
        ("{ingress: [{ports: [{port: 80, endPort: 79}]}]}", "ports[0].endPort: 79 is below the first port, 80"),
        ("{ingress: [{ports: [{port: http, endPort: 90}]}]}", "ports[0].endPort: is there with the name of a port"),
        ("{ingress: [{ports: [{port: 0}]}]}", "ports[0].port: is 0; write a whole number from 1 to 65535"),
        ("{ingress: [{ports: [{port: 65536}]}]}", "ports[0].port: is 65536"),
        ("{ingress: [{ports: [{port: -1}]}]}", "ports[0].port: is -1"),
        ("{ingress: [{ports: [{port: 80.5}]}]}", "ports[0].port: is a number that is not written as a whole one"),
        ("{ingress: [{ports: [{port: '80'}]}]}", "ports[0].port: \"80\" is no port"),
        ("{ingress: [{ports: [{port: HTTP}]}]}", "ports[0].port: \"HTTP\" is no port"),
        ("{ingress: [{ports: [{port: a--b}]}]}", "ports[0].port: \"a--b\" is no port"),
        ("{ingress: [{ports: [{port: a-name-of-sixteen}]}]}", "ports[0].port: \"a-name-of-sixteen\" is no port"),
        ("{ingress: [{ports: [{protocol: tcp}]}]}", "ports[0].protocol: is \"tcp\"; write one of TCP, UDP, SCTP"),
        (
            "{podSelector: {app: web}}",
            "spec.podSelector.app: is no field here; remove it, or write one of matchLabels, matchExpressions",
        ),
        (
            "{podSelector: {matchLabels: {app: 1}}}",
            "spec.podSelector.matchLabels[\"app\"]: is a number, not text; put it in quotes",
        ),
        ("{podSelector: {matchLabels: {app: on}}}", "matchLabels[\"app\"]: is a boolean, not text; put it in quotes"),
        ("{podSelector: {matchLabels: {app: null}}}", "matchLabels[\"app\"]: is nothing; write text"),
        ("{podSelector: {matchLabels: {app: -a}}}", "matchLabels[\"app\"]: \"-a\" is no label value"),
        ("{podSelector: {matchLabels: {'k8s:app': a}}}", "\"k8s:app\" is no label key"),
        ("{podSelector: {matchLabels: {a/b/c: a}}}", "\"a/b/c\" is no label key"),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: In}]}}",
            "matchExpressions[0].values: is empty or missing",
        ),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: NotIn, values: []}]}}",
            "matchExpressions[0].values: is empty or missing",
        ),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}",
            "matchExpressions[0].values: is not empty",
        ),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: Gt, values: ['1']}]}}",
            "matchExpressions[0].operator: is \"Gt\"",
        ),
        ("{podSelector: {matchExpressions: [{operator: Exists}]}}", "matchExpressions[0].key: is missing"),
    ] {
        let refusals = refused(&document(spec));
        assert!(refusals.starts_with("test.yaml:2: NetworkPolicy shop/p, "), "{refusals}");
        assert!(refusals.contains(expected), "{spec}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{spec}: {refusals}");
    }
}

#[test]
fn a_policy_and_each_rule_know_where_they_were_written() {
    let text = "\
# A comment.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: web
spec:
  podSelector: {}
  ingress:
    - from:
        - podSelector: {}
    # Another.
    -
      ports:
        - port: 80
  egress:
  - {}
";
    let policies = accepted(text);
    let origins: Vec<_> = policies[0]
        .rules
        .iter()
        .map(|rule| &rule.origin)
        .chain([&policies[0].origin])
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        origins,
        [
            "test.yaml:9: NetworkPolicy default/web, spec.ingress[0]",
            "test.yaml:13: NetworkPolicy default/web, spec.ingress[1]",
            "test.yaml:16: NetworkPolicy default/web, spec.egress[0]",
            "test.yaml:7: NetworkPolicy default/web, spec",
        ]
    );
}
