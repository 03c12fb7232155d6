//! Evaluates one flow: the reference for tests. Deliberately slow and short.

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

/// Addresses by DNS name.
pub type Names = BTreeMap<Arc<str>, BTreeSet<IpAddr>>;

/// A flow at one endpoint.
#[derive(Debug, Clone, Copy)]
pub struct Flow<'a> {
    /// Ingress if `subject` receives.
    pub direction: Direction,
    /// Evaluating endpoint.
    pub subject: &'a Endpoint,
    pub peer: PeerOf<'a>,
    pub destination: Destination,
    /// Known names.
    pub names: &'a Names,
}

/// Peer and its address.
#[derive(Debug, Clone, Copy)]
pub enum PeerOf<'a> {
    /// An endpoint of this node.
    Endpoint(&'a Endpoint, IpAddr),
    Node(IpAddr),
    /// Another node.
    OtherNode(IpAddr),
    /// A container elsewhere.
    Pod(IpAddr),
    /// An address of no node or pod.
    Outside(IpAddr),
}

/// Destination of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Destination {
    Ports {
        protocol: Protocol,
        port: u16,
    },
    /// An ICMP message.
    Icmp {
        /// ICMPv6, else ICMP.
        v6: bool,
        /// Type (RFC 792, RFC 4443).
        kind: u8,
    },
    /// IANA number. No rule with ports matches.
    Other(u8),
    /// No transport header: every rule with ports may match.
    Unknown,
}

/// Verdict and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict<'a> {
    Accept {
        /// First matching rule; `None` if no tier decides.
        rule: Option<&'a Origin>,
        /// `None` for all.
        requests: Option<Cow<'a, Requests>>,
    },
    /// Dropped.
    Deny {
        /// `None` for isolation.
        rule: Option<&'a Origin>,
        /// Isolating policies, without a rule.
        isolated_by: Vec<&'a PolicyName>,
    },
    /// Unknown ports decide.
    DenyUnknown,
}

impl Verdict<'_> {
    /// The flow passes.
    #[must_use]
    pub const fn accepts(&self) -> bool {
        matches!(self, Self::Accept { .. })
    }
}

/// Evaluates a flow ([`crate::model`]). Policies may be in any order; names are unique.
pub fn judge<'a>(policies: impl IntoIterator<Item = &'a Policy>, flow: &Flow<'a>) -> Verdict<'a> {
    let mut policies: Vec<&Policy> = policies.into_iter().filter(|p| flow.subject.is_subject(&p.subject)).collect();
    policies.sort_by_key(|p| (if p.tier == Tier::Namespaced { 0 } else { p.priority }, &p.name));

    let matching = |tier| {
        let policies = policies.iter().copied().filter(move |p| p.tier == tier);
        policies.flat_map(|p| p.rules.iter().filter_map(move |rule| Some((rule, effect(p, rule, flow)?))))
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
        Some((rule, _)) if unknown(rule) => return Verdict::DenyUnknown,
        Some((rule, Action::Accept)) => return accept(rule),
        Some((rule, Action::Deny)) => return deny(rule),
        Some((_, Action::Pass | Action::Except)) | None => {}
    }
    if let Some((rule, _)) = matching(Tier::Namespaced).find(|(_, action)| *action == Action::Deny) {
        return deny(rule);
    }
    let accepting = matching(Tier::Namespaced).filter(|(_, action)| *action == Action::Accept);
    let mut accepting = accepting.map(|(rule, _)| rule);
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
        let except = matching(Tier::Namespaced).find(|(_, action)| *action == Action::Except);
        return except.map_or(Verdict::Deny { rule: None, isolated_by }, |(rule, _)| deny(rule));
    }
    match matching(Tier::Baseline).next() {
        Some((rule, _)) if unknown(rule) => Verdict::DenyUnknown,
        Some((rule, Action::Accept)) => accept(rule),
        Some((rule, Action::Deny)) => deny(rule),
        Some((_, Action::Pass | Action::Except)) | None => Verdict::Accept { rule: None, requests: None },
    }
}

type Selects = fn(&Selector, &Endpoint) -> bool;

fn selects(selector: &Selector, endpoint: &Endpoint) -> bool {
    selector.selects(&endpoint.labels, endpoint.namespace.as_deref())
}

fn may_select(selector: &Selector, endpoint: &Endpoint) -> bool {
    selector.may_select(&endpoint.labels, endpoint.namespace.as_deref())
}

/// The rule's effect; `None` if it does not match. The caller has checked that `policy` may select the subject.
fn effect(policy: &Policy, rule: &Rule, flow: &Flow<'_>) -> Option<Action> {
    let is_sure = || selects(&policy.subject, flow.subject) && matches(rule, flow, selects);
    let is_possible = || matches(rule, flow, may_select);
    match (rule.action, policy.tier) {
        (Action::Deny, _) => is_possible().then_some(Action::Deny),
        (action, _) if is_sure() => Some(action),
        // If it does match, later tiers decide, and might deny.
        (Action::Pass, Tier::Admin) => is_possible().then_some(Action::Deny),
        (Action::Accept | Action::Pass | Action::Except, _) => None,
    }
}

fn matches(rule: &Rule, flow: &Flow<'_>, selects: Selects) -> bool {
    rule.direction == flow.direction
        && rule.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer_matches(peer, flow, selects)))
        && match &rule.ports {
            Some(ports) => ports.iter().any(|port| port_matches(port, flow)),
            None => rule.requests.is_none(),
        }
}

fn peer_matches(peer: &Peer, flow: &Flow<'_>, selects: Selects) -> bool {
    let other = &flow.peer;
    let (PeerOf::Endpoint(_, address)
    | PeerOf::Node(address)
    | PeerOf::OtherNode(address)
    | PeerOf::Pod(address)
    | PeerOf::Outside(address)) = other;
    match (peer, other) {
        (Peer::Endpoints(selector), PeerOf::Endpoint(endpoint, _)) => selects(selector, endpoint),
        (Peer::Network { net, except }, _) => net.contains(address) && !except.iter().any(|e| e.contains(address)),
        (Peer::Names(pattern), PeerOf::Outside(_)) => {
            flow.names.iter().any(|(name, addresses)| addresses.contains(address) && pattern.matches(name))
        }
        (Peer::Entity(Entity::All), _)
        | (Peer::Entity(Entity::World), PeerOf::Outside(_))
        | (Peer::Entity(Entity::Host), PeerOf::Node(_))
        | (Peer::Entity(Entity::Cluster), PeerOf::Endpoint(..) | PeerOf::OtherNode(_))
        | (Peer::Entity(Entity::RemoteNode), PeerOf::OtherNode(_)) => true,
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

fn declared(protocol: &Protocol, name: &str, flow: &Flow<'_>) -> Option<u16> {
    let receiver = match (flow.direction, flow.peer) {
        (Direction::Ingress, _) => flow.subject,
        (Direction::Egress, PeerOf::Endpoint(endpoint, _)) => endpoint,
        (Direction::Egress, _) => return None,
    };
    receiver.ports.get(&(*protocol, name.to_owned())).copied()
}
