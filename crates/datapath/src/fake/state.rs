//! The fake kernel's state.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use wharf_core::{
    endpoint::NetnsRef,
    finding::NodeProblem,
    flow::{Flow, FlowUsage},
    ids::{EndpointId, Epoch, IfIndex, IfName, MacAddr},
    kernel::{
        AttachMode, ConfigSpec, CounterRow, DeviceMode, EndpointTableRow, KernelFeatures, MissingRoute, NodeSpec,
        ProgramSpec,
    },
    mtu::Uplink,
    nat::{Masquerade, NatEntry},
    overlap::NodeNetwork,
};

use super::{peers::Peers, policy::Policy};

pub(super) fn features() -> KernelFeatures {
    KernelFeatures {
        release: "6.12.0-fake".to_owned(),
        attach_mode: AttachMode::Tcx,
        device_mode: DeviceMode::Veth,
        tcx: true,
        netkit: false,
        redirect_peer: true,
        btf: true,
        netns_cookie: true,
        conntrack: true,
    }
}

pub(super) fn host_net(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

#[derive(Debug, Clone)]
pub(super) struct Inside {
    pub(super) ifindex: IfIndex,
    /// `None` for a foreign interface.
    pub(super) host: Option<IfName>,
    pub(super) up: bool,
    pub(super) addresses: BTreeSet<IpAddr>,
}

#[derive(Debug, Clone)]
pub(super) struct Namespace {
    pub(super) identity: NetnsRef,
    pub(super) interfaces: BTreeMap<String, Inside>,
}

#[derive(Debug, Clone)]
pub(super) struct HostSide {
    pub(super) ifindex: IfIndex,
    pub(super) container_ifindex: IfIndex,
    pub(super) container_ifname: IfName,
    pub(super) inode: u64,
    pub(super) container_mac: MacAddr,
    pub(super) host_mac: MacAddr,
    pub(super) mtu: u32,
    pub(super) alias: Option<String>,
    pub(super) up: bool,
    /// The kernel resolves neighbours on it.
    pub(super) arp: bool,
    pub(super) container_mtu: u32,
    pub(super) attached: Option<Hook>,
    pub(super) attached_by: Option<(EndpointId, Epoch)>,
    pub(super) plugin: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    Programs(u32),
    Sink,
}

/// A link change by another program.
#[derive(Debug, Clone)]
pub enum LinkChange {
    /// Host side: another MAC.
    HostMac(MacAddr),
    /// The kernel resolves neighbours.
    HostArp,
    /// Host side: another MTU.
    HostMtu(u32),
    /// Host side: down.
    HostDown,
    /// Container's side: another MAC.
    ContainerMac(MacAddr),
    /// Container's side: another MTU.
    ContainerMtu(u32),
    /// Container's side: down.
    ContainerDown,
    /// Container's side: another name.
    ContainerRenamed(String),
}

#[derive(Debug, Clone)]
pub(super) struct Pinned {
    pub(super) spec: ProgramSpec,
    pub(super) program_ids: [u32; 3],
    pub(super) map_ids: [u32; 3],
    pub(super) config: Option<ConfigSpec>,
    pub(super) counters: Vec<CounterRow>,
    pub(super) links: bool,
}

impl Pinned {
    pub(super) fn is_of(&self, spec: &ProgramSpec) -> bool {
        ProgramSpec { keep: self.spec.keep, ..spec.clone() } == self.spec
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) namespaces: BTreeMap<PathBuf, Namespace>,
    pub(super) plain_files: HashSet<PathBuf>,
    pub(super) links: BTreeMap<String, HostSide>,
    pub(super) pins: BTreeMap<EndpointId, Pinned>,
    pub(super) rows: BTreeMap<IpAddr, EndpointTableRow>,
    pub(super) calls: BTreeMap<EndpointId, u32>,
    pub(super) routes: BTreeMap<IpNet, Option<IfIndex>>,
    pub(super) node: Option<NodeSpec>,
    pub(super) peers: Peers,
    pub(super) missing_routes: Vec<MissingRoute>,
    /// Except the router's.
    pub(super) node_addresses: BTreeSet<IpAddr>,
    pub(super) masquerade: Option<Masquerade>,
    pub(super) nat: BTreeSet<NatEntry>,
    /// By endpoints.
    pub(super) published: BTreeSet<NatEntry>,
    pub(super) held: BTreeSet<u16>,
    pub(super) broken: Vec<NodeProblem>,
    pub(super) networks: Vec<NodeNetwork>,
    pub(super) uplinks: Vec<Uplink>,
    pub(super) connections: Vec<(IpAddr, IpAddr)>,
    pub(super) flows: Vec<Flow>,
    pub(super) flow_usage: FlowUsage,
    pub(super) policy: Policy,
    next_id: u32,
}

impl State {
    pub(super) fn stray_nat(&self) -> Vec<NatEntry> {
        self.nat.difference(&self.published).copied().collect()
    }

    /// Inode, index, program or map id.
    pub(super) fn fresh(&mut self) -> u32 {
        self.next_id += 1;
        1000 + self.next_id
    }

    pub(super) fn add_netns(&mut self, path: PathBuf) -> NetnsRef {
        let n = u64::from(self.fresh());
        let identity = NetnsRef { path: path.clone(), dev: 4, inode: 4_026_532_000 + n, cookie: 1 + n };
        self.namespaces.insert(path, Namespace { identity: identity.clone(), interfaces: BTreeMap::new() });
        identity
    }

    pub(super) fn remove_netns(&mut self, path: &Path) {
        let Some(gone) = self.namespaces.remove(path) else { return };
        let hosts: Vec<String> =
            self.links.iter().filter(|(_, l)| l.inode == gone.identity.inode).map(|(n, _)| n.clone()).collect();
        for host in hosts {
            self.remove_link_named(&host);
        }
    }

    pub(super) fn add_foreign_interface(&mut self, netns: &Path, ifname: &str) -> bool {
        let ifindex = IfIndex(self.fresh());
        let Some(ns) = self.namespaces.get_mut(netns) else { return false };
        let inside = Inside { ifindex, host: None, up: true, addresses: BTreeSet::new() };
        ns.interfaces.insert(ifname.to_owned(), inside);
        true
    }

    pub(super) fn add_plugin_link(
        &mut self,
        netns: &Path,
        ifname: IfName,
        host_ifname: IfName,
        addresses: BTreeSet<IpAddr>,
    ) -> bool {
        let (host_ifindex, container_ifindex) = (IfIndex(self.fresh()), IfIndex(self.fresh()));
        let [.., a, b] = host_ifindex.0.to_be_bytes();
        let Some(ns) = self.namespaces.get_mut(netns) else { return false };
        let inside = Inside { ifindex: container_ifindex, host: Some(host_ifname.clone()), up: true, addresses };
        ns.interfaces.insert(ifname.to_string(), inside);
        let link = HostSide {
            ifindex: host_ifindex,
            container_ifindex,
            container_ifname: ifname,
            inode: ns.identity.inode,
            container_mac: MacAddr([2, 0xcc, 0, 1, a, b]),
            host_mac: MacAddr([2, 0xcc, 0, 2, a, b]),
            mtu: 1500,
            alias: None,
            up: true,
            arp: true,
            container_mtu: 1500,
            attached: None,
            attached_by: None,
            plugin: true,
        };
        self.links.insert(host_ifname.to_string(), link);
        true
    }

    /// `None` if the path leads elsewhere.
    pub(super) fn netns_mut(&mut self, wanted: &NetnsRef) -> Option<&mut Namespace> {
        self.namespaces.get_mut(&wanted.path).filter(|ns| ns.identity.same(wanted))
    }

    pub(super) fn netns(&self, wanted: &NetnsRef) -> Option<&Namespace> {
        self.namespaces.get(&wanted.path).filter(|ns| ns.identity.same(wanted))
    }

    pub(super) fn change_link(&mut self, host_ifname: &str, change: LinkChange) -> bool {
        let Some(link) = self.links.get_mut(host_ifname) else { return false };
        let inode = link.inode;
        let mut inside =
            self.namespaces.values_mut().filter(|ns| ns.identity.inode == inode).map(|ns| &mut ns.interfaces);
        let name = link.container_ifname.as_str();
        match change {
            LinkChange::HostMac(mac) => link.host_mac = mac,
            LinkChange::HostArp => link.arp = true,
            LinkChange::HostMtu(mtu) => link.mtu = mtu,
            LinkChange::HostDown => link.up = false,
            LinkChange::ContainerMac(mac) => link.container_mac = mac,
            LinkChange::ContainerMtu(mtu) => link.container_mtu = mtu,
            LinkChange::ContainerDown => {
                inside.filter_map(|interfaces| interfaces.get_mut(name)).for_each(|i| i.up = false);
            }
            LinkChange::ContainerRenamed(new) => {
                let Some(interfaces) = inside.next() else { return false };
                let Some(moved) = interfaces.remove(name) else { return false };
                interfaces.insert(new, moved);
            }
        }
        true
    }

    pub(super) fn remove_link_named(&mut self, host_ifname: &str) -> bool {
        let Some(link) = self.links.remove(host_ifname) else { return false };
        self.routes.retain(|_, via| *via != Some(link.ifindex));
        for ns in self.namespaces.values_mut().filter(|ns| ns.identity.inode == link.inode) {
            ns.interfaces.retain(|_, i| i.ifindex != link.container_ifindex);
        }
        true
    }

    pub(super) fn set_counters(&mut self, id: EndpointId, rows: Vec<CounterRow>) -> bool {
        match self.pins.get_mut(&id) {
            Some(pinned) => {
                pinned.counters = rows;
                true
            }
            None => false,
        }
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = (&EndpointId, &ConfigSpec)> {
        let configs = self.pins.iter().filter_map(|(id, p)| Some((id, p.config.as_ref()?)));
        configs.filter(|(_, config)| !config.sources.is_empty())
    }

    pub(super) fn config_epoch(&self, id: EndpointId) -> Option<Epoch> {
        self.pins.get(&id).and_then(|p| p.config.as_ref()).map(|c| c.epoch)
    }

    pub(super) fn is_clean(&self) -> bool {
        // The sink stays on another plugin's link.
        self.links.values().all(|l| l.plugin && !matches!(l.attached, Some(Hook::Programs(_))))
            && self.pins.is_empty()
            && self.rows.is_empty()
            && self.calls.is_empty()
            && self.routes.values().all(Option::is_none)
    }
}
