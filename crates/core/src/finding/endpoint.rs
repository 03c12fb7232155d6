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

/// An end of an endpoint's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// Containers cannot change it.
    Node,
    /// A container with `CAP_NET_ADMIN` can change it.
    Container,
}

/// The route found where the node's route to the endpoint should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteSeen {
    /// Wharf's: over this interface, or unreachable if `None`.
    Ours(Option<String>),
    /// Another program's, over this interface.
    Foreign(Option<String>),
    /// Wharf's, with another source for the node's own packets.
    OtherSource { expected: IpAddr, found: Option<IpAddr> },
}

/// A look-up without the endpoint's route.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lookup {
    pub destination: IpNet,
    pub table: u32,
    /// None for no or several.
    pub ifname: Option<String>,
    pub gateway: Option<IpAddr>,
}

/// Kernel and endpoint record differ.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointProblem {
    /// The network namespace is gone, or its path has another one.
    Netns {
        path: String,
        /// State of the path.
        cause: String,
    },
    /// A side moved to another network namespace.
    LinkMissing {
        side: Side,
        name: String,
    },
    /// The link was deleted; its network namespace exists.
    LinkDeleted {
        /// Container side.
        name: String,
    },
    /// A side was renamed.
    LinkRenamed {
        side: Side,
        /// Expected.
        name: String,
        found: String,
    },
    /// Another interface has a side's name.
    LinkReplaced {
        side: Side,
        name: String,
        expected: IfIndex,
        found: IfIndex,
    },
    /// A side is down.
    LinkDown {
        side: Side,
        name: String,
    },
    /// A side has another MAC.
    LinkMac {
        side: Side,
        name: String,
        expected: MacAddr,
        found: Option<MacAddr>,
    },
    /// A side has another MTU.
    LinkMtu {
        side: Side,
        name: String,
        /// Bytes.
        expected: u32,
        /// Bytes.
        found: u32,
    },
    /// ARP is on at the host side, whose programs do not answer the node's requests, or off in the container.
    LinkArp {
        side: Side,
        name: String,
    },
    /// The host side is a port of a bridge, bond or VRF, which receives the container's packets to the node.
    LinkEnslaved {
        name: String,
        /// Upper device.
        master: String,
    },
    /// A side of another plugin's link is down or has another MAC.
    PluginLink {
        side: Side,
        name: String,
        /// Expected and found state.
        what: String,
    },
    /// The host side has a rate-limiting queue (CNI's `bandwidth` plugin), which local packets bypass.
    LinkQueue {
        name: String,
        kind: String,
    },
    /// The host side lacks its mark.
    LinkAlias {
        name: String,
        expected: String,
        found: Option<String>,
    },
    /// An address in the container is missing or differs in prefix length.
    Address {
        address: IpAddr,
        /// Prefix length; none when missing.
        found: Option<u8>,
    },
    /// The node's route to an address is missing or replaced.
    NodeRoute {
        /// Destination.
        to: IpNet,
        expected: String,
        /// Instead, if any.
        found: Option<RouteSeen>,
    },
    /// A rule or a preferred route overrides the main table.
    NodeRouteShadowed {
        /// Destination.
        to: IpNet,
        expected: String,
        /// None when the look-up fails.
        found: Option<Lookup>,
    },
    /// A route in the container is missing.
    ContainerRoute {
        /// Destination.
        to: IpNet,
        gateway: IpAddr,
        /// None for main.
        table: Option<u32>,
    },
    /// A rule in the container is missing.
    ContainerRule {
        /// Source.
        from: IpAddr,
        table: u32,
    },
    /// A program is not on its hook.
    Program {
        program: String,
        /// Host side.
        ifname: String,
        mode: AttachMode,
        /// Expected id.
        expected: u32,
        /// Ids.
        found: Vec<u32>,
    },
    /// The sink is still on the hook.
    Sink {
        /// Replaced program.
        program: String,
        /// Program id.
        id: u32,
    },
    /// A clsact filter remains in tcx mode.
    StrayFilter {
        /// On this hook.
        program: String,
        /// Id found in the kernel.
        id: u32,
    },
    /// A tcx link remains in clsact mode.
    StrayLink {
        /// Pin.
        path: String,
    },
    PinMissing {
        name: String,
    },
    /// All pins are missing.
    PinsMissing,
    /// The pinned link has another program.
    PinStale {
        name: String,
        /// Expected id.
        expected: u32,
        /// Id found in the kernel.
        found: u32,
    },
    /// The programs do not use the pinned map.
    MapUnused {
        map: String,
        /// Id found in the kernel.
        pinned: u32,
        /// Ids.
        used: Vec<u32>,
    },
    MapUnreadable {
        map: String,
        cause: String,
    },
    /// A configuration field differs.
    Config {
        field: &'static str,
        expected: String,
        found: String,
    },
    /// The endpoint-table row is missing or differs.
    Row {
        address: IpAddr,
        /// None when missing.
        found: Option<String>,
    },
    /// The program-array slot is empty or differs.
    CallSlot {
        /// Expected id, if known.
        expected: Option<u32>,
        /// Id found in the kernel.
        found: Option<u32>,
    },
    /// An nftables entry is missing.
    Nat {
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
            // Harmless above IPv6's minimum; packets of a larger MTU are lost.
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

    /// Programs or maps, not links, addresses or routes.
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

    /// No regeneration repairs it.
    #[must_use]
    pub fn is_of_a_lost_link(&self) -> bool {
        matches!(
            self,
            Self::Netns { .. } | Self::LinkMissing { .. } | Self::LinkDeleted { .. } | Self::LinkReplaced { .. }
        )
    }
}

/// A link without both sides was deleted together with its routes.
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
