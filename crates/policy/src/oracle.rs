//! The verdict about one flow, by evaluating the policies one after the other as [`crate::model`] defines it.
//!
//! It is slow and short on purpose: tests compare the compiled rows with it, and an explanation of a verdict can be
//! read from it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::model::{
    Action, Direction, Endpoint, Enforcement, Entity, Origin, Peer, Policy, PolicyName, Port, Protocol, Rule, Selector,
    Tier,
};
use crate::requests::Requests;

/// Addresses that names of DNS have.
pub type Names = BTreeMap<Arc<str>, BTreeSet<IpAddr>>;

/// The first packet of a flow, judged at one endpoint.
#[derive(Debug, Clone, Copy)]
pub struct Flow<'a> {
    /// Ingress judges the flow at its receiver, egress at its sender.
    pub direction: Direction,
    /// The endpoint that judges.
    pub subject: &'a Endpoint,
    /// The other end.
    pub peer: PeerOf<'a>,
    /// What the receiver is asked for.
    pub destination: Destination,
    /// The names that are known, with all their addresses.
    pub names: &'a Names,
}

/// The other end of a flow, with the address that it has in the packet.
#[derive(Debug, Clone, Copy)]
pub enum PeerOf<'a> {
    /// An endpoint of this node, by one of its addresses.
    Endpoint(&'a Endpoint, IpAddr),
    /// The node itself.
    Node(IpAddr),
    /// Neither.
    Outside(IpAddr),
}

/// What a packet asks the receiver for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Destination {
    /// A port.
    Ports {
        /// Protocol.
        protocol: Protocol,
        /// Destination port.
        port: u16,
    },
    /// An ICMP message.
    Icmp {
        /// ICMPv6, else ICMP.
        v6: bool,
        /// Type (RFC 792, RFC 4443).
        kind: u8,
    },
    /// Another protocol, by its number (IANA, protocol numbers). No rule with ports matches it.
    Other(u8),
    /// Not known, because the packet's transport header is not found. Every rule with ports may match it.
    Unknown,
}

/// What becomes of a flow, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// It passes.
    Accept {
        /// The rule that decides, of several with requests the first; `None` if no tier decides.
        rule: Option<&'a Origin>,
        /// What it may carry; `None` for anything.
        requests: Option<Cow<'a, Requests>>,
    },
    /// It is dropped.
    Deny {
        /// The rule that decides; `None` if the endpoint is isolated and no rule accepts the flow.
        rule: Option<&'a Origin>,
        /// Without a rule: the policies that isolate the endpoint, by name.
        isolated_by: Vec<&'a PolicyName>,
    },
    /// It is dropped, because its transport header is not found and a rule with ports comes before every matching rule
    /// without.
    DenyUnknown,
}

impl Verdict<'_> {
    /// Whether the flow passes.
    #[must_use]
    pub const fn accepts(&self) -> bool {
        matches!(self, Self::Accept { .. })
    }
}

/// Judges a flow. Policies may come in any order; no two have the same name.
///
/// Policies of one tier are asked by ascending priority, then by name (kind, namespace, name), their rules in order;
/// the namespaced tier has no priorities and asks every deny rule before the accept rules. The named rule is the first
/// that matches.
pub fn judge<'a>(policies: impl IntoIterator<Item = &'a Policy>, flow: &Flow<'a>) -> Verdict<'a> {
    let mut policies: Vec<&Policy> = policies.into_iter().filter(|p| flow.subject.is_subject(&p.subject)).collect();
    policies.sort_by_key(|p| (if p.tier == Tier::Namespaced { 0 } else { p.priority }, &p.name));

    let matching = |tier| {
        let rules = policies.iter().filter(move |p| p.tier == tier).flat_map(|p| &p.rules);
        rules.filter(|rule| matches(rule, flow))
    };
    let unknown = |rule: &Rule| flow.destination == Destination::Unknown && rule.ports.is_some();
    let accept = |rule: &'a Rule| match unknown(rule) {
        true => Verdict::DenyUnknown,
        false => Verdict::Accept { rule: Some(&rule.origin), requests: None },
    };
    let deny = |rule: &'a Rule| match unknown(rule) {
        true => Verdict::DenyUnknown,
        false => Verdict::Deny { rule: Some(&rule.origin), isolated_by: Vec::new() },
    };

    match matching(Tier::Admin).next() {
        Some(rule) if unknown(rule) => return Verdict::DenyUnknown,
        Some(rule) if rule.action == Action::Accept => return accept(rule),
        Some(rule) if rule.action == Action::Deny => return deny(rule),
        _ => {}
    }
    if let Some(rule) = matching(Tier::Namespaced).find(|rule| rule.action == Action::Deny) {
        return deny(rule);
    }
    let mut accepting = matching(Tier::Namespaced).filter(|rule| rule.action == Action::Accept);
    if let Some(rule) = accepting.clone().find(|rule| rule.requests.is_none()) {
        return accept(rule);
    }
    if let Some(first) = accepting.next() {
        if unknown(first) {
            return Verdict::DenyUnknown;
        }
        let requests = first.requests.as_deref().map(Cow::Borrowed);
        let others = accepting.filter_map(|rule| rule.requests.as_deref());
        let requests = others.fold(requests, |all, more| all.map(|all| Cow::Owned(all.union(more))));
        return Verdict::Accept { rule: Some(&first.origin), requests };
    }
    let isolates = |p: &&&Policy| {
        let direction = match flow.direction {
            Direction::Ingress => p.isolates.ingress,
            Direction::Egress => p.isolates.egress,
        };
        p.tier == Tier::Namespaced && direction
    };
    let own = match &flow.subject.enforcement {
        Enforcement::Always(by) => Some(&**by),
        Enforcement::Default | Enforcement::Never => None,
    };
    let isolated_by: Vec<_> = policies.iter().filter(isolates).map(|p| &p.name).chain(own).collect();
    if !isolated_by.is_empty() {
        return Verdict::Deny { rule: None, isolated_by };
    }
    match matching(Tier::Baseline).next() {
        Some(rule) if unknown(rule) => Verdict::DenyUnknown,
        Some(rule) if rule.action == Action::Accept => accept(rule),
        Some(rule) if rule.action == Action::Deny => deny(rule),
        _ => Verdict::Accept { rule: None, requests: None },
    }
}

fn selects(selector: &Selector, endpoint: &Endpoint) -> bool {
    selector.selects(&endpoint.labels, endpoint.namespace.as_ref())
}

fn matches(rule: &Rule, flow: &Flow<'_>) -> bool {
    rule.direction == flow.direction
        && rule.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer_matches(peer, flow)))
        && match &rule.ports {
            Some(ports) => ports.iter().any(|port| port_matches(port, flow)),
            None => rule.requests.is_none(),
        }
}

fn peer_matches(peer: &Peer, flow: &Flow<'_>) -> bool {
    let other = &flow.peer;
    let (PeerOf::Endpoint(_, address) | PeerOf::Node(address) | PeerOf::Outside(address)) = other;
    match (peer, other) {
        (Peer::Endpoints(selector), PeerOf::Endpoint(endpoint, _)) => selects(selector, endpoint),
        (Peer::Network { net, except }, _) => net.contains(address) && !except.iter().any(|e| e.contains(address)),
        (Peer::Names(pattern), PeerOf::Outside(_)) => {
            flow.names.iter().any(|(name, addresses)| addresses.contains(address) && pattern.matches(name))
        }
        (Peer::Entity(Entity::All), _)
        | (Peer::Entity(Entity::World), PeerOf::Outside(_))
        | (Peer::Entity(Entity::Host), PeerOf::Node(_))
        | (Peer::Entity(Entity::Cluster), PeerOf::Endpoint(..)) => true,
        (Peer::Entity(Entity::Health), PeerOf::Endpoint(endpoint, _)) => endpoint.health,
        _ => false,
    }
}

fn port_matches(port: &Port, flow: &Flow<'_>) -> bool {
    match (port, flow.destination) {
        (Port::Numbers { .. } | Port::Icmp { .. }, Destination::Unknown) => true,
        (Port::Named { protocol, name }, Destination::Unknown) => declared(protocol, name, flow).is_some(),
        (Port::Numbers { protocol, ports }, Destination::Ports { protocol: own, port }) => {
            *protocol == own && ports.range().contains(&port)
        }
        (Port::Named { protocol, name }, Destination::Ports { protocol: own, port }) => {
            *protocol == own && declared(protocol, name, flow) == Some(port)
        }
        (Port::Icmp { v6, kind }, Destination::Icmp { v6: own, kind: sent }) => {
            *v6 == own && kind.is_none_or(|kind| kind == sent)
        }
        _ => false,
    }
}

/// The number that the receiver declares for a named port.
fn declared(protocol: &Protocol, name: &str, flow: &Flow<'_>) -> Option<u16> {
    let receiver = match (flow.direction, flow.peer) {
        (Direction::Ingress, _) => flow.subject,
        (Direction::Egress, PeerOf::Endpoint(endpoint, _)) => endpoint,
        (Direction::Egress, _) => return None,
    };
    receiver.ports.get(&(*protocol, name.to_owned())).copied()
}
