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

/// An end of an endpoint's veth pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The host side; containers cannot change it.
    Node,
    /// The container's side; a container with `CAP_NET_ADMIN` can change it.
    Container,
}

/// The route found instead of the node's route to an endpoint's address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteSeen {
    /// A route of Wharf's over another interface, by name, or an unreachable one.
    Ours(Option<String>),
    /// A foreign route.
    Foreign(Option<String>),
}

/// Result of a route look-up that does not return the endpoint's route.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lookup {
    /// Destination.
    pub destination: IpNet,
    /// Table.
    pub table: u32,
    /// Interface; none for no or several interfaces.
    pub ifname: Option<String>,
    /// Gateway.
    pub gateway: Option<IpAddr>,
}

/// A difference between an endpoint's record and the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointProblem {
    /// The container's network namespace is gone, or its path has another one.
    Netns {
        /// Path.
        path: String,
        /// State of the path.
        cause: String,
    },
    /// One side of the link is missing: it moved to another network namespace.
    LinkMissing {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// Both sides are gone and the container's network namespace exists: the container or the node deleted the link.
    LinkDeleted {
        /// Container side's name.
        name: String,
    },
    /// A side has another name.
    LinkRenamed {
        /// Side.
        side: Side,
        /// Expected name.
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
        /// Expected index.
        expected: IfIndex,
        /// Index found.
        found: IfIndex,
    },
    /// A side is down.
    LinkDown {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// A side has another MAC address.
    LinkMac {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Expected address.
        expected: MacAddr,
        /// Address found.
        found: Option<MacAddr>,
    },
    /// A side has another MTU.
    LinkMtu {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Expected bytes.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// A side's ARP flag. It must be off on the host side, because the programs do not answer the node's requests,
    /// and on in the container, to resolve neighbours.
    LinkArp {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// The host side is a port of a bridge, bond or VRF, which receives the container's packets to the node, and
    /// drops them while it is down.
    LinkEnslaved {
        /// Name.
        name: String,
        /// The upper device.
        master: String,
    },
    /// A side of another plugin's link is down or has another MAC address.
    PluginLink {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Expected and found state.
        what: String,
    },
    /// The host side has a rate-limiting queue, as from CNI's `bandwidth` plugin, which packets of local containers
    /// bypass.
    LinkQueue {
        /// Name.
        name: String,
        /// Kind.
        kind: String,
    },
    /// The host side lacks its owner's mark.
    LinkAlias {
        /// Name.
        name: String,
        /// Expected alias.
        expected: String,
        /// Alias found.
        found: Option<String>,
    },
    /// An address in the container is missing or has another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Prefix length found; none when missing.
        found: Option<u8>,
    },
    /// The node's route to an address is missing or replaced.
    NodeRoute {
        /// Destination.
        to: IpNet,
        /// Expected interface.
        expected: String,
        /// Route found instead, if any.
        found: Option<RouteSeen>,
    },
    /// The main table has the node's route to an address, but a rule or a preferred route overrides it.
    NodeRouteShadowed {
        /// Destination.
        to: IpNet,
        /// Expected interface.
        expected: String,
        /// Route found; none when the look-up fails.
        found: Option<Lookup>,
    },
    /// A route in the container is missing.
    ContainerRoute {
        /// Destination.
        to: IpNet,
        /// Gateway.
        gateway: IpAddr,
        /// Table; none for main.
        table: Option<u32>,
    },
    /// A rule in the container is missing.
    ContainerRule {
        /// Source selector.
        from: IpAddr,
        /// Table.
        table: u32,
    },
    /// A program is not on its hook.
    Program {
        /// Program.
        program: String,
        /// Host side's name.
        ifname: String,
        /// Attach mode.
        mode: AttachMode,
        /// Expected program id.
        expected: u32,
        /// Program ids found.
        found: Vec<u32>,
    },
    /// The program that drops everything is still on the hook.
    Sink {
        /// Replaced program.
        program: String,
        /// Program id.
        id: u32,
    },
    /// A clsact filter remains in tcx mode.
    StrayFilter {
        /// Program of this hook.
        program: String,
        /// Program id.
        id: u32,
    },
    /// A tcx link remains in clsact mode.
    StrayLink {
        /// Pin.
        path: String,
    },
    /// A pin is missing.
    PinMissing {
        /// Name.
        name: String,
    },
    /// All pins are missing.
    PinsMissing,
    /// The pinned link has another program.
    PinStale {
        /// Name.
        name: String,
        /// Expected program id.
        expected: u32,
        /// Program id found.
        found: u32,
    },
    /// The programs use another map than the pinned one.
    MapUnused {
        /// Map.
        map: String,
        /// Pinned map's id.
        pinned: u32,
        /// Ids of the used maps.
        used: Vec<u32>,
    },
    /// A map is unreadable.
    MapUnreadable {
        /// Map.
        map: String,
        /// Cause.
        cause: String,
    },
    /// A field of the configuration row differs.
    Config {
        /// Field.
        field: &'static str,
        /// Expected value.
        expected: String,
        /// Value found.
        found: String,
    },
    /// The row in the endpoint table is missing or differs.
    Row {
        /// Address.
        address: IpAddr,
        /// Difference; none when missing.
        found: Option<String>,
    },
    /// The program-array slot is empty or has another program.
    CallSlot {
        /// Expected program id, if known.
        expected: Option<u32>,
        /// Program id found.
        found: Option<u32>,
    },
    /// A published port or an unmasqueraded address has no nftables entry.
    Nat {
        /// Entry.
        entry: NatEntry,
    },
}

impl EndpointProblem {
    /// Repairer.
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
            // A smaller MTU is harmless above IPv6's minimum; packets of a larger one are lost.
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

    /// True for problems of programs or maps, false for links, addresses or routes.
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

    /// True when the namespace or a side of the link is gone or replaced, which no regeneration repairs.
    #[must_use]
    pub fn is_of_a_lost_link(&self) -> bool {
        matches!(
            self,
            Self::Netns { .. } | Self::LinkMissing { .. } | Self::LinkDeleted { .. } | Self::LinkReplaced { .. }
        )
    }
}

/// Merges problems with one cause: a link without both sides was deleted together with its routes.
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
