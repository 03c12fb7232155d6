//! Compiles policies to the rows that the BPF programs look up.
//!
//! **Look-up.** For a packet, the program knows the *rule set* (0: no policy, accept). It looks up
//! 1. the peer's address in [`Tables::ipcache`] (longest prefix): a *peer class*;
//! 2. protocol and destination port in [`Rows::ports`] (longest prefix): a *port class*; [`PortClass::ANY`] without a
//!    row, [`PortClass::UNKNOWN`] without a transport header;
//! 3. up to four cells of [`Rows::cells`]: (class, port), (class, any), (any, port), (any, any).
//!
//! The lowest-ranked admin rule of these cells decides; without one, or if it is a pass, the lowest-ranked other rule.
//! Without any, the packet is accepted.
//!
//! **Correctness.** Addresses share a peer class only if they match the same *atoms* (peers of rules in use);
//! destinations share a port class only if they match the same port lists. A rule is in the cells of every peer class
//! of its peers (or "any") times every port class of its ports (or "any"): a packet's four cells have exactly the rules
//! that match it. A rank is the position in the evaluation order of [`crate::model`]; namespaced accept rules with
//! requests follow the others. The lowest rank of a union is the minimum over its parts, so two rules per cell suffice.
//! A pass of the baseline tier accepts without a rule.
//!
//! **Unknown transport.** Cells of [`PortClass::UNKNOWN`] deny with the rank of the best rule with ports.
//!
//! **Requests.** The flow goes to the listener for the union of all matching rules' requests. These rules have ports,
//! so they are in the cells (class, port) and (any, port). The first cell has the union of both and ranks before the
//! second; each names its first rule. A listener's number identifies one direction, one union and one [`Share`] while a
//! cell refers to it. So a rule set with requests belongs to one share.
//!
//! **Identifiers.** A key of [`Rows`] never changes its value: other rules get another rule set, other atoms another
//! class. [`diff()`] depends on this.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use imbl::OrdMap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::{
    model::{Direction, Endpoint, Origin, PolicyName, Protocol},
    oracle::{Destination, Verdict},
    requests::Requests,
};

mod atoms;
mod classes;
mod diff;
mod engine;
mod identities;
mod ids;
mod ipcache;
mod kept;
mod kinds;
mod limits;
mod listeners;
mod moved;
mod names;
mod networks;
mod peers;
mod plan;
mod ports;
mod selection;
mod sets;

pub use diff::{Change, Diff, diff};
pub use engine::{Engine, Event, Refused};
pub use ipcache::Ipcache;
pub use kinds::IdentityInUse;
pub use limits::{Limits, Sizes, Table, TooLarge};

/// An endpoint, numbered by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey(pub u32);

/// A label set, numbered from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(pub u32);

impl Identity {
    /// Outside addresses.
    pub const NONE: Self = Self(0);
    pub const NODE: Self = Self(u32::MAX);
    pub const OTHER_NODE: Self = Self(u32::MAX - 1);
    /// Containers elsewhere with unknown labels.
    pub const ELSEWHERE: Self = Self(u32::MAX - 2);

    /// A label set.
    #[must_use]
    pub const fn is_of_endpoints(self) -> bool {
        self.0 != Self::NONE.0 && self.0 < Self::ELSEWHERE.0
    }
}

/// Ordered rules of one direction. From 1, with [`SetId::DENIES`] if an egress rule denies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetId(pub u32);

impl SetId {
    /// No policy selects the endpoint.
    pub const NONE: Self = Self(0);
    /// Bit of the number.
    pub const DENIES: u32 = 1 << 31;
}

/// Addresses that match the same atoms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerClass(pub u32);

impl PeerClass {
    /// In a cell: every address.
    pub const ANY: Self = Self(0);
}

/// Destinations that match the same rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortClass(pub u32);

impl PortClass {
    /// No port row matches.
    pub const ANY: Self = Self(0);
    /// The transport header is unknown.
    pub const UNKNOWN: Self = Self(u32::MAX);
}

/// Key of [`Tables::origins`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleIndex(pub u32);

/// Port of a listener, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u16);

/// Content of a proxy listener.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Listener {
    /// Of the rules.
    pub direction: Direction,
    /// Accepted requests.
    pub requests: Arc<Requests>,
    /// Absent in files of earlier versions.
    #[serde(default)]
    pub share: Share,
}

/// One of [`Share::COUNT`] parts of the endpoints, with separate listeners: the proxy reloads a whole listener when an
/// endpoint comes or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Share(u32);

impl Share {
    /// Shares.
    pub const COUNT: u32 = 16;
    /// Consecutive keys per share.
    const RUN: u32 = 16;

    /// Fixed per key: a change would break connections.
    #[must_use]
    pub fn of(EndpointKey(key): EndpointKey) -> Self {
        Self(key / Self::RUN % Self::COUNT)
    }
}

/// All rows, and the meaning of their numbers. Copies are cheap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tables {
    /// Rule sets by endpoint.
    pub sets: OrdMap<EndpointKey, Sets>,
    /// Endpoints, nodes, networks, exceptions, names' addresses, both families.
    pub ipcache: Ipcache,
    pub rules: OrdMap<SetId, Arc<Rows>>,
    /// Source of each rule.
    pub origins: OrdMap<RuleIndex, Arc<Origin>>,
    /// Listeners that cells refer to.
    pub listeners: OrdMap<ListenerId, Arc<Listener>>,
    /// Number of cells per listener and rule set.
    pub redirects: OrdMap<(ListenerId, SetId), usize>,
}

/// Rule sets of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sets {
    pub ingress: SetId,
    pub egress: SetId,
}

impl Sets {
    /// Rule set of a direction.
    #[must_use]
    pub const fn of(self, direction: Direction) -> SetId {
        match direction {
            Direction::Ingress => self.ingress,
            Direction::Egress => self.egress,
        }
    }
}

/// What an address maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// A change of it is a change of the row, also if the class stays.
    pub identity: Identity,
    pub class: PeerClass,
}

/// Rows of a rule set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rows {
    /// Prefixes do not overlap.
    pub ports: OrdMap<PortPrefix, PortClass>,
    /// With a matching rule.
    pub cells: OrdMap<(PeerClass, PortClass), Cell>,
    /// Isolating policies, to explain a drop without a rule.
    pub isolated_by: Vec<PolicyName>,
}

/// Protocol of a port row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum L4 {
    Tcp,
    Udp,
    Sctp,
    /// ICMP; the port is the type.
    Icmp,
    /// ICMPv6; the port is the type.
    Icmp6,
}

impl From<Protocol> for L4 {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::Udp => Self::Udp,
            Protocol::Sctp => Self::Sctp,
        }
    }
}

/// Ports with a common bit prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortPrefix {
    /// Protocol.
    pub l4: L4,
    /// Lowest port.
    pub first: u16,
    /// 0 to 16 bits.
    pub length: u8,
}

/// Best rules of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cell {
    /// Admin tier.
    pub admin: Option<Hit>,
    /// Never a pass.
    pub rest: Option<Hit>,
}

/// A matching rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// Unique except among rules with requests.
    pub rank: u32,
    /// Effect.
    pub ruling: Ruling,
    /// `None` for isolation, a pass of the baseline tier, and an unknown rule with ports.
    pub rule: Option<RuleIndex>,
}

/// Effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ruling {
    Accept,
    /// Drop.
    Deny,
    /// Unknown ports could decide.
    DenyUnknown,
    /// Later tiers decide.
    Pass,
    /// To the proxy.
    Redirect {
        listener: ListenerId,
        /// Accept without a proxy ([`Requests::fails_open`]).
        open: bool,
    },
}

/// A decision about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Also for a listener.
    pub accept: bool,
    /// Listener of the flow.
    pub listener: Option<ListenerId>,
    /// Deciding rule.
    pub rule: Option<RuleIndex>,
    /// The transport header is unknown.
    pub unknown: bool,
}

/// Look-ups and decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookUp {
    /// Rule set.
    pub set: SetId,
    pub class: PeerClass,
    pub port: PortClass,
    pub decision: Decision,
}

impl Decision {
    const DEFAULT: Self = Self { accept: true, listener: None, rule: None, unknown: false };
}

pub(crate) const EVERYWHERE: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];

impl Tables {
    /// `None` for an unknown endpoint.
    #[must_use]
    pub fn decide(
        &self,
        endpoint: EndpointKey,
        direction: Direction,
        peer: IpAddr,
        destination: Destination,
    ) -> Option<Decision> {
        self.look_up(endpoint, direction, peer, destination).map(|look_up| look_up.decision)
    }

    /// As [`Tables::decide`]; ANY without a look-up.
    #[must_use]
    pub fn look_up(
        &self,
        endpoint: EndpointKey,
        direction: Direction,
        peer: IpAddr,
        destination: Destination,
    ) -> Option<LookUp> {
        let set = self.sets.get(&endpoint)?.of(direction);
        if set == SetId::NONE {
            return Some(LookUp { set, class: PeerClass::ANY, port: PortClass::ANY, decision: Decision::DEFAULT });
        }
        let none = Rows::default();
        let rows = self.rules.get(&set).map_or(&none, |rows| rows);
        let (_, known) = networks::longest(&self.ipcache, peer)?;
        let port = rows.port_class(destination);
        Some(LookUp { set, class: known.class, port, decision: rows.decide(known.class, port) })
    }

    /// As an oracle verdict; `None` for an unknown endpoint.
    #[must_use]
    pub fn explain(&self, endpoint: EndpointKey, direction: Direction, decision: Decision) -> Option<Verdict<'_>> {
        let rule = decision.rule.and_then(|rule| self.origins.get(&rule)).map(|origin| &**origin);
        if decision.accept {
            let listener = decision.listener.map(|listener| self.listeners.get(&listener));
            let requests = listener.map(|listener| listener.map(|listener| Cow::Borrowed(&*listener.requests)));
            return Some(Verdict::Accept { rule, requests: requests.map(Option::unwrap_or_default) });
        }
        if decision.unknown {
            return Some(Verdict::DenyUnknown);
        }
        let rows = self.rules.get(&self.sets.get(&endpoint)?.of(direction))?;
        let isolated_by = if rule.is_none() { rows.isolated_by.iter().collect() } else { Vec::new() };
        Some(Verdict::Deny { rule, isolated_by })
    }

    /// During a change, cells can have classes without addresses.
    fn classes(&self) -> impl Iterator<Item = PeerClass> {
        let of_cells = self.rules.values().flat_map(|rows| rows.cells.keys().map(|(class, _)| *class));
        self.ipcache.classes().chain(of_cells).filter(|class| *class != PeerClass::ANY)
    }

    /// Row counts.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        let sum = |count: fn(&Rows) -> usize| self.rules.values().map(|rows| count(rows)).sum();
        Sizes {
            ipcache: self.ipcache.len(),
            ports: sum(|rows| rows.ports.len()),
            rules: sum(|rows| rows.cells.len()),
            sets: self.rules.len(),
            listeners: self.listeners.len(),
        }
    }
}

impl Rows {
    pub(crate) fn cells_of(&self, class: PeerClass) -> impl Iterator<Item = (PortClass, &Cell)> {
        let keys = (class, PortClass::ANY)..=(class, PortClass(u32::MAX));
        self.cells.range(keys).map(|((_, port), cell)| (*port, cell))
    }

    pub(crate) fn last_class(&self) -> Option<PeerClass> {
        self.cells.get_max().map(|((class, _), _)| *class)
    }

    fn decide(&self, class: PeerClass, port: PortClass) -> Decision {
        let keys = [(class, port), (class, PortClass::ANY), (PeerClass::ANY, port), (PeerClass::ANY, PortClass::ANY)];
        let cells = keys.map(|key| self.cells.get(&key).copied().unwrap_or_default());
        let best = |hit: fn(&Cell) -> Option<Hit>| cells.iter().filter_map(hit).min_by_key(|hit| hit.rank);
        let admin = best(|cell| cell.admin).filter(|hit| hit.ruling != Ruling::Pass);
        let decides = admin.or_else(|| best(|cell| cell.rest));
        decides.map_or(Decision::DEFAULT, |hit| {
            let (accept, listener) = match hit.ruling {
                Ruling::Accept => (true, None),
                Ruling::Redirect { listener, .. } => (true, Some(listener)),
                Ruling::Deny | Ruling::DenyUnknown | Ruling::Pass => (false, None),
            };
            Decision { accept, listener, rule: hit.rule, unknown: hit.ruling == Ruling::DenyUnknown }
        })
    }

    fn port_class(&self, destination: Destination) -> PortClass {
        let (l4, port) = match destination {
            Destination::Ports { protocol, port } => (protocol.into(), port),
            Destination::Icmp { v6: false, kind } => (L4::Icmp, kind.into()),
            Destination::Icmp { v6: true, kind } => (L4::Icmp6, kind.into()),
            Destination::Other(_) => return PortClass::ANY,
            Destination::Unknown => return PortClass::UNKNOWN,
        };
        self.class_of(l4, port)
    }

    fn class_of(&self, l4: L4, port: u16) -> PortClass {
        let below = self.ports.get_prev(&PortPrefix { l4, first: port, length: u8::MAX });
        below.filter(|(prefix, _)| prefix.contains(l4, port)).map_or(PortClass::ANY, |(_, class)| *class)
    }
}

impl PortPrefix {
    fn contains(self, l4: L4, port: u16) -> bool {
        self.l4 == l4 && u32::from(self.first ^ port) >> (16 - u32::from(self.length.min(16))) == 0
    }
}

/// An endpoint and its identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub identity: Identity,
    pub endpoint: Arc<Endpoint>,
}

/// Compiles from an empty state.
///
/// # Errors
/// The rows exceed the limits, or one identity has different labels.
pub fn compile(events: impl IntoIterator<Item = Event>, limits: Limits) -> Result<Tables, Refused> {
    let mut engine = Engine::new(limits);
    engine.apply(events)?;
    Ok(engine.into_tables())
}
