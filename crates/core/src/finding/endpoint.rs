//! Problems of an endpoint.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    finding::Mender,
    ids::{IfIndex, MacAddr},
    kernel::{AttachMode, MIN_MTU},
    nat::NatEntry,
    state::Level,
};

/// Which end of an endpoint's veth pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The host side, in the node's namespace. Containers cannot change it.
    Node,
    /// The container's side. A container with `CAP_NET_ADMIN` may do with it what it likes.
    Container,
}

/// The route that is in place of the node's route to an endpoint's address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteSeen {
    /// A route of Wharf's over another interface, by its name, or an unreachable one.
    Ours(Option<String>),
    /// A foreign route.
    Foreign(Option<String>),
}

/// The route that a lookup of an endpoint's address returns instead of the endpoint's own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lookup {
    /// Destination of the route.
    pub destination: IpNet,
    /// Its table.
    pub table: u32,
    /// Its interface; none where it names several or none.
    pub ifname: Option<String>,
    /// Its gateway.
    pub gateway: Option<IpAddr>,
}

/// A difference between an endpoint's record and its state in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointProblem {
    /// The container's network namespace is gone, or another one is at its path.
    Netns {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
    /// One side of the link is missing and the other exists: the missing side is in another network namespace.
    LinkMissing {
        /// Side.
        side: Side,
        /// Its name.
        name: String,
    },
    /// Both sides of the link are gone, and the container's network namespace exists: the link was deleted, which a
    /// container can do from its side. A deletion from the node's side looks the same.
    LinkDeleted {
        /// Name of the container's side.
        name: String,
    },
    /// A side of the link has another name.
    LinkRenamed {
        /// Side.
        side: Side,
        /// Name expected.
        name: String,
        /// Name found.
        found: String,
    },
    /// Another interface has the name.
    LinkReplaced {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Index expected.
        expected: IfIndex,
        /// Index found.
        found: IfIndex,
    },
    /// A side of the link is down.
    LinkDown {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// A side of the link has another MAC address.
    LinkMac {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Address expected.
        expected: MacAddr,
        /// Address found.
        found: Option<MacAddr>,
    },
    /// A side of the link has another MTU.
    LinkMtu {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Bytes expected.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// The ARP flag of a side of the link. On the host side ARP must be off, because the programs do not answer the
    /// node's requests. In the container ARP must be on: without it the container resolves no neighbour and reaches
    /// nothing.
    LinkArp {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// The host side is a port of a bridge, a bond or a VRF: that device receives in its place what the container sends to
    /// the node, and drops all of it while it is down.
    LinkEnslaved {
        /// Name.
        name: String,
        /// The device that it is a port of.
        master: String,
    },
    /// A side of another plugin's link is not as Wharf needs it: down, or with another MAC address.
    PluginLink {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// What is expected, and what is there.
        what: String,
    },
    /// The host side has a queue that limits its rate, as CNI's `bandwidth` plugin makes it: packets of other containers pass
    /// it by.
    LinkQueue {
        /// Name.
        name: String,
        /// Kind of the queue.
        kind: String,
    },
    /// The host side does not carry its owner's mark.
    LinkAlias {
        /// Name.
        name: String,
        /// Alias expected.
        expected: String,
        /// Alias found.
        found: Option<String>,
    },
    /// An address is missing in the container, or has another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Prefix length found; none when the address is not there.
        found: Option<u8>,
    },
    /// The node's route to an address of the endpoint.
    NodeRoute {
        /// Destination.
        to: IpNet,
        /// Interface expected.
        expected: String,
        /// What is there instead; none when nothing is.
        found: Option<RouteSeen>,
    },
    /// The node's route to an address of the endpoint is in the main table, but a lookup by the node's rules returns
    /// another route: a rule selects another table first, or another route takes precedence.
    NodeRouteShadowed {
        /// Destination.
        to: IpNet,
        /// Interface expected.
        expected: String,
        /// Where the look-up leads; none when it is refused.
        found: Option<Lookup>,
    },
    /// A route in the container is not there.
    ContainerRoute {
        /// Destination.
        to: IpNet,
        /// Gateway.
        gateway: IpAddr,
        /// Table; none for the main one.
        table: Option<u32>,
    },
    /// A rule in the container is not there.
    ContainerRule {
        /// Source that the rule matches.
        from: IpAddr,
        /// Table that it looks in.
        table: u32,
    },
    /// A program of the endpoint is not on its hook.
    Program {
        /// Program.
        program: String,
        /// Host side's name.
        ifname: String,
        /// How programs are attached.
        mode: AttachMode,
        /// Program id expected.
        expected: u32,
        /// Program ids found.
        found: Vec<u32>,
    },
    /// The program that drops everything is still on the hook.
    Sink {
        /// Program in whose place it stands.
        program: String,
        /// Its program id.
        id: u32,
    },
    /// A filter is left on the hook though programs are attached by tcx.
    StrayFilter {
        /// Program in whose place it stands.
        program: String,
        /// Its program id.
        id: u32,
    },
    /// A tcx link is left though programs are attached by clsact.
    StrayLink {
        /// Its pin.
        path: String,
    },
    /// A pin is not there.
    PinMissing {
        /// Its name.
        name: String,
    },
    /// Nothing is pinned.
    PinsMissing,
    /// Another program is behind the pinned link.
    PinStale {
        /// Its name.
        name: String,
        /// Program id expected.
        expected: u32,
        /// Program id found.
        found: u32,
    },
    /// The endpoint's programs use another map than the one that is pinned.
    MapUnused {
        /// Map.
        map: String,
        /// Id of the pinned map.
        pinned: u32,
        /// Ids of the maps in use.
        used: Vec<u32>,
    },
    /// A map of the endpoint cannot be read.
    MapUnreadable {
        /// Map.
        map: String,
        /// Why.
        cause: String,
    },
    /// A field of the configuration row has another value.
    Config {
        /// Field.
        field: &'static str,
        /// Value expected.
        expected: String,
        /// Value found.
        found: String,
    },
    /// The endpoint's row in the table of endpoints is not there, or differs.
    Row {
        /// Address.
        address: IpAddr,
        /// How it differs; none when it is not there.
        found: Option<String>,
    },
    /// The endpoint's slot of the program array is empty, or holds another program.
    CallSlot {
        /// Program id expected, where it is known.
        expected: Option<u32>,
        /// Program id found.
        found: Option<u32>,
    },
    /// A published port, or an address that is not masqueraded, is not in the node's table.
    Nat {
        /// The entry.
        entry: NatEntry,
    },
}

impl EndpointProblem {
    /// Who mends it.
    #[must_use]
    pub fn mender(&self) -> Mender {
        use Side::{Container, Node};
        let own = |regenerable| Mender::Container { regenerable };
        match self {
            Self::Netns { .. }
            | Self::LinkMissing { side: Node, .. }
            | Self::LinkRenamed { side: Node, .. }
            | Self::LinkReplaced { side: Node, .. }
            | Self::NodeRoute { found: Some(RouteSeen::Foreign(_)), .. }
            | Self::NodeRouteShadowed { .. }
            | Self::PluginLink { side: Node, .. }
            | Self::LinkQueue { .. } => Mender::Operator,
            Self::LinkDeleted { .. }
            | Self::LinkMissing { side: Container, .. }
            | Self::LinkRenamed { side: Container, .. }
            | Self::PluginLink { side: Container, .. }
            | Self::LinkReplaced { side: Container, .. } => own(false),
            // A smaller MTU does no harm, unless the kernel takes IPv6 away for it; packets of a larger one do not arrive.
            Self::LinkMtu { side: Container, expected, found, .. } if (MIN_MTU..*expected).contains(found) => {
                Mender::Nobody
            }
            Self::LinkDown { side: Container, .. }
            | Self::LinkMac { side: Container, .. }
            | Self::LinkMtu { side: Container, .. }
            | Self::LinkArp { side: Container, .. }
            | Self::Address { .. }
            | Self::ContainerRoute { .. }
            | Self::ContainerRule { .. } => own(true),
            Self::LinkDown { side: Node, .. }
            | Self::LinkMac { side: Node, .. }
            | Self::LinkMtu { side: Node, .. }
            | Self::LinkArp { side: Node, .. }
            | Self::LinkEnslaved { .. }
            | Self::LinkAlias { .. }
            | Self::NodeRoute { .. }
            | Self::Program { .. }
            | Self::Sink { .. }
            | Self::StrayFilter { .. }
            | Self::StrayLink { .. }
            | Self::PinMissing { .. }
            | Self::PinsMissing
            | Self::PinStale { .. }
            | Self::MapUnused { .. }
            | Self::MapUnreadable { .. } => Mender::Regeneration(Level::Datapath),
            Self::Config { .. } | Self::Row { .. } | Self::CallSlot { .. } | Self::Nat { .. } => {
                Mender::Regeneration(Level::Policy)
            }
        }
    }

    /// True for a problem of programs or maps, false for one of links, addresses or routes.
    #[must_use]
    pub fn is_of_bpf(&self) -> bool {
        match self {
            Self::Program { .. }
            | Self::Sink { .. }
            | Self::StrayFilter { .. }
            | Self::StrayLink { .. }
            | Self::PinMissing { .. }
            | Self::PinsMissing
            | Self::PinStale { .. }
            | Self::MapUnused { .. }
            | Self::MapUnreadable { .. }
            | Self::Config { .. }
            | Self::Row { .. }
            | Self::CallSlot { .. }
            | Self::Nat { .. } => true,
            Self::Netns { .. }
            | Self::LinkMissing { .. }
            | Self::LinkDeleted { .. }
            | Self::LinkRenamed { .. }
            | Self::LinkReplaced { .. }
            | Self::LinkDown { .. }
            | Self::LinkMac { .. }
            | Self::LinkMtu { .. }
            | Self::LinkArp { .. }
            | Self::PluginLink { .. }
            | Self::LinkQueue { .. }
            | Self::LinkEnslaved { .. }
            | Self::LinkAlias { .. }
            | Self::Address { .. }
            | Self::NodeRoute { .. }
            | Self::NodeRouteShadowed { .. }
            | Self::ContainerRoute { .. }
            | Self::ContainerRule { .. } => false,
        }
    }

    /// True when the endpoint's namespace or a side of its link is gone or replaced. No regeneration repairs this.
    #[must_use]
    pub fn is_of_a_lost_link(&self) -> bool {
        matches!(
            self,
            Self::Netns { .. } | Self::LinkMissing { .. } | Self::LinkDeleted { .. } | Self::LinkReplaced { .. }
        )
    }
}

/// Joins problems with one cause: a link with both sides missing was deleted, and its routes with it.
#[must_use]
pub fn joined(mut found: Vec<EndpointProblem>) -> Vec<EndpointProblem> {
    let missing =
        |wanted| move |p: &EndpointProblem| matches!(p, EndpointProblem::LinkMissing { side, .. } if *side == wanted);
    if !found.iter().any(missing(Side::Node)) {
        return found;
    }
    let inside = found.iter().find_map(|p| match p {
        EndpointProblem::LinkMissing { side: Side::Container, name } => Some(name.clone()),
        _ => None,
    });
    if let Some(name) = inside {
        let follows = |p: &EndpointProblem| {
            matches!(p, EndpointProblem::LinkMissing { .. } | EndpointProblem::NodeRoute { found: None, .. })
        };
        found.retain(|p| !follows(p));
        found.insert(0, EndpointProblem::LinkDeleted { name });
    }
    found
}
