//! Cases of `NetworkPolicy` (networking.k8s.io/v1).

use anyhow::Result;

use wharf_tests::NodeConfig;

use super::{Case, Kind::Kubernetes, hold, hold_on};

#[test]
fn peers_of_network_policies() -> Result<()> {
    hold(&[
        Case {
            says: "without a policy everything passes",
            policies: &[],
            passes: &["shop/web shop/db tcp 80", "ops/web shop/db udp 53", "box shop/db echo", "world shop/db tcp 80"],
            denied: &[],
        },
        Case {
            says: "podSelector is about the policy's own namespace",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}},
                  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
            )],
            passes: &[
                "shop/web shop/db tcp 80",
                "shop/web shop/db udp 53",
                "shop/web shop/db echo",
                "shop/db shop/api tcp 80",
                "shop/api shop/web tcp 80",
                "node shop/db tcp 80",
                "node shop/db udp 53",
                "node shop/db echo",
            ],
            denied: &[
                "shop/api shop/db tcp 80",
                "shop/api shop/db udp 53",
                "shop/api shop/db echo",
                "ops/web shop/db tcp 80",
                "box shop/db tcp 80",
                "world shop/db tcp 80",
            ],
        },
        Case {
            says: "namespaceSelector takes all pods of the namespaces",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}},
                  ingress: [{from: [{namespaceSelector: {matchLabels: {team: a}}}]}]}",
            )],
            passes: &["ops/web shop/db tcp 80", "ops/probe shop/db udp 53"],
            denied: &["shop/web shop/db tcp 80", "box shop/db udp 53", "world shop/db udp 53"],
        },
        Case {
            says: "a namespace has its name as a label",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}]}]}",
            )],
            passes: &["box shop/db tcp 80"],
            denied: &["shop/web shop/db tcp 80", "ops/web shop/db tcp 80"],
        },
        Case {
            says: "both selectors in one item must match",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchLabels: {app: web}}}]}]}",
            )],
            passes: &["ops/web shop/db tcp 80"],
            denied: &["ops/probe shop/db tcp 80", "shop/web shop/db tcp 80"],
        },
        Case {
            says: "of two items one must match",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {namespaceSelector: {matchLabels: {team: a}}}, {podSelector: {matchLabels: {app: web}}}]}]}",
            )],
            passes: &["ops/web shop/db tcp 80", "ops/probe shop/db tcp 80", "shop/web shop/db tcp 80"],
            denied: &["shop/api shop/db tcp 80", "box shop/db tcp 80"],
        },
        Case {
            says: "an empty namespaceSelector is every namespace, and nobody else",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {}}]}]}",
            )],
            passes: &["shop/web shop/db tcp 80", "ops/probe shop/db tcp 80", "box shop/db udp 53"],
            denied: &["world shop/db tcp 80"],
        },
        Case {
            says: "an empty podSelector as a peer is the own namespace",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {}}]}]}",
            )],
            passes: &["shop/web shop/db tcp 80", "shop/api shop/db udp 53"],
            denied: &["ops/web shop/db tcp 80", "box shop/db tcp 80"],
        },
        Case {
            says: "expressions",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchExpressions: [{key: app, operator: In, values: [db]}]}, ingress: [{from: [
                  {podSelector: {matchExpressions: [{key: tier, operator: Exists}]}},
                  {namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [a, b]}]},
                   podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [web]}]}}]}]}",
            )],
            passes: &["shop/web shop/db tcp 80", "ops/probe shop/db tcp 80"],
            denied: &["shop/api shop/db tcp 80", "ops/web shop/db tcp 80"],
        },
        Case {
            says: "an empty list of peers is everybody, and so is none",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [
                  {from: [], ports: [{port: 80}]}, {ports: [{port: 81}]}]}",
            )],
            passes: &["box shop/db tcp 80", "world shop/db tcp 80", "ops/web shop/db tcp 81", "world shop/db tcp 81"],
            denied: &["shop/web shop/db tcp 82", "shop/web shop/db udp 80"],
        },
        Case {
            says: "an empty rule is everybody",
            policies: &[(Kubernetes, "{podSelector: {matchLabels: {app: db}}, ingress: [{}]}")],
            passes: &["box shop/db tcp 80", "world shop/db udp 80", "shop/web shop/db echo"],
            denied: &[],
        },
        Case {
            says: "networks match the addresses of pods",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {ipBlock: {cidr: $shop/web.4/32}}, {ipBlock: {cidr: $shop/web.6/128}}]}]}",
            )],
            passes: &["shop/web shop/db tcp 80", "shop/web shop/db udp 53"],
            denied: &["shop/api shop/db tcp 80", "world shop/db tcp 80"],
        },
        Case {
            says: "an exception is about pods and hosts, and another item may take it back",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {ipBlock: {cidr: 0.0.0.0/0, except: [$shop/api.4/32, $ops/web.4/32, $world.4/32]}},
                  {ipBlock: {cidr: '::/0', except: [$shop/api.6/128, $ops/web.6/128, $world.6/128]}},
                  {namespaceSelector: {matchLabels: {team: a}}}]}]}",
            )],
            passes: &["shop/web shop/db tcp 80", "ops/web shop/db tcp 80", "box shop/db udp 53"],
            denied: &["shop/api shop/db tcp 80", "world shop/db tcp 80", "world shop/db udp 53", "world shop/db echo"],
        },
        Case {
            says: "a host beyond the node is allowed by its network",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                  {ipBlock: {cidr: $world.4/24}}, {ipBlock: {cidr: '$world.6/64'}}]}]}",
            )],
            passes: &["world shop/db tcp 80", "world shop/db udp 53", "world shop/db echo"],
            denied: &["shop/web shop/db tcp 80"],
        },
    ])
}

#[test]
fn directions_and_ports_of_network_policies() -> Result<()> {
    hold(&[
        Case {
            says: "an empty subject is every pod of the namespace, and egress is not touched",
            policies: &[(Kubernetes, "{podSelector: {}, policyTypes: [Ingress]}")],
            passes: &[
                "shop/web ops/web tcp 80",
                "shop/web box udp 53",
                "shop/web world tcp 80",
                "node shop/web tcp 80",
            ],
            denied: &["shop/web shop/db tcp 80", "ops/web shop/api udp 53", "world shop/web echo"],
        },
        Case {
            says: "without policyTypes, a policy with an egress rule isolates both directions",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, egress: [{to: [{podSelector: {matchLabels: {app: api}}}]}]}",
            )],
            passes: &["shop/db shop/api tcp 80"],
            denied: &["shop/api shop/db tcp 80", "shop/db shop/web tcp 80"],
        },
        Case {
            says: "without policyTypes, a policy without egress isolates ingress",
            policies: &[(Kubernetes, "{podSelector: {matchLabels: {app: db}}}")],
            passes: &["shop/db shop/api tcp 80"],
            denied: &["shop/api shop/db tcp 80"],
        },
        Case {
            says: "policyTypes leaves ingress open",
            policies: &[(Kubernetes, "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress]}")],
            passes: &[
                "shop/api shop/web tcp 80",
                "world shop/web udp 53",
                "node shop/web tcp 80",
                "ops/web shop/db tcp 80",
            ],
            denied: &[
                "shop/web shop/api tcp 80",
                "shop/web world udp 53",
                "shop/web node tcp 80",
                "shop/web ops/web echo",
            ],
        },
        Case {
            says: "policyTypes makes a section of the other direction void",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress],
                  egress: [{to: [{podSelector: {matchLabels: {app: api}}}]}]}",
            )],
            passes: &["shop/db shop/web tcp 80"],
            denied: &["shop/web shop/db tcp 80"],
        },
        Case {
            says: "ports",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {}}], ports: [
                  {port: 80}, {port: 8000, endPort: 8010, protocol: TCP}, {port: 53, protocol: UDP}]}]}",
            )],
            passes: &[
                "shop/web shop/db tcp 80",
                "shop/web shop/db tcp 8000",
                "shop/web shop/db tcp 8007",
                "shop/web shop/db tcp 8010",
                "shop/web shop/db udp 53",
            ],
            denied: &[
                "shop/web shop/db tcp 7999",
                "shop/web shop/db tcp 8011",
                "shop/web shop/db tcp 53",
                "shop/web shop/db udp 80",
                "shop/web shop/db udp 8000",
                "shop/web shop/db echo",
                "ops/web shop/db tcp 80",
            ],
        },
        Case {
            says: "a protocol without a port is all of its ports",
            policies: &[(Kubernetes, "{podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{protocol: UDP}]}]}")],
            passes: &["shop/web shop/db udp 1", "world shop/db udp 65535"],
            denied: &["shop/web shop/db tcp 80", "shop/web shop/db echo"],
        },
        Case {
            says: "policies add up",
            policies: &[
                (Kubernetes, "{podSelector: {}}"),
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}}, ingress: [
                      {from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 80}]}]}",
                ),
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}}, ingress: [
                      {from: [{podSelector: {matchLabels: {app: api}}}], ports: [{port: 81}]}]}",
                ),
            ],
            passes: &["shop/web shop/db tcp 80", "shop/api shop/db tcp 81"],
            denied: &["shop/web shop/db tcp 81", "shop/api shop/db tcp 80", "shop/db shop/web tcp 80"],
        },
        Case {
            says: "egress to pods, to a network with an exception",
            policies: &[(
                Kubernetes,
                "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [
                  {to: [{podSelector: {matchLabels: {app: db}}}], ports: [{port: 5432}]},
                  {to: [{ipBlock: {cidr: 0.0.0.0/0, except: [$shop/api.4/32, $shop/db.4/32]}},
                        {ipBlock: {cidr: '::/0', except: [$shop/api.6/128, $shop/db.6/128]}}],
                          ports: [{port: 80}]}]}",
            )],
            passes: &[
                "shop/web shop/db tcp 5432",
                "shop/web world tcp 80",
                "shop/web ops/web tcp 80",
                "shop/web node tcp 80",
                "shop/db shop/web udp 53",
            ],
            denied: &[
                "shop/web shop/db tcp 80",
                "shop/web shop/db udp 5432",
                "shop/web shop/api tcp 80",
                "shop/web world tcp 81",
                "shop/web world echo",
            ],
        },
        Case {
            says: "both ends must let a packet pass",
            policies: &[
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [
                      {to: [{podSelector: {matchLabels: {app: db}}}, {podSelector: {matchLabels: {app: api}}}]}]}",
                ),
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                      {podSelector: {matchLabels: {app: api}}}, {namespaceSelector: {},
                        podSelector: {matchLabels: {app: probe}}}]}]}",
                ),
            ],
            passes: &["shop/web shop/api tcp 80", "shop/api shop/db udp 53", "ops/probe shop/db tcp 80"],
            denied: &["shop/web shop/db tcp 80", "shop/web shop/db udp 53", "shop/web ops/probe tcp 80"],
        },
    ])
}

/// A packet between two containers passes the hooks of both then.
#[test]
fn flows_that_take_the_stack() -> Result<()> {
    hold_on(
        NodeConfig::default().flags(&["--local-delivery=stack"]),
        &[
            Case {
                says: "ingress",
                policies: &[(
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                      {podSelector: {matchLabels: {app: web}}}], ports: [{port: 80}, {port: 53, protocol: UDP}]}]}",
                )],
                passes: &["shop/web shop/db tcp 80", "shop/web shop/db udp 53", "node shop/db tcp 81"],
                denied: &[
                    "shop/web shop/db tcp 81",
                    "shop/api shop/db tcp 80",
                    "ops/web shop/db udp 53",
                    "world shop/db tcp 80",
                    "shop/web shop/db echo",
                ],
            },
            Case {
                says: "both ends",
                policies: &[
                    (
                        Kubernetes,
                        "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [
                          {to: [{podSelector: {matchLabels: {app: db}}},
                            {podSelector: {matchLabels: {app: api}}}]}]}",
                    ),
                    (
                        Kubernetes,
                        "{podSelector: {matchLabels: {app: db}},
                          ingress: [{from: [{podSelector: {matchLabels: {app: api}}}]}]}",
                    ),
                ],
                passes: &["shop/web shop/api tcp 80", "shop/api shop/db udp 53", "shop/api shop/db echo"],
                denied: &["shop/web shop/db tcp 80", "shop/web ops/web udp 53", "ops/web shop/db tcp 80"],
            },
        ],
    )
}
