//! Cases of `CiliumNetworkPolicy` and `CiliumClusterwideNetworkPolicy` (cilium.io/v2).

use anyhow::Result;

use super::{
    Case,
    Kind::{Cilium, CiliumClusterwide, Kubernetes},
    hold,
};

#[test]
fn cilium_policies() -> Result<()> {
    hold(&[
        Case {
            says: "deny comes before allow, wherever it is written",
            policies: &[
                (Cilium, "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEndpoints: [{}]}]}"),
                (
                    Cilium,
                    "{endpointSelector: {matchLabels: {app: db}}, ingressDeny: [
                      {fromEndpoints: [{matchLabels: {app: api}}],
                        toPorts: [{ports: [{port: '80', protocol: TCP}]}]}]}",
                ),
            ],
            passes: &["shop/web shop/db tcp 80", "shop/api shop/db tcp 81", "shop/api shop/db udp 80"],
            denied: &["shop/api shop/db tcp 80", "ops/web shop/db tcp 80"],
        },
        Case {
            says: "a deny rule beats an allow rule of NetworkPolicy",
            policies: &[
                (Kubernetes, "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {}}]}]}"),
                (
                    Cilium,
                    "{endpointSelector: {}, enableDefaultDeny: {ingress: false, egress: false},
                      ingressDeny: [{fromEndpoints: [{matchLabels: {app: api}}]}]}",
                ),
            ],
            passes: &["shop/web shop/db tcp 80", "ops/web shop/web tcp 80"],
            denied: &["shop/api shop/db tcp 80", "shop/api shop/web udp 53", "ops/web shop/db tcp 80"],
        },
        Case {
            says: "egressDeny",
            policies: &[(
                Cilium,
                "{endpointSelector: {matchLabels: {app: web}}, egress: [{toEntities: [all]}],
                  egressDeny: [{toEntities: [world]}, {toEndpoints: [{matchLabels: {app: db}}]}]}",
            )],
            passes: &["shop/web shop/api tcp 80", "shop/web ops/web udp 53", "shop/web node tcp 80"],
            denied: &["shop/web shop/db tcp 80", "shop/web world udp 53", "shop/web world tcp 80"],
        },
        Case {
            says: "types of ICMP",
            policies: &[(
                Cilium,
                "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEndpoints: [{matchLabels: {app: web}}],
                  icmps: [{fields: [{type: 8, family: IPv4}, {type: EchoRequest, family: IPv6}]}]}]}",
            )],
            passes: &["shop/web shop/db echo"],
            denied: &["shop/api shop/db echo", "shop/web shop/db tcp 8", "shop/web shop/db udp 8"],
        },
        Case {
            says: "other types of ICMP let no echo pass",
            policies: &[(
                Cilium,
                "{endpointSelector: {matchLabels: {app: db}}, ingress: [
                  {icmps: [{fields: [{type: 13, family: IPv4}, {type: 128, family: IPv4},
                    {type: 8, family: IPv6}]}]}]}",
            )],
            passes: &[],
            denied: &["shop/web shop/db echo", "world shop/db echo"],
        },
        Case {
            says: "entities",
            policies: &[
                (Cilium, "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEntities: [world]}]}"),
                (Cilium, "{endpointSelector: {matchLabels: {app: api}}, ingress: [{fromEntities: [cluster]}]}"),
                (Cilium, "{endpointSelector: {matchLabels: {app: web}}, egress: [{toEntities: [host]}]}"),
            ],
            passes: &["world shop/db tcp 80", "ops/web shop/api udp 53", "shop/web node tcp 80", "shop/web node echo"],
            denied: &[
                "shop/api shop/db tcp 80",
                "world shop/api udp 53",
                "shop/web shop/api tcp 80",
                "shop/web world tcp 80",
                "ops/web shop/db tcp 80",
            ],
        },
        Case {
            says: "an empty selector is the own namespace; the label of a namespace leads to another",
            policies: &[
                (Cilium, "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEndpoints: [{}]}]}"),
                (
                    Cilium,
                    "{endpointSelector: {matchLabels: {app: api}}, ingress: [
                      {fromEndpoints: [{matchLabels: {'k8s:io.kubernetes.pod.namespace': ops, app: web}}]}]}",
                ),
            ],
            passes: &["shop/web shop/db tcp 80", "ops/web shop/api tcp 80"],
            denied: &["ops/web shop/db tcp 80", "shop/web shop/api tcp 80", "ops/probe shop/api tcp 80"],
        },
        Case {
            says: "an empty list of peers is nobody, an empty rule isolates",
            policies: &[
                (Cilium, "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEndpoints: []}]}"),
                (Cilium, "{endpointSelector: {matchLabels: {app: api}}, egress: [{}]}"),
            ],
            passes: &["shop/db shop/web tcp 80", "shop/web shop/api tcp 80"],
            denied: &["shop/web shop/db tcp 80", "shop/api shop/web tcp 80", "shop/api world udp 53"],
        },
        Case {
            says: "networks with exceptions",
            policies: &[(
                Cilium,
                "{endpointSelector: {matchLabels: {app: web}}, egress: [
                  {toCIDR: [$world.4/32, '$world.6/128'],
                    toPorts: [{ports: [{port: '80', endPort: 90, protocol: ANY}]}]},
                  {toCIDRSet: [{cidr: 0.0.0.0/0, except: [$shop/db.4/32, $world.4/32]},
                               {cidr: '::/0', except: ['$shop/db.6/128', '$world.6/128']}]}]}",
            )],
            passes: &[
                "shop/web world tcp 80",
                "shop/web world udp 90",
                "shop/web shop/api tcp 80",
                "shop/web box echo",
            ],
            denied: &["shop/web world tcp 79", "shop/web world udp 91", "shop/web shop/db tcp 80"],
        },
        Case {
            says: "clusterwide",
            policies: &[(
                CiliumClusterwide,
                "{endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {app: web}}]}]}",
            )],
            passes: &[
                "shop/web ops/probe tcp 80",
                "ops/web shop/db tcp 80",
                "box shop/db udp 53",
                "node ops/web tcp 80",
            ],
            denied: &["shop/api shop/db tcp 80", "world ops/web tcp 80", "ops/probe box udp 53"],
        },
    ])
}
