//! Cases of `ClusterNetworkPolicy` (policy.networking.k8s.io).

use anyhow::Result;

use super::{
    Case,
    Kind::{Cluster, Kubernetes},
    hold,
};

#[test]
fn cluster_network_policies() -> Result<()> {
    hold(&[
        Case {
            says: "admin: deny beats an allow rule, accept beats isolation, pass leaves it to the namespace",
            policies: &[
                (
                    Cluster,
                    "{tier: Admin, priority: 10, subject: $SHOP, ingress: [
                      {action: Deny, from: [{namespaces: {matchLabels: {kubernetes.io/metadata.name: default}}}]},
                      {action: Accept, from: [{pods: {namespaceSelector: {matchLabels: {team: a}},
                        podSelector: {matchLabels: {app: probe}}}}]},
                      {action: Pass, from: [{namespaces: {}}]}]}",
                ),
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
                      {podSelector: {matchLabels: {app: web}}},
                        {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}]}]}",
                ),
            ],
            passes: &[
                "ops/probe shop/db tcp 80",
                "shop/web shop/db udp 53",
                "shop/api shop/web tcp 80",
                "ops/web shop/web tcp 80",
            ],
            denied: &[
                "box shop/db tcp 80",
                "box shop/web udp 53",
                "shop/api shop/db tcp 80",
                "ops/web shop/db udp 53",
                "world shop/db tcp 80",
            ],
        },
        Case {
            says: "admin: the lower priority decides first",
            policies: &[
                (
                    Cluster,
                    "{tier: Admin, priority: 20, subject: {namespaces: {}}, ingress: [
                      {action: Deny, from: [{namespaces: {}}],
                        protocols: [{tcp: {destinationPort: {number: 80}}},
                        {udp: {destinationPort: {range: {start: 53, end: 60}}}}]}]}",
                ),
                (
                    Cluster,
                    "{tier: Admin, priority: 10, subject: {pods: {namespaceSelector: {},
                      podSelector: {matchLabels: {app: db}}}}, ingress: [
                      {action: Accept, from: [{pods: {namespaceSelector: {},
                        podSelector: {matchLabels: {app: web}}}}]}]}",
                ),
            ],
            passes: &[
                "shop/web shop/db tcp 80",
                "box shop/db udp 53",
                "shop/api shop/db tcp 81",
                "shop/api shop/db udp 61",
                "world shop/db tcp 80",
            ],
            denied: &["shop/api shop/db tcp 80", "shop/web shop/api tcp 80", "shop/api shop/db udp 60"],
        },
        Case {
            says: "baseline: it decides where no policy of the namespace isolates",
            policies: &[
                (
                    Cluster,
                    "{tier: Baseline, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny,
                      from: [{namespaces: {}}]}]}",
                ),
                (
                    Kubernetes,
                    "{podSelector: {matchLabels: {app: db}},
                      ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
                ),
            ],
            passes: &["shop/web shop/db tcp 80", "world shop/web tcp 80", "node shop/web tcp 80"],
            denied: &[
                "shop/api shop/db tcp 80",
                "shop/api shop/web tcp 80",
                "ops/web box udp 53",
                "world shop/db tcp 80",
            ],
        },
        Case {
            says: "egress to networks, with pass and baseline",
            policies: &[
                (
                    Cluster,
                    "{tier: Admin, priority: 1, subject: $SHOP, egress: [
                      {action: Pass, to: [{networks: [$world.4/32, '$world.6/128']}],
                        protocols: [{tcp: {destinationPort: {number: 80}}}]},
                      {action: Deny, to: [{networks: [198.51.100.0/24, '2001:db8:7::/64']}]}]}",
                ),
                (
                    Cluster,
                    "{tier: Baseline, priority: 1, subject: $SHOP, egress: [
                      {action: Accept, to: [{networks: [0.0.0.0/0, '::/0']}],
                        protocols: [{tcp: {destinationPort: {number: 80}}}]},
                      {action: Deny, to: [{networks: [0.0.0.0/0, '::/0']}]}]}",
                ),
            ],
            passes: &["shop/web world tcp 80", "shop/web shop/db tcp 80", "ops/web world udp 53"],
            denied: &[
                "shop/web world tcp 81",
                "shop/web world udp 80",
                "shop/web shop/db tcp 81",
                "shop/web ops/web echo",
            ],
        },
    ])
}
