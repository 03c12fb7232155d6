//! Endpoints, policies and flows of tests that say what they are about.

use std::sync::Arc;

use wharf_policy::{
    model::{
        Action, Direction, Directions, Endpoint, Holds, LabelOf, Peer, Policy, PolicyName, Protocol, Requirement, Rule,
        Selector, Tier,
    },
    oracle::Destination,
};

use crate::universe::{Probe, addresses, origin};

/// An endpoint of the key with this label alone, and no port.
pub(crate) fn labelled(key: u32, app: &str) -> Endpoint {
    Endpoint {
        addresses: addresses(key).into(),
        labels: Arc::new([("k8s:app".to_owned(), app.to_owned())].into()),
        ..Endpoint::default()
    }
}

/// Endpoints with this label.
pub(crate) fn app(value: &str) -> Selector {
    let holds = Holds::In([value.to_owned()].into());
    Selector([Requirement { of: LabelOf::Endpoint, key: "k8s:app".to_owned(), holds }].into())
}

/// Endpoints with a label accept from those with one of the others, and from nobody else.
pub(crate) fn admits(number: u32, subject: &str, from: &[&str]) -> Policy {
    let peers = from.iter().map(|value| Peer::Endpoints(app(value))).collect();
    let rule = Rule {
        direction: Direction::Ingress,
        action: Action::Accept,
        peers: Some(peers),
        ports: None,
        requests: None,
        origin: origin(number),
    };
    Policy {
        name: PolicyName { kind: "A".to_owned(), namespace: String::new(), name: format!("p{number}") },
        subject: app(subject),
        tier: Tier::Namespaced,
        priority: 0,
        isolates: Directions { ingress: true, egress: false },
        rules: vec![rule],
        origin: origin(number),
    }
}

/// Flows between all pairs of the first endpoints.
pub(crate) fn pairs(endpoints: u32) -> Vec<Probe> {
    let destination = Destination::Ports { protocol: Protocol::Tcp, port: 80 };
    let probe =
        |endpoint, peer| Probe { endpoint, direction: Direction::Ingress, peer: addresses(peer)[0], destination };
    (1..=endpoints).flat_map(|endpoint| (1..=endpoints).map(move |peer| probe(endpoint, peer))).collect()
}
