//! Policies to the rows that the BPF programs look up.
//!
//! **Look-up.** For a packet of an endpoint and direction, the program knows the endpoint's *rule set* (0: nothing
//! selects it, accept). It looks up
//! 1. the peer's address in [`Tables::ipcache`] (longest prefix): a *peer class*;
//! 2. rule set, protocol and destination port in [`Rows::ports`] (longest prefix): a *port class*, or
//!    [`PortClass::ANY`] if there is no row, as for protocols without ports. For a packet whose transport header is not found, [`PortClass::UNKNOWN`];
//! 3. up to four cells of [`Rows::cells`]: (class, port), (class, any), (any, port), (any, any).
//!
//! A [`Cell`] has up to two [`Hit`]s: the best rule of the admin tier and the best of what follows it. Of the admin
//! hits of the four cells, that of the lowest rank decides. If there is none, or it is a pass, that of the lowest rank
//! of the other hits decides. If there is none, the packet is accepted.
//!
//! **Why this is what the model says.** Two addresses have the same peer class only if the same *atoms* (peers of rules
//! in use) match them; two destinations of a rule set have the same port class only if the same lists of ports of its
//! rules match them. A rule counts for the cells of every class that one of its peers matches (or of "any") times every
//! port class that its ports contain (or "any"), and for no other. So the rules that count for a packet's four cells
//! are exactly the rules that match the packet. A rank is the place of the rule in the order in which [`crate::model`] asks: admin
//! rules; namespaced deny, then accept rules, those without requests first; isolation; baseline rules where nothing isolates. The lowest rank of a
//! union is the lowest of the lowest ranks of its parts, so a cell needs only its best rule of the admin tier and its
//! best of the rest, and a pass needs no more: it goes on to the best of the rest. A pass of the baseline tier accepts
//! without a rule. No cell is expanded for a pass.
//!
//! **Unknown transport.** The cells of [`PortClass::UNKNOWN`] have the rank of the best rule with ports, and deny:
//! where such a rule comes before every matching rule without ports, the verdict would depend on ports that are not
//! known.
//!
//! **Requests.** Of rules with requests, all that match a packet count, not the first alone: its flow goes to the listener for the union of their
//! requests. Such a rule has ports, so those that match are in the cells (class, port) and (any, port). The first one has the union of both, and
//! ranks before the second one; each names the first of its rules. Listeners are for requests, not for rules or endpoints: a number stands for one
//! direction, one union and one [`Share`] of the endpoints as long as a cell leads to it. So rule sets with requests are for one share each.
//!
//! **Identifiers** stay the same while their meaning does. A key of [`Rows`] never changes its value: other rules are
//! another rule set with another identifier, other atoms another class. [`diff()`] rests on that.

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

/// An endpoint, by a number of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey(pub u32);

/// Labels and namespace of an endpoint, by a number of the caller: the same number for the same labels. Not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(pub u32);

impl Identity {
    /// What has no labels: the node and what is outside.
    pub const NONE: Self = Self(0);
}

/// A rule set: the rules of one direction that endpoints share, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetId(pub u32);

impl SetId {
    /// Nothing selects the endpoint: accept without look-up.
    pub const NONE: Self = Self(0);
}

/// Addresses that the same peers of rules match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerClass(pub u32);

impl PeerClass {
    /// Of a cell: every address.
    pub const ANY: Self = Self(0);
}

/// Destinations that the same rules of a rule set match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortClass(pub u32);

impl PortClass {
    /// Of a cell: every destination. Of a packet: no rule names its destination.
    pub const ANY: Self = Self(0);
    /// Of a cell and of a packet: the transport header is not found.
    pub const UNKNOWN: Self = Self(u32::MAX);
}

/// A rule, in [`Tables::origins`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleIndex(pub u32);

/// A listener of the proxy, in [`Tables::listeners`]: its port. Not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u16);

/// What a listener of the proxy lets pass, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Listener {
    /// Whose rules they are: of those whom its connections go to, or of those whom they come from.
    pub direction: Direction,
    /// What the connections may carry.
    pub requests: Arc<Requests>,
    /// Which endpoints: of those with equal rules, the ones of this share. A file of an earlier version has no such field.
    #[serde(default)]
    pub share: Share,
}

/// One of the [`Share::COUNT`] parts of all endpoints. Endpoints of two shares have no listener in common, even with equal rules: the proxy reads a
/// listener anew, whole, whenever an endpoint comes or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Share(u32);

impl Share {
    /// So many are there.
    pub const COUNT: u32 = 16;
    /// So many keys in a row are of one share: few endpoints are of few shares.
    const RUN: u32 = 16;

    /// The share of an endpoint, always the same for a key: an endpoint that changed its share would change its listener, and lose its connections.
    #[must_use]
    pub fn of(EndpointKey(key): EndpointKey) -> Self {
        Self(key / Self::RUN % Self::COUNT)
    }
}

/// Everything that the programs look up, and what its numbers stand for. Copies share what is equal in them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tables {
    /// The rule sets of each endpoint.
    pub sets: OrdMap<EndpointKey, Sets>,
    /// Longest-prefix rows of peers' addresses: endpoints, the node, every network and exception in use, the addresses of names that rules in use
    /// match, and all of each family.
    pub ipcache: Ipcache,
    /// The rows of each rule set.
    pub rules: OrdMap<SetId, Arc<Rows>>,
    /// Where each rule was written.
    pub origins: OrdMap<RuleIndex, Arc<Origin>>,
    /// The listeners that cells lead to. Not for the programs: cells have their numbers.
    pub listeners: OrdMap<ListenerId, Arc<Listener>>,
    /// How many cells of a rule set lead to a listener.
    pub redirects: OrdMap<(ListenerId, SetId), usize>,
}

/// The rule sets of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sets {
    /// Of packets to it.
    pub ingress: SetId,
    /// Of packets from it.
    pub egress: SetId,
}

impl Sets {
    /// The rule set of a direction.
    #[must_use]
    pub const fn of(self, direction: Direction) -> SetId {
        match direction {
            Direction::Ingress => self.ingress,
            Direction::Egress => self.egress,
        }
    }
}

/// What is known of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The endpoint's labels; [`Identity::NONE`] for the node and what is outside.
    pub identity: Identity,
    /// Its peer class.
    pub class: PeerClass,
}

/// The rows of one rule set. Its identifier is a part of every key, so no key has a direction.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rows {
    /// Port classes. The prefixes do not overlap.
    pub ports: OrdMap<PortPrefix, PortClass>,
    /// Cells that some rule matches.
    pub cells: OrdMap<(PeerClass, PortClass), Cell>,
    /// Policies that isolate, by name: why a packet is dropped without a rule. Not for the programs.
    pub isolated_by: Vec<PolicyName>,
}

/// What has destination ports, or ICMP types in their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum L4 {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
    /// ICMP; its type is the port.
    Icmp,
    /// ICMPv6; its type is the port.
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

/// Ports of a protocol that share their first bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortPrefix {
    /// Protocol.
    pub l4: L4,
    /// The lowest port.
    pub first: u16,
    /// Number of leading bits that the ports share: 0 to 16.
    pub length: u8,
}

/// The best rules of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cell {
    /// Of the admin tier.
    pub admin: Option<Hit>,
    /// Of the tiers after it; never a pass.
    pub rest: Option<Hit>,
}

/// A rule that matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// Place in the order of the rule set; but for those with requests, no two rules of it have the same.
    pub rank: u32,
    /// What the rule does.
    pub ruling: Ruling,
    /// The rule; `None` for isolation, for a pass of the baseline tier, and where it could only be some rule with
    /// ports.
    pub rule: Option<RuleIndex>,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ruling {
    /// Lets the packet pass.
    Accept,
    /// Drops it.
    Deny,
    /// Drops it, because its transport header is not found and rules with ports could decide.
    DenyUnknown,
    /// Leaves it to the tiers after the admin tier.
    Pass,
    /// Hands its flow to the proxy.
    Redirect {
        /// What takes it.
        listener: ListenerId,
        /// Without a proxy it passes ([`Requests::fails_open`]).
        open: bool,
    },
}

/// What the program does with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// It passes, perhaps by way of a listener.
    pub accept: bool,
    /// The listener that its flow goes through.
    pub listener: Option<ListenerId>,
    /// The rule that decides.
    pub rule: Option<RuleIndex>,
    /// It is dropped because its transport header is not found.
    pub unknown: bool,
}

/// What a program looks up on the way to a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookUp {
    /// Rule set of the endpoint's direction.
    pub set: SetId,
    /// The peer's class.
    pub class: PeerClass,
    /// The destination's class.
    pub port: PortClass,
    /// What follows.
    pub decision: Decision,
}

impl Decision {
    const DEFAULT: Self = Self { accept: true, listener: None, rule: None, unknown: false };
}

/// All addresses of both families: the rows that every table has.
pub(crate) const EVERYWHERE: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];

impl Tables {
    /// What the program decides about a packet of the endpoint, with its look-ups; `None` if the endpoint is not there.
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

    /// As [`Tables::decide`], with what is found on the way; classes are [`PeerClass::ANY`] and [`PortClass::ANY`] where nothing is looked
    /// up.
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

    /// The decision in the oracle's words; `None` if the endpoint is not there.
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

    /// The classes that rows have. Amid a change, cells have classes that no address has.
    fn classes(&self) -> impl Iterator<Item = PeerClass> {
        let of_cells = self.rules.values().flat_map(|rows| rows.cells.keys().map(|(class, _)| *class));
        self.ipcache.classes().chain(of_cells).filter(|class| *class != PeerClass::ANY)
    }

    /// Number of rows of each table.
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
    /// The cells of a class.
    pub(crate) fn cells_of(&self, class: PeerClass) -> impl Iterator<Item = (PortClass, &Cell)> {
        let keys = (class, PortClass::ANY)..=(class, PortClass(u32::MAX));
        self.cells.range(keys).map(|((_, port), cell)| (*port, cell))
    }

    /// The highest class that has cells.
    pub(crate) fn last_class(&self) -> Option<PeerClass> {
        self.cells.get_max().map(|((class, _), _)| *class)
    }

    /// The decision about a peer and a destination of these classes.
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

    /// The class of the only prefix that contains the destination.
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
    /// The number of its labels and namespace.
    pub identity: Identity,
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
}

/// Compiles from nothing.
///
/// # Errors
/// The tables do not fit the limits, or two endpoints with different labels have the same identity.
pub fn compile(events: impl IntoIterator<Item = Event>, limits: Limits) -> Result<Tables, Refused> {
    let mut engine = Engine::new(limits);
    engine.apply(events)?;
    Ok(engine.into_tables())
}
