//! Documents of every format, and what they are in the model.

#![expect(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod cilium;
mod cilium_l7;
mod cilium_names;
mod cluster_network_policy;
mod examples;
mod lists;
mod network_policy;
mod refusals;

use wharf_policy::{
    model::{Holds, LabelOf, Peer, Policy, Port, PortRange, Requirement, Rule, Selector},
    read::read,
};

/// The policies of a text that must be accepted.
fn accepted(text: &str) -> Vec<Policy> {
    read("test.yaml", text).unwrap_or_else(|refusals| panic!("{}\n{text}", lines(&refusals)))
}

/// The refusals of a text that must be refused, a line each.
fn refused(text: &str) -> String {
    match read("test.yaml", text) {
        Ok(policies) => panic!("accepted as {policies:#?}\n{text}"),
        Err(refusals) => lines(&refusals),
    }
}

fn lines(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A policy in lines: tier, what it isolates and its subject; then each rule.
fn shown(policy: &Policy) -> Vec<String> {
    let isolates = match (policy.isolates.ingress, policy.isolates.egress) {
        (true, true) => "both",
        (true, false) => "ingress",
        (false, true) => "egress",
        (false, false) => "nothing",
    };
    let (tier, priority) = (policy.tier, policy.priority);
    let head = format!("{tier:?} {priority}, isolates {isolates}: {}", selector(&policy.subject));
    [head].into_iter().chain(policy.rules.iter().map(rule)).collect()
}

fn rule(rule: &Rule) -> String {
    let Rule { direction, action, peers, ports, .. } = rule;
    format!("{direction:?} {action:?} {} {}", list(peers.as_deref(), peer), list(ports.as_deref(), port))
}

fn list<T>(items: Option<&[T]>, show: impl Fn(&T) -> String) -> String {
    match items {
        Some(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(", ")),
        None => "*".to_owned(),
    }
}

fn peer(peer: &Peer) -> String {
    match peer {
        Peer::Endpoints(of) => format!("<{}>", selector(of)),
        Peer::Network { net, except } if except.is_empty() => net.to_string(),
        Peer::Network { net, except } => format!("{net} but {}", list(Some(except), ToString::to_string)),
        Peer::Names(pattern) => format!("names {pattern}"),
        Peer::Entity(entity) => format!("{entity:?}"),
    }
}

fn port(port: &Port) -> String {
    match port {
        Port::Numbers { protocol, ports } if *ports == PortRange::ALL => format!("{protocol:?}"),
        Port::Numbers { protocol, ports } => format!("{protocol:?} {}-{}", ports.first, ports.last),
        Port::Named { protocol, name } => format!("{protocol:?} {name}"),
        Port::Icmp { v6, kind } => format!("Icmp{} {kind:?}", if *v6 { "6" } else { "4" }),
    }
}

/// Requirements of namespaces first; `ns` is the name of the namespace.
fn selector(Selector(requirements): &Selector) -> String {
    let mut all: Vec<_> = requirements.iter().collect();
    all.sort_by_key(|r| (r.of == LabelOf::Endpoint, &r.key));
    all.iter().map(|r| requirement(r)).collect::<Vec<_>>().join(" & ")
}

fn requirement(Requirement { of, key, holds }: &Requirement) -> String {
    let key = match (of, key.as_str()) {
        (LabelOf::Namespace, "kubernetes.io/metadata.name") => "ns".to_owned(),
        (LabelOf::Namespace, key) => format!("ns.{key}"),
        (LabelOf::Endpoint, key) => key.to_owned(),
    };
    let values = |set: &std::collections::BTreeSet<String>| set.iter().cloned().collect::<Vec<_>>().join("|");
    match holds {
        Holds::In(set) => format!("{key}={}", values(set)),
        Holds::NotIn(set) => format!("{key}!={}", values(set)),
        Holds::Exists => format!("{key}?"),
        Holds::DoesNotExist => format!("!{key}"),
    }
}
