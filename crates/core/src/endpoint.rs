//! Stored facts of an endpoint.

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
    nat::{NatEntry, PortMapping, PublishedPort},
    policy::{Enforcement, NamedPort},
    sources::SourcePrefixes,
};

/// Per container.
pub const MAX_ROUTES: usize = 64;

const POD_UID: &str = "io.kubernetes.pod.uid";
/// Prefix of labels about the pod itself, which only the runtime sets: policy selects by the namespace.
const PER_POD: &str = "io.kubernetes.pod.";

/// A network namespace. Paths may be reused; an nsfs inode is unique while it lives, the cookie within a boot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsRef {
    /// From the runtime: opened, never compared.
    pub path: PathBuf,
    /// Device of the nsfs inode.
    pub dev: u64,
    /// nsfs inode.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14); 0 where unsupported.
    pub cookie: u64,
}

impl NetnsRef {
    /// Ignores the paths.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        self.dev == other.dev && self.inode == other.inode && self.cookie == other.cookie
    }
}

/// Owner of the addresses, who releases them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IpOwner {
    /// The agent, with the endpoint.
    Endpoint,
    /// The caller of `POST /v1/ipam`: deletes use NoIPRelease.
    Caller,
    /// Another IPAM, outside the pools; never leased, released or quarantined here.
    External,
}

/// Owner of the link: creates, connects and removes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkOwner {
    /// Its link has Wharf's name and mark.
    #[default]
    Wharf,
    /// Wharf only attaches programs to the host side.
    Plugin {
        /// Before Wharf attached.
        hooks: HooksFound,
    },
}

/// Hooks of another plugin's link, without Wharf's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HooksFound {
    /// No clsact qdisc.
    None,
    /// A clsact qdisc without Wharf's filters.
    Clsact,
    /// Filters of an earlier endpoint, usually the sink: the link stays closed.
    Closed,
}

impl LinkOwner {
    /// Wharf owns the link.
    #[must_use]
    pub const fn is_wharf(&self) -> bool {
        matches!(self, Self::Wharf)
    }
}

/// What an endpoint has from the row of its pod in the cluster feed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRow {
    /// Key of the row.
    pub uid: String,
    /// Of the row. In a record: without those whose key another label of the endpoint has.
    pub labels: BTreeSet<Label>,
    /// Of the row; two protocols may have the same name.
    pub named_ports: Vec<(PortName, NamedPort)>,
}

/// Durable state, in one transaction with its leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointRecord {
    pub id: EndpointId,
    pub epoch: Epoch,
    /// CNI key.
    pub attachment: Attachment,
    /// The container's network namespace.
    pub netns: NetnsRef,
    /// Pool of the addresses.
    pub pool: PoolName,
    /// Owner of the addresses.
    pub ip_owner: IpOwner,
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    /// Of the container's IPv4 default route.
    pub gateway4: Option<Ipv4Addr>,
    /// Of the container's IPv6 default route.
    pub gateway6: Option<Ipv6Addr>,
    /// Host side.
    pub host_ifname: IfName,
    /// Index in the node's namespace.
    pub host_ifindex: IfIndex,
    /// Index in the container's namespace.
    pub container_ifindex: IfIndex,
    /// Container side.
    pub container_mac: MacAddr,
    /// Host side.
    pub host_mac: MacAddr,
    /// Of both sides, bytes.
    pub mtu: u32,
    /// `mtu` follows the agent's default: the create request had none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mtu_follows: bool,
    /// Smaller MTU of the container, bytes; reapplied whenever the link's MTU allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_mtu: Option<u32>,
    /// Security labels, with those of `pod_row`.
    pub labels: BTreeSet<Label>,
    /// Of the security-relevant labels.
    pub identity: Identity,
    /// From a kubelet.
    pub pod_name: Option<String>,
    /// From a kubelet.
    pub pod_namespace: Option<String>,
    /// Runtime of the ADD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeName>,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PublishedPort>,
    /// Masquerade packets to other networks; none follows the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Bandwidth limits.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Sources besides its addresses. Older versions ignore them.
    #[serde(default, skip_serializing_if = "SourcePrefixes::is_empty")]
    pub sources: SourcePrefixes,
    /// Overrides the node's enforcement mode.
    #[serde(default, skip_serializing_if = "Enforcement::is_default")]
    pub policy_enforcement: Enforcement,
    /// At most [`crate::policy::MAX_NAMED_PORTS`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named_ports: BTreeMap<PortName, NamedPort>,
    /// The identity is [`Identity::INIT`] until the labels are known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub awaits_labels: bool,
    /// CNI IPAM plugin of [`IpOwner::External`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<String>,
    /// At most [`MAX_ROUTES`], instead of default routes, which older versions always set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<IpNet>>,
    /// An older version cannot parse another plugin's link and leaves its objects untouched.
    #[serde(default, skip_serializing_if = "LinkOwner::is_wharf")]
    pub link_owner: LinkOwner,
    /// From the cluster feed. An older version takes its labels for the endpoint's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_row: Option<PodRow>,
}

impl EndpointRecord {
    /// Container side's MTU for a link MTU of `mtu`, now `now`; and the container's choice.
    #[must_use]
    pub fn container_mtu_of(&self, now: u32, mtu: u32) -> (u32, Option<u32>) {
        let given = self.container_mtu.map_or(self.mtu, |own| own.min(self.mtu));
        let own = if now == given { self.container_mtu } else { Some(now).filter(|now| *now < self.mtu) };
        (own.map_or(mtu, |own| own.min(mtu)), own)
    }

    /// Uid that the runtime passed: of the pod's object, or the hash of a static pod's manifest.
    #[must_use]
    pub fn pod_uid(&self) -> Option<&str> {
        let label = self.labels.iter().find(|label| label.source == "k8s" && label.key == POD_UID)?;
        Some(&label.value)
    }

    /// Replaces the row's labels and named ports. An own label takes precedence over a row's label with the same key.
    pub fn set_pod_row(&mut self, mut row: PodRow) {
        if let Some(before) = self.pod_row.take() {
            self.labels.retain(|label| !before.labels.contains(label));
        }
        let own = &self.labels;
        let has = |label: &Label| own.iter().any(|own| (&own.source, &own.key) == (&label.source, &label.key));
        row.labels.retain(|label| !label.key.starts_with(PER_POD) && !has(label));
        self.labels.extend(row.labels.iter().cloned());
        self.awaits_labels = false;
        self.pod_row = Some(row);
    }

    /// Replaces the endpoint's own labels. Those of the row stay.
    pub fn set_own_labels(&mut self, labels: BTreeSet<Label>) {
        let row = self.pod_row.take();
        self.labels = labels;
        self.awaits_labels = false;
        if let Some(row) = row {
            self.labels.retain(|label| !row.labels.contains(label));
            self.set_pod_row(row);
        }
    }

    /// The endpoint's own ports, and those of the row with other names.
    pub fn all_named_ports(&self) -> impl Iterator<Item = (&PortName, &NamedPort)> {
        let of_row = self.pod_row.iter().flat_map(|row| &row.named_ports).map(|port| (&port.0, &port.1));
        of_row.filter(move |(name, _)| !self.named_ports.contains_key(*name)).chain(&self.named_ports)
    }

    /// Of the address's family.
    #[must_use]
    pub fn gateway_of(&self, address: IpAddr) -> Option<IpAddr> {
        match address {
            IpAddr::V4(_) => self.gateway4.map(IpAddr::V4),
            IpAddr::V6(_) => self.gateway6.map(IpAddr::V6),
        }
    }

    /// Destinations via this family's gateway.
    #[must_use]
    pub fn destinations(&self, ipv4: bool) -> Vec<IpNet> {
        let everything = if ipv4 { IpNet::V4(Ipv4Net::default()) } else { IpNet::V6(Ipv6Net::default()) };
        match &self.routes {
            Some(routes) => routes.iter().filter(|to| to.addr().is_ipv4() == ipv4).copied().collect(),
            None => vec![everything],
        }
    }

    /// IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// One per published port and address.
    #[must_use]
    pub fn mappings(&self) -> Vec<PortMapping> {
        self.ports.iter().flat_map(|port| self.addresses().filter_map(|ip| PortMapping::of(port, ip))).collect()
    }

    /// Published ports, and addresses that are not masqueraded.
    #[must_use]
    pub fn nat_entries(&self) -> Vec<NatEntry> {
        // Without an entry, an endpoint with an external address would see pool peers as the node, which policy always
        // allows.
        let keeps = self.masquerade == Some(false) || self.ip_owner == IpOwner::External;
        let own = self.addresses().filter(|_| keeps).map(NatEntry::Own);
        self.mappings().into_iter().map(NatEntry::Port).chain(own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nat::Protocol;

    #[test]
    fn a_record_without_the_optional_facts_is_that_of_an_older_version() {
        let record = crate::fixtures::record(1, 7);
        let text = serde_json::to_string(&record).expect("written");
        for fact in [
            "policy_enforcement",
            "named_ports",
            "awaits_labels",
            "runtime",
            "ipam",
            "routes",
            "link_owner",
            "sources",
            "pod_row",
        ] {
            assert!(!text.contains(fact), "{text}");
        }
        assert_eq!(serde_json::from_str::<EndpointRecord>(&text).ok(), Some(record.clone()));
        let port = NamedPort { port: std::num::NonZeroU16::MIN, protocol: Protocol::Tcp };
        let named_ports = [(PortName::parse("http").expect("a name"), port)].into();
        let told = EndpointRecord {
            policy_enforcement: Enforcement::Never,
            named_ports,
            awaits_labels: true,
            runtime: RuntimeName::parse("crio").ok(),
            ip_owner: IpOwner::External,
            ipam: Some("host-local".to_owned()),
            routes: Some(Vec::new()),
            link_owner: LinkOwner::Plugin { hooks: HooksFound::Clsact },
            sources: SourcePrefixes::new(vec!["10.200.0.0/16".parse().expect("a prefix")]).expect("prefixes"),
            pod_row: Some(row("web-0", &["k8s:app=web"], &[("dns", 53, Protocol::Udp)])),
            ..record
        };
        let text = serde_json::to_string(&told).expect("written");
        assert!(text.contains(r#""ip_owner":"external""#), "{text}");
        assert_eq!(serde_json::from_str::<EndpointRecord>(&text).ok(), Some(told));
    }

    fn labels(texts: &[&str]) -> BTreeSet<Label> {
        texts.iter().map(|text| text.parse().expect("a label")).collect()
    }

    fn named(port: u16, protocol: Protocol) -> NamedPort {
        NamedPort { port: port.try_into().expect("a port"), protocol }
    }

    fn row(uid: &str, of_row: &[&str], ports: &[(&str, u16, Protocol)]) -> PodRow {
        let port = |(name, number, protocol): &(&str, u16, Protocol)| {
            (PortName::parse(name).expect("a name"), named(*number, *protocol))
        };
        PodRow { uid: uid.to_owned(), labels: labels(of_row), named_ports: ports.iter().map(port).collect() }
    }

    #[test]
    fn labels_of_a_row_replace_those_of_the_row_before_and_own_labels_take_precedence() {
        let own = ["k8s:io.kubernetes.pod.namespace=shop", "k8s:io.kubernetes.pod.uid=u-1", "cni:app=net"];
        let with = |more: &[&str]| labels(&[&own[..], more].concat());
        let mut record = EndpointRecord { labels: with(&[]), awaits_labels: true, ..crate::fixtures::record(1, 7) };
        assert_eq!(record.pod_uid(), Some("u-1"));
        record.set_pod_row(row("u-1", &["k8s:app=web", "k8s:io.kubernetes.pod.namespace=other"], &[]));
        assert_eq!((record.labels.clone(), record.awaits_labels), (with(&["k8s:app=web"]), false));
        record.set_pod_row(row("u-1", &["k8s:app=db", "k8s:tier=back"], &[]));
        assert_eq!(record.labels, with(&["k8s:app=db", "k8s:tier=back"]));
        // A client changes a label of the row, removes another one, and adds one.
        record.set_own_labels(with(&["k8s:app=cache", "k8s:zone=a"]));
        assert_eq!(record.labels, with(&["k8s:app=cache", "k8s:tier=back", "k8s:zone=a"]));
        record.set_pod_row(row("u-1", &["k8s:app=db"], &[]));
        assert_eq!(record.labels, with(&["k8s:app=cache", "k8s:zone=a"]));
        record.set_own_labels(with(&[]));
        record.set_pod_row(row("u-1", &["k8s:app=db"], &[]));
        assert_eq!(record.labels, with(&["k8s:app=db"]));
    }

    #[test]
    fn an_own_port_takes_precedence_over_the_ports_of_the_row_with_its_name() {
        let mut record = crate::fixtures::record(1, 7);
        let http = PortName::parse("http").expect("a name");
        record.named_ports.insert(http, named(8080, Protocol::Tcp));
        let ports = [("dns", 53, Protocol::Tcp), ("dns", 53, Protocol::Udp), ("http", 80, Protocol::Udp)];
        record.set_pod_row(row("u-1", &[], &ports));
        let shown = |(name, port): (&PortName, &NamedPort)| format!("{name} {}/{}", port.port, port.protocol);
        let all: Vec<String> = record.all_named_ports().map(shown).collect();
        assert_eq!(all, ["dns 53/tcp", "dns 53/udp", "http 8080/tcp"]);
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
