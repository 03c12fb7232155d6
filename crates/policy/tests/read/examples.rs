//! What the Kubernetes documentation says of network policies, shown by a small cluster.

use wharf_policy::model::{Labels, Peer, Policy, Port, PortRange, Protocol};

use crate::accepted;

/// Name, labels and namespace's labels of each pod; `loner` is in no namespace.
fn pods() -> [(&'static str, Labels, Option<Labels>); 5] {
    let labels = |source: &str, pairs: &[(&str, &str)]| -> Labels {
        pairs.iter().map(|(key, value)| (format!("{source}{key}"), (*value).to_owned())).collect()
    };
    let namespace =
        |name: &str, project: &str| Some(labels("", &[("kubernetes.io/metadata.name", name), ("project", project)]));
    [
        ("db", labels("k8s:", &[("role", "db")]), namespace("default", "main")),
        ("frontend", labels("k8s:", &[("role", "frontend")]), namespace("default", "main")),
        ("client", labels("k8s:", &[("role", "client")]), namespace("users", "mine")),
        ("robot", labels("k8s:", &[("role", "robot")]), namespace("users", "mine")),
        ("loner", labels("k8s:", &[("role", "client")]), None),
    ]
}

/// The pods that a policy is about.
fn subjects(policy: &Policy) -> Vec<&'static str> {
    let about =
        |(_, labels, namespace): &(_, Labels, Option<Labels>)| policy.subject.selects(labels, namespace.as_ref());
    pods().iter().filter(|pod| about(pod)).map(|pod| pod.0).collect()
}

/// The pods that the peers of a rule select.
fn peers(policy: &Policy, rule: usize) -> Vec<&'static str> {
    let peers = policy.rules[rule].peers.as_ref().expect("peers");
    let is_one = |(_, labels, namespace): &(_, Labels, Option<Labels>)| {
        peers.iter().any(|peer| matches!(peer, Peer::Endpoints(of) if of.selects(labels, namespace.as_ref())))
    };
    pods().iter().filter(|pod| is_one(pod)).map(|pod| pod.0).collect()
}

fn one(spec: &str) -> Policy {
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: example\nspec:\n{}",
        spec.lines().map(|line| format!("  {line}\n")).collect::<String>()
    );
    accepted(&text).pop().expect("a policy")
}

#[test]
fn a_policy_names_peers_by_block_namespace_and_pod() {
    let policy = one("\
podSelector:
  matchLabels:
    role: db
policyTypes:
- Ingress
- Egress
ingress:
- from:
  - ipBlock:
      cidr: 172.17.0.0/16
      except:
      - 172.17.1.0/24
  - namespaceSelector:
      matchLabels:
        project: mine
  - podSelector:
      matchLabels:
        role: frontend
  ports:
  - protocol: TCP
    port: 6379
egress:
- to:
  - ipBlock:
      cidr: 10.0.0.0/24
  ports:
  - protocol: TCP
    port: 5978");
    assert_eq!(subjects(&policy), ["db"]);
    assert!(policy.isolates.ingress && policy.isolates.egress);
    assert_eq!(peers(&policy, 0), ["frontend", "client", "robot"]);
    let port = |number| Port::Numbers { protocol: Protocol::Tcp, ports: PortRange { first: number, last: number } };
    assert_eq!(policy.rules[0].ports, Some(vec![port(6379)]));
    assert_eq!(policy.rules[1].ports, Some(vec![port(5978)]));
    assert!(peers(&policy, 1).is_empty());
}

#[test]
fn two_selectors_in_one_peer_must_both_hold_and_in_two_peers_either() {
    let both = one("\
podSelector: {}
ingress:
- from:
  - namespaceSelector:
      matchLabels:
        project: mine
    podSelector:
      matchLabels:
        role: client");
    assert_eq!(peers(&both, 0), ["client"]);
    let either = one("\
podSelector: {}
ingress:
- from:
  - namespaceSelector:
      matchLabels:
        project: mine
  - podSelector:
      matchLabels:
        role: frontend");
    assert_eq!(peers(&either, 0), ["frontend", "client", "robot"]);
}

#[test]
fn deny_all_selects_every_pod_of_the_namespace_and_has_no_rules() {
    for (types, ingress, egress) in
        [("[Ingress]", true, false), ("[Egress]", false, true), ("[Ingress, Egress]", true, true)]
    {
        let policy = one(&format!("podSelector: {{}}\npolicyTypes: {types}"));
        assert_eq!(subjects(&policy), ["db", "frontend"]);
        assert_eq!((policy.isolates.ingress, policy.isolates.egress), (ingress, egress));
        assert!(policy.rules.is_empty());
    }
}

#[test]
fn allow_all_has_a_rule_for_every_peer_and_port() {
    for section in ["ingress:\n- {}\npolicyTypes: [Ingress]", "egress:\n- {}\npolicyTypes: [Egress]"] {
        let policy = one(&format!("podSelector: {{}}\n{section}"));
        assert_eq!((&policy.rules[0].peers, &policy.rules[0].ports), (&None, &None), "{section}");
        assert_eq!(policy.rules.len(), 1);
    }
}

#[test]
fn namespaces_are_named_by_their_label() {
    let policy = one("\
podSelector: {}
policyTypes: [Egress]
egress:
- to:
  - namespaceSelector:
      matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: [users, others]
- to:
  - namespaceSelector: {}
- to:
  - namespaceSelector:
      matchExpressions:
      - key: project
        operator: NotIn
        values: [main]");
    assert_eq!(peers(&policy, 0), ["client", "robot"]);
    // An endpoint in no namespace is in none of them.
    assert_eq!(peers(&policy, 1), ["db", "frontend", "client", "robot"]);
    assert_eq!(peers(&policy, 2), ["client", "robot"]);
}

#[test]
fn a_range_of_ports_goes_from_port_to_end_port() {
    let policy = one("\
podSelector: {}
policyTypes: [Egress]
egress:
- ports:
  - protocol: TCP
    port: 32000
    endPort: 32768");
    let ports = PortRange { first: 32000, last: 32768 };
    assert_eq!(policy.rules[0].ports, Some(vec![Port::Numbers { protocol: Protocol::Tcp, ports }]));
    assert_eq!(policy.rules[0].peers, None);
}
