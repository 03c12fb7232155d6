//! `CiliumNetworkPolicy` and `CiliumClusterwideNetworkPolicy`.

use crate::{accepted, refused, shown};

fn document(spec: &str) -> String {
    format!(
        "{{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {{name: p, namespace: shop}},\n spec: {spec}}}"
    )
}

fn clusterwide(spec: &str) -> String {
    format!("{{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {{name: p}},\n spec: {spec}}}")
}

/// The lines of the rules of a policy with this section.
fn rules(section: &str) -> Vec<String> {
    let policies = accepted(&document(&format!("{{endpointSelector: {{}}, {section}}}")));
    assert_eq!(policies.len(), 1);
    shown(&policies[0]).split_off(1)
}

#[test]
fn a_direction_with_a_rule_is_isolated_unless_the_policy_says_otherwise() {
    for (sections, isolates) in [
        ("ingress: [{}]", "ingress"),
        ("egress: [{}]", "egress"),
        ("ingress: [{}], egress: [{}]", "both"),
        ("ingress: [{}], egress: []", "ingress"),
        ("ingress: [{}], egress: null", "ingress"),
        ("ingressDeny: [{fromEntities: [all]}]", "ingress"),
        ("egressDeny: [{}]", "egress"),
        ("ingress: [{}], enableDefaultDeny: {}", "ingress"),
        ("ingress: [{}], enableDefaultDeny: {ingress: false}", "nothing"),
        ("ingress: [{}], enableDefaultDeny: {ingress: null}", "ingress"),
        ("ingressDeny: [{}], enableDefaultDeny: {ingress: false, egress: false}", "nothing"),
        ("ingress: [{}], enableDefaultDeny: {egress: true}", "both"),
        ("ingress: [{}], egress: [{}], enableDefaultDeny: {egress: false}", "ingress"),
    ] {
        let policies = accepted(&document(&format!("{{endpointSelector: {{}}, {sections}}}")));
        let head = format!("Namespaced 0, isolates {isolates}: ns=shop");
        assert_eq!(shown(&policies[0])[0], head, "{sections}");
    }
}

#[test]
fn an_empty_rule_matches_nothing_and_an_empty_selector_the_namespace() {
    for (rule, expected) in [
        ("{}", "[] *"),
        ("{fromEndpoints: []}", "[] *"),
        ("{fromEndpoints: null}", "[] *"),
        ("{fromCIDR: []}", "[] *"),
        ("{fromEntities: []}", "[] *"),
        ("{toPorts: []}", "[] *"),
        ("{icmps: []}", "[] *"),
        ("{fromEndpoints: [{}]}", "[<ns=shop>] *"),
        ("{fromEndpoints: [{}], toPorts: []}", "[<ns=shop>] *"),
        ("{fromEndpoints: [], toPorts: [{ports: [{port: '80', protocol: TCP}]}]}", "[] [Tcp 80-80]"),
        ("{toPorts: [{ports: [{port: '80', protocol: TCP}]}]}", "* [Tcp 80-80]"),
        ("{icmps: [{fields: [{type: 8}]}]}", "* [Icmp4 Some(8)]"),
    ] {
        assert_eq!(rules(&format!("ingress: [{rule}]")), [format!("Ingress Accept {expected}")], "{rule}");
    }
}

#[test]
fn sections_are_accept_and_deny_rules_of_both_directions() {
    let sections = "ingress: [{fromEntities: [all]}], ingressDeny: [{fromEntities: [world]}],
        egress: [{toEntities: [cluster, health]}, {toEntities: [host]}], egressDeny: [{toCIDR: [10.0.0.0/8]}]";
    assert_eq!(
        rules(sections),
        [
            "Ingress Accept [All] *",
            "Ingress Deny [World] *",
            "Egress Accept [Cluster, Host, Health] *",
            "Egress Accept [Host] *",
            "Egress Deny [10.0.0.0/8] *",
        ]
    );
}

#[test]
fn selectors_are_of_the_policys_namespace_unless_they_name_others() {
    for (selector, expected) in [
        ("matchLabels: {app: web}", "ns=shop & any:app=web"),
        (
            "matchLabels: {'k8s:app': web, 'any:x': v, 'container:z': ''}",
            "ns=shop & any:x=v & container:z= & k8s:app=web",
        ),
        ("matchLabels: {'k8s:io.kubernetes.pod.namespace': b, app: web}", "ns=b & any:app=web"),
        ("matchLabels: {io.kubernetes.pod.namespace: b}", "ns=b"),
        ("matchLabels: {'any:io.kubernetes.pod.namespace': b}", "ns=b"),
        ("matchLabels: {'k8s:io.cilium.k8s.namespace.labels.team': a}", "ns.team=a"),
        ("matchLabels: {io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name: b}", "ns=b"),
        ("matchExpressions: [{key: 'k8s:io.kubernetes.pod.namespace', operator: Exists}]", "ns?"),
        ("matchExpressions: [{key: io.kubernetes.pod.namespace, operator: NotIn, values: [b]}]", "ns!=b & ns?"),
        ("matchExpressions: [{key: 'k8s:a', operator: DoesNotExist}]", "ns=shop & !k8s:a"),
    ] {
        let lines = rules(&format!("ingress: [{{fromEndpoints: [{{{selector}}}]}}]"));
        assert_eq!(lines.len(), 1);
        let mut found: Vec<_> = lines[0]["Ingress Accept [<".len()..].trim_end_matches(">] *").split(" & ").collect();
        found.sort_unstable();
        let mut expected: Vec<_> = expected.split(" & ").collect();
        expected.sort_unstable();
        assert_eq!(found, expected, "{selector}");
    }
}

#[test]
fn a_policy_is_about_its_own_namespace_and_a_clusterwide_one_about_all() {
    let spec = |selector| {
        format!("{{endpointSelector: {selector}, ingress: [{{fromEndpoints: [{{}}, {{matchLabels: {{a: b}}}}]}}]}}")
    };
    for (text, head, rule) in [
        (document(&spec("{}")), "ns=shop", "<ns=shop>, <ns=shop & any:a=b>"),
        (
            document(&spec("{matchLabels: {io.kubernetes.pod.namespace: shop}}")),
            "ns=shop",
            "<ns=shop>, <ns=shop & any:a=b>",
        ),
        (document(&spec("{matchLabels: {app: x}}")), "ns=shop & any:app=x", "<ns=shop>, <ns=shop & any:a=b>"),
        (clusterwide(&spec("{}")), "", "<>, <any:a=b>"),
        (clusterwide(&spec("{matchLabels: {io.kubernetes.pod.namespace: b}}")), "ns=b", "<>, <any:a=b>"),
    ] {
        let policies = accepted(&text);
        let expected = [format!("Namespaced 0, isolates ingress: {head}"), format!("Ingress Accept [{rule}] *")];
        assert_eq!(shown(&policies[0]), expected, "{text}");
    }
    for selector in [
        "{matchLabels: {io.kubernetes.pod.namespace: other}}",
        "{matchExpressions: [{key: 'k8s:io.kubernetes.pod.namespace', operator: NotIn, values: [shop]}]}",
    ] {
        let refusals = refused(&document(&spec(selector)));
        assert!(
            refusals.contains("spec.endpointSelector: names another namespace than the policy's, shop"),
            "{refusals}"
        );
    }
}

#[test]
fn networks_are_cidrs_addresses_and_sets_with_exceptions() {
    for (peers, expected) in [
        (
            "toCIDR: [10.0.0.0/8, 192.0.2.1, '2001:db8::1', 10.1.2.3/16]",
            "10.0.0.0/8, 192.0.2.1/32, 2001:db8::1/128, 10.1.0.0/16",
        ),
        (
            "toCIDRSet: [{cidr: 10.0.0.0/8, except: [10.96.0.0/12]}, {cidr: '::/0'}]",
            "10.0.0.0/8 but [10.96.0.0/12], ::/0",
        ),
    ] {
        assert_eq!(rules(&format!("egress: [{{{peers}}}]")), [format!("Egress Accept [{expected}] *")], "{peers}");
    }
}

#[test]
fn ports_are_numbers_ranges_and_names_of_one_or_every_protocol() {
    for (ports, expected) in [
        ("{port: '80', protocol: TCP}", "Tcp 80-80"),
        ("{port: 80, protocol: TCP}", "Tcp 80-80"),
        ("{port: '53'}", "Tcp 53-53, Udp 53-53, Sctp 53-53"),
        ("{port: '53', protocol: ANY}", "Tcp 53-53, Udp 53-53, Sctp 53-53"),
        ("{port: '8000', endPort: 8080, protocol: UDP}", "Udp 8000-8080"),
        ("{port: '0', protocol: SCTP}", "Sctp"),
        ("{port: http, protocol: TCP}", "Tcp http"),
        ("{port: HTTP}", "Tcp http, Udp http, Sctp http"),
        ("{port: '0x50', protocol: TCP}", "Tcp 0x50"),
        ("{port: '1', protocol: TCP}, {port: '2', protocol: UDP}", "Tcp 1-1, Udp 2-2"),
    ] {
        assert_eq!(
            rules(&format!("ingress: [{{toPorts: [{{ports: [{ports}]}}]}}]")),
            [format!("Ingress Accept * [{expected}]")],
            "{ports}"
        );
    }
    let two = "ingress: [{toPorts: [{ports: [{port: '1', protocol: TCP}]}, {ports: [{port: '2', protocol: TCP}]}]}]";
    assert_eq!(rules(two), ["Ingress Accept * [Tcp 1-1, Tcp 2-2]"]);
}

#[test]
fn icmp_types_are_numbers_or_names_of_a_family() {
    for (field, expected) in [
        ("{type: 8}", "Icmp4 Some(8)"),
        ("{family: IPv4, type: '13'}", "Icmp4 Some(13)"),
        ("{family: IPv4, type: EchoRequest}", "Icmp4 Some(8)"),
        ("{family: IPv6, type: EchoRequest}", "Icmp6 Some(128)"),
        ("{family: IPv6, type: 255}", "Icmp6 Some(255)"),
    ] {
        assert_eq!(
            rules(&format!("egress: [{{icmps: [{{fields: [{field}]}}]}}]")),
            [format!("Egress Accept * [{expected}]")],
            "{field}"
        );
    }
}

#[test]
fn specs_are_policies_with_the_documents_name() {
    let text = "\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: both}
specs:
  - endpointSelector: {matchLabels: {app: a}}
    labels: [{key: x, value: y}]
    description: About a.
    ingress:
      - fromEntities: [host]
  - endpointSelector: {matchLabels: {app: b}}
    egress: [{}]
status: {conditions: []}
";
    let policies = accepted(text);
    assert_eq!(
        policies.iter().flat_map(shown).collect::<Vec<_>>(),
        [
            "Namespaced 0, isolates ingress: ns=default & any:app=a",
            "Ingress Accept [Host] *",
            "Namespaced 0, isolates egress: ns=default & any:app=b",
            "Egress Accept [] *",
        ]
    );
    assert_eq!(policies[0].name, policies[1].name);
    let origins = [&policies[0].origin, &policies[0].rules[0].origin, &policies[1].origin];
    assert_eq!(
        origins.map(ToString::to_string),
        [
            "test.yaml:5: CiliumNetworkPolicy default/both, specs[0]",
            "test.yaml:9: CiliumNetworkPolicy default/both, specs[0].ingress[0]",
            "test.yaml:10: CiliumNetworkPolicy default/both, specs[1]",
        ]
    );
}

#[test]
fn what_cilium_refuses_or_is_not_supported_is_refused() {
    for (spec, expected) in [
        ("{ingress: [{}]}", "spec.endpointSelector: is missing"),
        ("{endpointSelector: {}}", "spec: has no rules"),
        ("{endpointSelector: {}, ingress: [], egress: []}", "spec: has no rules"),
        ("{endpointSelector: {}, enableDefaultDeny: {ingress: true}}", "spec: has no rules"),
        (
            "{endpointSelector: {}, ingress: [{}], enableDefaultDeny: {ingress: 'no'}}",
            "enableDefaultDeny.ingress: is text; write true or false",
        ),
        ("{nodeSelector: {}, ingress: [{}]}", "spec.nodeSelector: is not supported"),
        ("{endpointSelector: {}, Ingress: [{}]}", "spec.Ingress: is no field here"),
        ("{endpointSelector: {}, ingress: [{toEndpoints: [{}]}]}", "ingress[0].toEndpoints: is no field here"),
        (
            "{endpointSelector: {}, ingress: [{fromEndpoints: [{}], fromCIDR: [10.0.0.0/8]}]}",
            "ingress[0]: has fromEndpoints and fromCIDR; write a rule for each",
        ),
        (
            "{endpointSelector: {}, ingress: [{fromEndpoints: [], fromEntities: [all]}]}",
            "ingress[0]: has fromEndpoints and fromEntities",
        ),
        ("{endpointSelector: {}, ingress: [{fromRequires: [{}]}]}", "ingress[0].fromRequires: is not supported"),
        (
            "{endpointSelector: {}, egressDeny: [{toFQDNs: [{matchName: example.org}]}]}",
            "egressDeny[0].toFQDNs: is not supported; write the names that may pass into egress",
        ),
        (
            "{endpointSelector: {}, ingress: [{toFQDNs: [{matchName: example.org}]}]}",
            "ingress[0].toFQDNs: is not supported; write it into egress",
        ),
        (
            "{endpointSelector: {}, ingress: [{fromFQDNs: [{matchName: example.org}]}]}",
            "ingress[0].fromFQDNs: is no field here; remove it",
        ),
        (
            "{endpointSelector: {}, egress: [{toFQDNs: [{matchName: a}], toEntities: [world]}]}",
            "egress[0]: has toEntities and toFQDNs; write a rule for each of them",
        ),
        ("{endpointSelector: {}, egress: [{toServices: []}]}", "egress[0].toServices: is not supported"),
        (
            "{endpointSelector: {}, ingress: [{fromEntities: [kube-apiserver]}]}",
            "fromEntities[0]: is \"kube-apiserver\"; write one of all, world, host, cluster, health, remote-node",
        ),
        (
            "{endpointSelector: {}, ingress: [{fromCIDR: ['::ffff:10.0.0.1']}]}",
            "fromCIDR[0]: \"::ffff:10.0.0.1\" is an IPv4 address in IPv6 notation",
        ),
        ("{endpointSelector: {}, ingress: [{fromCIDRSet: [{cidr: 10.0.0.1}]}]}", "cidr: \"10.0.0.1\" is no network"),
        (
            "{endpointSelector: {}, ingress: [{fromCIDRSet: [{cidr: 10.0.0.0/8, except: [11.0.0.0/8]}]}]}",
            "except[0]: 11.0.0.0/8 is not strictly inside",
        ),
        (
            "{endpointSelector: {}, ingress: [{fromCIDRSet: [{cidrGroupRef: a}]}]}",
            "fromCIDRSet[0].cidrGroupRef: is not supported",
        ),
        (
            "{endpointSelector: {matchLabels: {'reserved:host': ''}}, ingress: [{}]}",
            "\"reserved:host\" is a label that no endpoint has",
        ),
        ("{endpointSelector: {matchLabels: {'K8s:a': b}}, ingress: [{}]}", "\"K8s:a\" has no source of labels"),
        ("{endpointSelector: {matchLabels: {':a': b}}, ingress: [{}]}", "\":a\" has no source of labels"),
        (
            "{endpointSelector: {matchLabels: {io.cilium.k8s.policy.cluster: b}}, ingress: [{}]}",
            "\"io.cilium.k8s.policy.cluster\" is a label that no endpoint has",
        ),
        (
            "{endpointSelector: {matchLabels: {io.cilium.k8s.namespace.labels.: b}}, ingress: [{}]}",
            "\"\" is no label key",
        ),
        ("{endpointSelector: {}, ingress: [{toPorts: [{}]}]}", "toPorts[0].ports: is missing"),
        ("{endpointSelector: {}, ingress: [{toPorts: [{ports: []}]}]}", "toPorts[0].ports: is empty"),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '80'}], rules: {http: [{}]}}]}]}",
            "toPorts[0].ports: has other protocols than TCP",
        ),
        ("{endpointSelector: {}, ingress: [{toPorts: [{ports: [{}]}]}]}", "ports[0].port: is missing"),
        ("{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '65536'}]}]}]}", "ports[0].port: is \"65536\""),
        ("{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '010'}]}]}]}", "ports[0].port: is \"010\""),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '80-90'}]}]}]}",
            "ports[0].port: \"80-90\" is no port",
        ),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '0'}]}]}]}",
            "ports[0].port: is 0, every port, of any protocol",
        ),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '0', endPort: 9, protocol: TCP}]}]}]}",
            "ports[0].endPort: is there with port 0",
        ),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '80', endPort: 79}]}]}]}",
            "ports[0].endPort: 79 is below the first port, 80",
        ),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: http, endPort: 79}]}]}]}",
            "ports[0].endPort: is there with the name",
        ),
        (
            "{endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: '80', protocol: ICMP}]}]}]}",
            "ports[0].protocol: is \"ICMP\"; write one of TCP, UDP, SCTP, ANY",
        ),
        ("{endpointSelector: {}, ingress: [{icmps: [{}]}]}", "icmps[0].fields: is missing"),
        ("{endpointSelector: {}, ingress: [{icmps: [{fields: [{}]}]}]}", "fields[0].type: is missing"),
        ("{endpointSelector: {}, ingress: [{icmps: [{fields: [{type: 256}]}]}]}", "fields[0].type: is 256"),
        (
            "{endpointSelector: {}, ingress: [{icmps: [{fields: [{type: PacketTooBig}]}]}]}",
            "fields[0].type: is \"PacketTooBig\"; write one of EchoReply",
        ),
        (
            "{endpointSelector: {}, ingress: [{icmps: [{fields: [{family: ipv6, type: 1}]}]}]}",
            "fields[0].family: is \"ipv6\"; write one of IPv4, IPv6",
        ),
        (
            "{endpointSelector: {}, ingress: [{icmps: [{fields: [{type: 8}]}], toPorts: [{ports: [{port: '80'}]}]}]}",
            "ingress[0]: has toPorts and icmps",
        ),
    ] {
        let refusals = refused(&document(spec));
        assert!(refusals.starts_with("test.yaml:2: CiliumNetworkPolicy shop/p, "), "{refusals}");
        assert!(refusals.contains(expected), "{spec}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{spec}: {refusals}");
    }
    let many = vec!["{port: '80'}"; 41].join(", ");
    let spec = format!("{{endpointSelector: {{}}, ingress: [{{toPorts: [{{ports: [{many}]}}]}}]}}");
    assert!(refused(&document(&spec)).contains("ports: has 41 items; write at most 40"));
}

#[test]
fn a_document_without_spec_and_specs_is_refused() {
    for text in [
        "{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: p}}",
        "{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: p}, specs: []}",
    ] {
        assert!(refused(text).contains("spec: is missing; write the policy as spec or specs"));
    }
}

#[test]
fn a_policy_may_be_about_endpoints_whose_labels_are_not_known_yet() {
    let policies = accepted(&clusterwide("{endpointSelector: {matchLabels: {'reserved:init': ''}}, egress: [{}]}"));
    let subject = &policies[0].subject;
    let init = [("reserved:init".to_owned(), String::new())].into();
    assert!(subject.selects(&init, None));
    assert!(!subject.selects(&[("k8s:app".to_owned(), "init".to_owned())].into(), None));
}
