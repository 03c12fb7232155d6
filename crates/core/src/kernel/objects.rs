//! Arguments and results of the kernel interface.

use std::{
    fmt,
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Result;
use crate::{
    bandwidth::Bandwidth,
    endpoint::{EndpointRecord, HooksFound, LinkOwner, NetnsRef},
    finding::NodeProblem,
    identity::Identity,
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName, MacAddr},
    nat::{Masquerade, NatEntry},
    sources::SourcePrefixes,
};

/// Bytes (RFC 8200, section 5): below it Linux removes the IPv6 addresses.
pub const MIN_MTU: u32 = 1_280;

/// How programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMode {
    /// Linux 6.6: pinned, atomic link update.
    Tcx,
    /// Replaced in place by netlink.
    Clsact,
}

impl fmt::Display for AttachMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// Kind of an endpoint's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceMode {
    #[default]
    Veth,
    /// In L2 mode with MAC addresses: Linux 6.10.
    Netkit,
}

impl fmt::Display for DeviceMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Veth => "veth",
            Self::Netkit => "netkit",
        })
    }
}

/// Kernel features, probed at start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeatures {
    /// `uname -r`.
    pub release: String,
    pub attach_mode: AttachMode,
    /// Of new links.
    pub device_mode: DeviceMode,
    pub tcx: bool,
    /// netkit devices.
    pub netkit: bool,
    /// `bpf_redirect_peer` (Linux 5.10).
    pub redirect_peer: bool,
    pub btf: bool,
    /// `SO_NETNS_COOKIE` (Linux 5.14).
    pub netns_cookie: bool,
    /// `nf_conntrack` is loaded, possibly after the probe.
    pub conntrack: bool,
}

/// Desired node objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// The endpoints' gateway, and the node's source toward them and by the overlay, whose device has it, too.
    pub router4: Option<Ipv4Addr>,
    /// As `router4`.
    pub router6: Option<Ipv6Addr>,
    /// Gateways of endpoints from before a change of the pools: the node keeps them beside the router addresses.
    pub former_routers: Vec<IpAddr>,
    /// Each has an unreachable route; endpoint routes are longer.
    pub cidrs: Vec<IpNet>,
    /// To containers of other nodes.
    pub peers: Vec<PeerRoute>,
    /// `None`: no route of `peers` uses the overlay.
    pub overlay: Option<OverlaySpec>,
    /// Router interface, bytes.
    pub mtu: u32,
    /// `None` leaves the node's firewall and forwarding unchanged.
    pub masquerade: Option<Masquerade>,
    /// The node's stack forwards packets between endpoints.
    pub local_by_stack: bool,
    /// The node answers for endpoints on links in whose network a pool is.
    pub announce: bool,
    /// Policy rules redirect flows to the proxy.
    pub redirects: bool,
}

impl NodeSpec {
    /// The router addresses, IPv4 first, then former ones.
    #[must_use]
    pub fn routers(&self) -> Vec<IpAddr> {
        let now = self.router4.map(IpAddr::V4).into_iter().chain(self.router6.map(IpAddr::V6));
        now.chain(self.former_routers.iter().copied()).collect()
    }

    /// Reports an MTU that is too small for IPv6 in the overlay over IPv6: there the kernel does not fragment packets.
    #[must_use]
    pub fn overlay_mtu_problem(&self) -> Option<NodeProblem> {
        let is_over_ipv6 = |peer: &PeerRoute| matches!(peer.via, NextHop::Overlay { remote, .. } if remote.is_ipv6());
        let (mtu, overhead) = (self.mtu, OverlaySpec::overhead(true));
        let least = MIN_MTU + overhead;
        if self.overlay.is_none() || mtu >= least || !self.peers.iter().any(is_over_ipv6) {
            return None;
        }
        let cause = format!(
            "the network between the nodes carries {mtu} bytes (MTU of `wharf status`), and the overlay over IPv6 \
             needs {least}: IPv6 packets of containers above {} bytes are lost; raise the MTU of the uplinks, set \
             --mtu if the network carries more, or list IPv4 addresses of the nodes first",
            mtu.saturating_sub(overhead)
        );
        // Not of the device: its routes are in force.
        Some(NodeProblem::Outbound { what: "overlay".to_owned(), cause, repairable: false })
    }
}

/// A route to containers of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerRoute {
    /// Their network.
    pub to: IpNet,
    /// The way to the other node.
    pub via: NextHop,
}

/// A route to containers of another node that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRoute {
    /// Their network.
    pub to: IpNet,
    pub why: Arc<str>,
}

/// The way to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NextHop {
    /// Its address, in a network of this node's links, of the destination's family.
    Direct(IpAddr),
    /// Packets are encapsulated in UDP (VXLAN, RFC 7348). Both families are carried by either.
    Overlay {
        /// An address of the other node.
        remote: IpAddr,
        /// This node's address of that family; `None` leaves the choice to the kernel.
        local: Option<IpAddr>,
    },
}

impl fmt::Display for NextHop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct(address) => write!(f, "via {address}"),
            Self::Overlay { remote, local: None } => write!(f, "overlay to {remote}"),
            Self::Overlay { remote, local: Some(local) } => write!(f, "overlay to {remote} from {local}"),
        }
    }
}

/// The overlay's device, and the nodes whose frames it accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlaySpec {
    /// VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// UDP port, of all nodes.
    pub port: u16,
    /// Of interface and routes, bytes ([`OverlaySpec::mtu_within`]).
    pub mtu: u32,
    /// The other nodes. No two have an address or overlapping networks in common.
    pub nodes: Vec<OverlayNode>,
}

impl OverlaySpec {
    /// VXLAN, UDP and Ethernet headers, without the outer IP header, bytes.
    const HEADERS: u32 = 8 + 8 + 14;

    const fn overhead(over_ipv6: bool) -> u32 {
        Self::HEADERS + if over_ipv6 { 40 } else { 20 }
    }

    /// What remains of the MTU between the nodes, bytes. At least what IPv6 needs: over IPv4, a longer packet is then
    /// sent in fragments; over IPv6, see [`NodeSpec::overlay_mtu_problem`]. One value for all nodes, because the kernel
    /// forwards IPv6 by the interface's MTU, not the route's.
    #[must_use]
    pub const fn mtu_within(underlay: u32, over_ipv6: bool) -> u32 {
        let mtu = underlay.saturating_sub(Self::overhead(over_ipv6));
        if mtu < MIN_MTU { MIN_MTU } else { mtu }
    }
}

/// State of the overlay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OverlayView {
    /// Why the last attempt to make it failed.
    pub failure: Option<String>,
    /// Frames that its filter dropped since the agent's start.
    pub drops: Vec<CounterRow>,
}

/// Another node, as the overlay knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayNode {
    /// Unique.
    pub name: String,
    /// Outer sources of its frames; inner ones too.
    pub addresses: Vec<IpAddr>,
    /// Inner sources.
    pub cidrs: Vec<IpNet>,
}

/// State of the node's NAT and forwarding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NatView {
    /// Differences.
    pub problems: Vec<NodeProblem>,
    /// Wharf will restore these sysctls.
    pub changed: Vec<String>,
    /// They may refuse forwarded packets of containers.
    pub foreign: Vec<ForeignChain>,
    /// `None` without conntrack.
    pub tracked: Option<Tracked>,
}

/// A foreign chain that may refuse packets of containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignChain {
    /// `family table chain`.
    pub name: String,
    /// Pools with refused packets: sent, replies, or to published ports.
    pub refused: Vec<IpNet>,
    /// The verdict depends on the packet, or on rules that the agent cannot evaluate.
    pub unclear: bool,
}

/// Conntrack usage in the node's namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracked {
    /// Connections.
    pub entries: u64,
    /// `net.netfilter.nf_conntrack_max`: above it, new connections are dropped.
    pub limit: u64,
}

impl Tracked {
    /// Percent; connections may double in seconds.
    const WARN_PERCENT: u64 = 80;

    /// A limit of 0 means none.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.entries.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// Desired programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramSpec {
    /// A program constant, and the pin directory's name.
    pub id: EndpointId,
    /// Program constant.
    pub container_mac: MacAddr,
    /// Program constant.
    pub host_mac: MacAddr,
    /// Debug records (feature `debug-log`).
    pub debug: bool,
    /// Keep pinned programs with equal instructions, constants and maps, unless they have debug records.
    pub keep: bool,
}

/// Loaded programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// Kernel ids of `from_container`, `to_container`, `deliver`.
    pub program_ids: [u32; 3],
    /// Kernel ids of `CONFIG`, `METRICS` and `BANDWIDTH`.
    pub map_ids: [u32; 3],
}

/// Desired link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// For messages.
    pub id: EndpointId,
    /// For messages.
    pub epoch: Epoch,
    /// With id and epoch, the owner's mark.
    pub attachment: Attachment,
    /// Host side.
    pub host_ifname: IfName,
    /// Of the container.
    pub netns: NetnsRef,
    /// Container side.
    pub ifname: IfName,
    /// Container side.
    pub container_mac: MacAddr,
    /// Host side.
    pub host_mac: MacAddr,
    /// Both sides, bytes: 68 to 65535, with IPv6 at least 1280.
    pub mtu: u32,
}

/// An existing pair of interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// In the node's namespace.
    pub host_ifindex: IfIndex,
    /// In the container's namespace.
    pub container_ifindex: IfIndex,
}

/// Another plugin's interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginLink {
    /// Both indexes.
    pub link: Link,
    /// Host side.
    pub host_ifname: IfName,
    /// Host side.
    pub host_mac: MacAddr,
    /// Container side.
    pub container_mac: MacAddr,
    /// Container side, bytes.
    pub mtu: u32,
    /// Container side.
    pub addresses: Vec<IpAddr>,
    /// Host side's hooks.
    pub hooks: HooksFound,
}

/// A configuration row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSpec {
    pub epoch: Epoch,
    /// Host side.
    pub host_ifindex: IfIndex,
    pub identity: Identity,
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    /// IPv4 gateway.
    pub gateway4: Option<Ipv4Addr>,
    /// IPv6 gateway.
    pub gateway6: Option<Ipv6Addr>,
    /// It may send and receive.
    pub live: bool,
    /// Trace forwarded packets.
    pub trace: bool,
    /// Packets to local endpoints use the stack.
    pub local_by_stack: bool,
    /// Another plugin made the link.
    pub chained: bool,
    /// Bandwidth limits.
    pub bandwidth: Bandwidth,
    /// Sources besides its addresses.
    pub sources: SourcePrefixes,
}

/// Unambiguous. Destructive operations first check id, epoch and name or mark. Another plugin's link is found by name
/// and index; Wharf's attachments on it carry id and epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkRef {
    pub id: EndpointId,
    pub epoch: Epoch,
    /// Contains id and epoch.
    pub host_ifname: IfName,
    /// If known.
    pub host_ifindex: Option<IfIndex>,
    /// For removal when the host side left the node.
    pub container: Option<ContainerSide>,
    #[serde(default, skip_serializing_if = "LinkOwner::is_wharf")]
    pub owner: LinkOwner,
}

/// The container's side.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerSide {
    /// Of the container.
    pub netns: NetnsRef,
    /// Index there.
    pub ifindex: IfIndex,
    /// Original.
    pub mac: MacAddr,
}

impl LinkRef {
    /// From a record.
    #[must_use]
    pub fn of(record: &EndpointRecord) -> Self {
        let known = |ifindex: IfIndex| (ifindex.0 != 0).then_some(ifindex);
        let container = known(record.container_ifindex).map(|ifindex| ContainerSide {
            netns: record.netns.clone(),
            ifindex,
            mac: record.container_mac,
        });
        Self {
            id: record.id,
            epoch: record.epoch,
            host_ifname: record.host_ifname.clone(),
            host_ifindex: known(record.host_ifindex),
            container: container.filter(|_| record.link_owner.is_wharf()),
            owner: record.link_owner,
        }
    }
}

/// Result of an attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attached {
    /// New attachment.
    New,
    /// Atomic replacement.
    Replaced,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CounterRow {
    /// `ingress` or `egress`.
    pub direction: String,
    pub reason: String,
    pub packets: u64,
    pub bytes: u64,
}

/// A BPF map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapInfo {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG`.
    pub name: String,
    /// Kernel's map type.
    pub kind: String,
    /// If countable.
    pub entries: Option<u64>,
    /// Rows, or bytes of a ring buffer.
    pub max_entries: u64,
    pub memlock_bytes: u64,
}

/// A route with Wharf's protocol number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RouteRow {
    pub destination: IpNet,
    /// None for an unreachable route.
    pub ifindex: Option<IfIndex>,
}

/// A link with Wharf's name and kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LinkRow {
    pub name: String,
    pub ifindex: IfIndex,
    /// The owner's mark on Wharf's links.
    pub alias: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointTableRow {
    pub address: IpAddr,
    /// Untrusted until matched.
    pub endpoint_id: u32,
    /// Program-array slot for direct delivery; 0 for none.
    pub direct: u32,
    pub epoch: Epoch,
    /// Host side.
    pub ifindex: IfIndex,
    pub identity: u32,
    /// Container side.
    pub mac: MacAddr,
}

/// Wharf's objects, for restore and audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelDump {
    /// Host sides of links.
    pub links: Vec<LinkRow>,
    /// Routes with Wharf's protocol number.
    pub routes: Vec<RouteRow>,
    pub endpoint_rows: Vec<EndpointTableRow>,
    /// By endpoint id.
    pub pins: Vec<(String, Vec<String>)>,
    /// Reported, never touched.
    pub foreign_pins: Vec<PathBuf>,
    /// No endpoint wrote them since the agent's start, or it removed them.
    pub nat: Vec<NatEntry>,
}

/// Completes when the kernel has released a link.
///
/// # Errors
/// Repeat the removal.
pub type LinkRelease = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_is_too_small_for_the_overlay_over_ipv6_is_named() {
        let problem = |remote: &str, mtu: u32, is_used: bool| {
            let via = NextHop::Overlay { remote: remote.parse().expect("an address"), local: None };
            let mtu_of_overlay = OverlaySpec::mtu_within(mtu, remote.contains(':'));
            let overlay = OverlaySpec { vni: 88, port: 4789, mtu: mtu_of_overlay, nodes: Vec::new() };
            let spec = NodeSpec {
                router4: None,
                router6: None,
                former_routers: Vec::new(),
                cidrs: Vec::new(),
                peers: vec![PeerRoute { to: "10.2.0.0/16".parse().expect("a network"), via }],
                overlay: is_used.then_some(overlay),
                mtu,
                masquerade: None,
                local_by_stack: false,
                announce: false,
                redirects: false,
            };
            spec.overlay_mtu_problem()
        };
        assert_eq!(problem("2001:db8::2", 1_350, true), None);
        assert_eq!(problem("192.0.2.2", 1_280, true), None, "sent in fragments");
        assert_eq!(problem("2001:db8::2", 1_349, false), None);
        let Some(NodeProblem::Outbound { cause, repairable: false, .. }) = problem("2001:db8::2", 1_349, true) else {
            panic!("it is not named");
        };
        for part in ["carries 1349 bytes", "needs 1350", "above 1279 bytes are lost", "raise the MTU"] {
            assert!(cause.contains(part), "{part} is missing in: {cause}");
        }
        assert_eq!([1_349, 1_400].map(|mtu| OverlaySpec::mtu_within(mtu, true)), [MIN_MTU, 1_330]);
    }
}
