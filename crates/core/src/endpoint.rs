//! The stored facts of an endpoint.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

pub use wharf_names::link::{host_ifname, parse_host_ifname};

use crate::{
    bandwidth::Bandwidth,
    identity::{Identity, Label},
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName, MacAddr, PoolName, PortName, RuntimeName},
    nat::{NatEntry, PortMapping, Publish},
    policy::{NamedPort, OwnEnforcement},
};

/// Most routes of one container.
pub const MAX_ROUTES: usize = 64;

/// A network namespace, known by what the kernel says of it and not by its path: a path may be reused by another
/// container, an inode of nsfs is unique while the namespace lives, and the cookie is never reused in a boot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsRef {
    /// Where the runtime said it is; used to open it, never to compare it.
    pub path: PathBuf,
    /// Device of the nsfs inode.
    pub dev: u64,
    /// Inode on nsfs.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14), 0 where the kernel has none.
    pub cookie: u64,
}

impl NetnsRef {
    /// Same namespace, whatever the paths.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        self.dev == other.dev && self.inode == other.inode && self.cookie == other.cookie
    }
}

/// Who gives the endpoint's addresses back when it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IpOwner {
    /// The agent leased them with the endpoint and releases them with it.
    Endpoint,
    /// The caller leased them before (`POST /v1/ipam`) and will release them: the delete runs with NoIPRelease.
    Caller,
    /// Another IPAM leased them, outside of the pools. They are never leased, released or rested here.
    External,
}

/// Whose an endpoint's link is: who made it, connected it, and removes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkOwner {
    /// Wharf's, with a name and a mark of Wharf's.
    #[default]
    Wharf,
    /// Another plugin's, behind which Wharf is chained. Wharf has its programs on the host side and changes nothing else of the link.
    Plugin {
        /// What the host side had on its hooks before Wharf came.
        hooks: HooksFound,
    },
}

/// What is on the hooks of another plugin's link before Wharf attaches its programs, and when it has taken them off again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HooksFound {
    /// No clsact qdisc.
    None,
    /// A clsact qdisc without anything of ours.
    Clsact,
    /// What an endpoint before left there, as a rule the program that drops everything. The link stays closed.
    Closed,
}

impl LinkOwner {
    /// True for a link of Wharf's own.
    #[must_use]
    pub const fn is_wharf(&self) -> bool {
        matches!(self, Self::Wharf)
    }
}

/// Everything about an endpoint that must survive the agent. Written when a create completes, removed when a delete
/// does, in one transaction with its leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointRecord {
    /// Endpoint id.
    pub id: EndpointId,
    /// Epoch of this attachment.
    pub epoch: Epoch,
    /// CNI key.
    pub attachment: Attachment,
    /// The container's network namespace.
    pub netns: NetnsRef,
    /// Pool its addresses come from.
    pub pool: PoolName,
    /// Who owns the addresses.
    pub ip_owner: IpOwner,
    /// IPv4 address, when it has one.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, when it has one.
    pub ipv6: Option<Ipv6Addr>,
    /// Gateway the container's IPv4 default route names.
    pub gateway4: Option<Ipv4Addr>,
    /// Gateway the container's IPv6 default route names.
    pub gateway6: Option<Ipv6Addr>,
    /// Name of the host side of the veth pair.
    pub host_ifname: IfName,
    /// Index of the host side in the node's namespace.
    pub host_ifindex: IfIndex,
    /// Index of the container side in the container's namespace.
    pub container_ifindex: IfIndex,
    /// MAC of the container side.
    pub container_mac: MacAddr,
    /// MAC of the host side.
    pub host_mac: MacAddr,
    /// MTU of both sides, bytes.
    pub mtu: u32,
    /// The creator asked for no MTU: `mtu` is the agent's default and follows it. Records of older versions do not say, and
    /// keep their MTU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mtu_follows: bool,
    /// A smaller MTU that the container gave its own side, bytes. The side has it again where the link's MTU allows it. Kept
    /// when the link's MTU changes; records of older versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_mtu: Option<u32>,
    /// Security labels, sorted.
    pub labels: BTreeSet<Label>,
    /// The number that stands for the security-relevant ones among `labels`.
    pub identity: Identity,
    /// Pod name, when a kubelet is the client.
    pub pod_name: Option<String>,
    /// Pod namespace.
    pub pod_namespace: Option<String>,
    /// The container runtime that added it. Records of older versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeName>,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Published ports. Records of older versions have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<Publish>,
    /// Whether what it sends to other networks takes an address of the node; as the pool has it when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Limits of its bandwidth. Records of older versions have none.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Enforcement of policy in place of the node's mode; records of older versions follow the mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_enforcement: Option<OwnEnforcement>,
    /// Ports that rules of policies name, at most [`crate::policy::MAX_NAMED_PORTS`]. Records of older versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named_ports: BTreeMap<PortName, NamedPort>,
    /// Its labels are still to come; its identity is [`Identity::INIT`] until then. An older version takes the labels that are
    /// here for all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub awaits_labels: bool,
    /// Type of the CNI IPAM plugin that leased the addresses; only of [`IpOwner::External`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<String>,
    /// Destinations that the container reaches by its gateways, at most [`MAX_ROUTES`], in place of the default routes. Records
    /// of older versions have none, and older versions give the default routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<IpNet>>,
    /// Whose the link is. Records of older versions have links of Wharf's own. An older version never takes another plugin's link for its own: it
    /// cannot read a record whose addresses are [`IpOwner::External`], as they are with such a link, and leaves all that the record names alone.
    #[serde(default, skip_serializing_if = "LinkOwner::is_wharf")]
    pub link_owner: LinkOwner,
}

impl EndpointRecord {
    /// What the container's side gets when the link's MTU becomes `mtu`, from what the side has now; and the MTU that is the
    /// container's own choice.
    #[must_use]
    pub fn container_mtu_of(&self, now: u32, mtu: u32) -> (u32, Option<u32>) {
        let given = self.container_mtu.map_or(self.mtu, |own| own.min(self.mtu));
        let own = if now == given { self.container_mtu } else { Some(now).filter(|now| *now < self.mtu) };
        (own.map_or(mtu, |own| own.min(mtu)), own)
    }

    /// The gateway of an address's family.
    #[must_use]
    pub fn gateway_of(&self, address: IpAddr) -> Option<IpAddr> {
        match address {
            IpAddr::V4(_) => self.gateway4.map(IpAddr::V4),
            IpAddr::V6(_) => self.gateway6.map(IpAddr::V6),
        }
    }

    /// What the container reaches by the gateway of this family: everything, or its own routes.
    #[must_use]
    pub fn destinations(&self, ipv4: bool) -> Vec<IpNet> {
        let everything = if ipv4 { IpNet::V4(Ipv4Net::default()) } else { IpNet::V6(Ipv6Net::default()) };
        match &self.routes {
            Some(routes) => routes.iter().filter(|to| to.addr().is_ipv4() == ipv4).copied().collect(),
            None => vec![everything],
        }
    }

    /// Its addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// Its published ports, one mapping for each address that they lead to.
    #[must_use]
    pub fn mappings(&self) -> Vec<PortMapping> {
        self.ports.iter().flat_map(|port| self.addresses().filter_map(|ip| port.to(ip))).collect()
    }

    /// What the node's table has of it: published ports, and its addresses where it keeps them on the way out.
    #[must_use]
    pub fn nat_entries(&self) -> Vec<NatEntry> {
        // Only the pools' addresses are known to keep the source of what a container sends them: without an entry, an
        // external one would see the node, which its policy always lets in.
        let keeps = self.masquerade == Some(false) || self.ip_owner == IpOwner::External;
        let own = self.addresses().filter(|_| keeps).map(NatEntry::Own);
        self.mappings().into_iter().map(NatEntry::Port).chain(own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_the_optional_facts_is_that_of_an_older_version() {
        let record = crate::fixtures::record(1, 7);
        let text = serde_json::to_string(&record).expect("written");
        for fact in ["policy_enforcement", "named_ports", "awaits_labels", "runtime", "ipam", "routes", "link_owner"] {
            assert!(!text.contains(fact), "{text}");
        }
        assert_eq!(serde_json::from_str::<EndpointRecord>(&text).ok(), Some(record.clone()));
        let port = NamedPort { port: std::num::NonZeroU16::MIN, protocol: crate::nat::Protocol::Tcp };
        let named_ports = [(PortName::parse("http").expect("a name"), port)].into();
        let told = EndpointRecord {
            policy_enforcement: Some(OwnEnforcement::Never),
            named_ports,
            awaits_labels: true,
            runtime: RuntimeName::parse("crio").ok(),
            ip_owner: IpOwner::External,
            ipam: Some("host-local".to_owned()),
            routes: Some(Vec::new()),
            link_owner: LinkOwner::Plugin { hooks: HooksFound::Clsact },
            ..record
        };
        let text = serde_json::to_string(&told).expect("written");
        assert!(text.contains(r#""ip_owner":"external""#), "{text}");
        assert_eq!(serde_json::from_str::<EndpointRecord>(&text).ok(), Some(told));
    }

    #[test]
    fn routes_of_its_own_take_the_place_of_the_default_routes() {
        let mut record = crate::fixtures::record(1, 7);
        let shown = |record: &EndpointRecord| {
            [true, false].map(|ipv4| record.destinations(ipv4).iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(shown(&record), [["0.0.0.0/0"], ["::/0"]]);
        record.routes = Some(["10.2.0.0/16", "10.3.0.0/16"].map(|net| net.parse().expect("a network")).into());
        assert_eq!(shown(&record), [vec!["10.2.0.0/16", "10.3.0.0/16"], vec![]]);
        record.routes = Some(Vec::new());
        assert_eq!(shown(&record), [vec![""; 0], vec![]]);
    }

    #[test]
    fn nothing_sent_to_an_external_address_is_masqueraded() {
        let pooled = crate::fixtures::record(1, 7);
        assert_eq!(pooled.nat_entries(), []);
        let external = EndpointRecord { ip_owner: IpOwner::External, ..pooled };
        let own: Vec<NatEntry> = external.addresses().map(NatEntry::Own).collect();
        assert_eq!((external.nat_entries(), own.len()), (own, 2));
    }
}
