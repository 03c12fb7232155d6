//! Rows, and their single checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use wharf_core::{ids::PortName, nat::Protocol};

use super::{Kind, Limits};
use crate::nodes::{MAX_NAME, MAX_OF_NODE, NodeRow, address_problem, cidr_problem, is_in, name_problem, overlap};

/// Label of every namespace.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
/// Addresses of a pod.
const MAX_OF_POD: usize = 8;
/// Named ports of a pod.
const MAX_PORTS: usize = 256;
/// Bytes of a key.
pub(super) const MAX_KEY: usize = 512;
/// Bytes of quoted text.
pub(super) const MAX_QUOTED: usize = 80;
/// Approximate bytes that hold a row or list item.
const OVERHEAD: usize = 64;

pub(super) type Labels = BTreeMap<String, String>;
pub(super) type NamedPorts = BTreeMap<(Protocol, String), u16>;

/// A node, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeedNode {
    /// Unique.
    pub name: String,
    /// Uid of the node's object.
    pub uid: String,
    /// Where other nodes reach it, best first; at least one.
    pub addresses: Vec<IpAddr>,
    /// Contain its containers' addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// Not compared with other rows. Those outside the pod CIDRs in force have no effect.
    pub health_addresses: Vec<IpAddr>,
    /// Gateways of containers, as `health_addresses`. Absent in older files.
    #[serde(default)]
    pub router_addresses: Vec<IpAddr>,
}

/// Omits health and router addresses outside the pod CIDRs, which other nodes may have.
impl From<&FeedNode> for NodeRow {
    fn from(node: &FeedNode) -> Self {
        let inside = |addresses: &[IpAddr]| -> Vec<IpAddr> {
            addresses.iter().copied().filter(|address| is_in(&node.pod_cidrs, *address)).collect()
        };
        Self {
            name: node.name.clone(),
            addresses: node.addresses.clone(),
            health_addresses: inside(&node.health_addresses),
            router_addresses: inside(&node.router_addresses),
            pod_cidrs: node.pod_cidrs.clone(),
        }
    }
}

/// A pod, by uid. Pods of a feed share equal namespaces, nodes, labels and ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedPod {
    /// Unique.
    pub uid: Arc<str>,
    pub namespace: Arc<str>,
    /// Unique in the namespace at any time.
    pub name: Arc<str>,
    /// May be empty.
    pub addresses: Arc<[IpAddr]>,
    /// The node's name.
    pub node: Arc<str>,
    /// Without source.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Port numbers by protocol and name.
    pub named_ports: Arc<BTreeMap<(Protocol, String), u16>>,
}

impl FeedPod {
    /// The pod runs on this node.
    #[must_use]
    pub fn is_of(&self, node: &str) -> bool {
        &*self.node == node
    }
}

/// A namespace, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeedNamespace {
    /// Unique.
    pub name: String,
    /// Without source. In force with `kubernetes.io/metadata.name`.
    pub labels: BTreeMap<String, String>,
}

/// A policy document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeedPolicy {
    /// The producer's, for example `NetworkPolicy default/web`.
    pub key: String,
    /// Not parsed here.
    pub text: String,
}

pub(super) trait FeedRow: Clone + PartialEq {
    const KIND: Kind;

    /// May break the rules.
    fn key(&self) -> &str;

    /// The key, shared with the row if possible.
    fn shared_key(&self) -> Arc<str> {
        self.key().into()
    }

    /// Shares an equal key, if the row can.
    fn share_key(&mut self, _key: &Arc<str>) {}

    /// Name for operators, bounded and without control characters.
    fn shown(&self) -> String {
        shown(self.key())
    }

    /// Approximate bytes.
    fn size(&self) -> usize;

    /// Checks the row alone. The error is the broken rule.
    fn check(&self, limits: &Limits) -> Result<(), String>;

    /// Adds implied values.
    fn normalized(self: Arc<Self>) -> Arc<Self> {
        self
    }

    /// Addresses and CIDRs that only one row may have. They do not overlap.
    fn claims(&self) -> Vec<IpNet> {
        Vec::new()
    }

    /// The row without claims of other rows; `None` if the rest is invalid.
    fn reduced(&self, _owns: &dyn Fn(&IpNet) -> bool) -> Option<Self> {
        Some(self.clone())
    }
}

impl FeedRow for FeedNode {
    const KIND: Kind = Kind::Node;

    fn key(&self) -> &str {
        &self.name
    }

    fn size(&self) -> usize {
        let lists = [&self.addresses, &self.health_addresses, &self.router_addresses].map(Vec::len);
        let items = self.pod_cidrs.len() + lists.into_iter().sum::<usize>();
        OVERHEAD * (1 + items) + self.name.len() + self.uid.len()
    }

    fn check(&self, _limits: &Limits) -> Result<(), String> {
        check_name("a node's name", &self.name)?;
        check_name("a node's uid", &self.uid)?;
        if self.addresses.is_empty() {
            return Err("it has no address".to_owned());
        }
        check_addresses("addresses", &self.addresses, MAX_OF_NODE)?;
        check_addresses("health addresses", &self.health_addresses, MAX_OF_NODE)?;
        check_addresses("router addresses", &self.router_addresses, MAX_OF_NODE)?;
        if let Some(address) = self.router_addresses.iter().find(|address| self.health_addresses.contains(*address)) {
            return Err(format!("{address} is a health address and a router address"));
        }
        at_most("pod CIDRs", self.pod_cidrs.len(), MAX_OF_NODE)?;
        for (i, cidr) in self.pod_cidrs.iter().enumerate() {
            cidr_problem(cidr).map_or(Ok(()), Err)?;
            if let Some(other) = self.pod_cidrs.iter().take(i).find(|other| overlap(other, cidr)) {
                return Err(format!("{cidr} overlaps {other}"));
            }
            if let Some(address) = self.addresses.iter().find(|address| cidr.contains(*address)) {
                return Err(format!("{address} is in the pod CIDR {cidr}"));
            }
        }
        Ok(())
    }

    fn claims(&self) -> Vec<IpNet> {
        let addresses = self.addresses.iter().copied().map(IpNet::from);
        addresses.chain(self.pod_cidrs.iter().copied()).collect()
    }

    fn reduced(&self, owns: &dyn Fn(&IpNet) -> bool) -> Option<Self> {
        let addresses = owned_addresses(&self.addresses, owns);
        if addresses.is_empty() {
            return None;
        }
        let pod_cidrs = self.pod_cidrs.iter().copied().filter(|cidr| owns(cidr)).collect();
        Some(Self { addresses, pod_cidrs, ..self.clone() })
    }
}

impl FeedRow for FeedPod {
    const KIND: Kind = Kind::Pod;

    fn key(&self) -> &str {
        &self.uid
    }

    fn shared_key(&self) -> Arc<str> {
        Arc::clone(&self.uid)
    }

    fn share_key(&mut self, key: &Arc<str>) {
        self.uid = Arc::clone(key);
    }

    fn shown(&self) -> String {
        format!("{}/{}", shown(&self.namespace), shown(&self.name))
    }

    fn size(&self) -> usize {
        let names = [&self.uid, &self.namespace, &self.name, &self.node].map(|name| name.len());
        let lists = OVERHEAD * self.addresses.len() + size_of_labels(&self.labels) + size_of_ports(&self.named_ports);
        OVERHEAD + names.into_iter().sum::<usize>() + lists
    }

    fn check(&self, limits: &Limits) -> Result<(), String> {
        check_name("a pod's uid", &self.uid)?;
        check_namespace(&self.namespace)?;
        check_name("a pod's name", &self.name)?;
        check_name("a node's name", &self.node)?;
        check_addresses("addresses", &self.addresses, MAX_OF_POD)?;
        check_labels(&self.labels, limits)?;
        at_most("named ports", self.named_ports.len(), MAX_PORTS)?;
        for ((_, name), port) in &*self.named_ports {
            PortName::parse(name).map_err(|why| why.to_string())?;
            if *port == 0 {
                return Err(format!("port {name} has the number 0"));
            }
        }
        Ok(())
    }

    fn claims(&self) -> Vec<IpNet> {
        self.addresses.iter().copied().map(IpNet::from).collect()
    }

    fn reduced(&self, owns: &dyn Fn(&IpNet) -> bool) -> Option<Self> {
        Some(Self { addresses: owned_addresses(&self.addresses, owns).into(), ..self.clone() })
    }
}

impl FeedRow for FeedNamespace {
    const KIND: Kind = Kind::Namespace;

    fn key(&self) -> &str {
        &self.name
    }

    fn size(&self) -> usize {
        OVERHEAD + self.name.len() + size_of_labels(&self.labels)
    }

    fn check(&self, limits: &Limits) -> Result<(), String> {
        check_namespace(&self.name)?;
        check_labels(&self.labels, limits)
    }

    fn normalized(mut self: Arc<Self>) -> Arc<Self> {
        if !self.labels.contains_key(NAMESPACE_NAME) {
            let name = self.name.clone();
            Arc::make_mut(&mut self).labels.insert(NAMESPACE_NAME.to_owned(), name);
        }
        self
    }
}

impl FeedRow for FeedPolicy {
    const KIND: Kind = Kind::Policy;

    fn key(&self) -> &str {
        &self.key
    }

    fn size(&self) -> usize {
        OVERHEAD + self.key.len() + self.text.len()
    }

    fn check(&self, limits: &Limits) -> Result<(), String> {
        let allowed = |b: u8| b.is_ascii_graphic() || b == b' ';
        if self.key.is_empty() || self.key.len() > MAX_KEY || !self.key.bytes().all(allowed) {
            return Err(format!("a policy's key has 1 to {MAX_KEY} printable ASCII characters"));
        }
        if self.text.len() > limits.policy_bytes {
            return Err(format!("its text has {} bytes; at most {} fit", self.text.len(), limits.policy_bytes));
        }
        Ok(())
    }
}

pub(super) fn size_of_labels(labels: &Labels) -> usize {
    labels.iter().map(|(key, value)| OVERHEAD + key.len() + value.len()).sum()
}

pub(super) fn size_of_ports(ports: &NamedPorts) -> usize {
    ports.keys().map(|(_, name)| OVERHEAD + name.len()).sum()
}

fn owned_addresses(addresses: &[IpAddr], owns: &dyn Fn(&IpNet) -> bool) -> Vec<IpAddr> {
    addresses.iter().copied().filter(|address| owns(&IpNet::from(*address))).collect()
}

fn check_name(what: &str, name: &str) -> Result<(), String> {
    name_problem(what, name).map_or(Ok(()), Err)
}

/// The name is also a label value.
fn check_namespace(name: &str) -> Result<(), String> {
    if is_qualified(name) {
        return Ok(());
    }
    Err("a namespace's name has 1 to 63 letters, digits, '.', '-' and '_', a letter or digit at both ends".to_owned())
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count <= most { Ok(()) } else { Err(format!("it has {count} {what}; at most {most} fit")) }
}

fn check_addresses(what: &str, addresses: &[IpAddr], most: usize) -> Result<(), String> {
    at_most(what, addresses.len(), most)?;
    let mut seen = BTreeSet::new();
    for address in addresses {
        address_problem(*address).map_or(Ok(()), Err)?;
        if !seen.insert(address) {
            return Err(format!("{address} is listed twice"));
        }
    }
    Ok(())
}

fn check_labels(labels: &Labels, limits: &Limits) -> Result<(), String> {
    let added = usize::from(labels.contains_key(NAMESPACE_NAME));
    at_most("labels", labels.len() - added, limits.labels)?;
    for (key, value) in labels {
        if !is_label_key(key) {
            return Err(format!("{:?} is no label key", clip(key, MAX_QUOTED)));
        }
        if !value.is_empty() && !is_qualified(value) {
            return Err(format!("{:?} is no value of label {key}", clip(value, MAX_QUOTED)));
        }
    }
    Ok(())
}

/// A name, optionally after a DNS name and `/`.
fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => prefix.len() <= MAX_NAME && prefix.split('.').all(is_dns_part) && is_qualified(name),
        None => is_qualified(text),
    }
}

fn is_dns_part(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !text.is_empty() && text.bytes().all(allowed) && !text.starts_with('-') && !text.ends_with('-')
}

/// 1 to 63 letters, digits, `-`, `_` and `.`, alphanumeric at both ends.
fn is_qualified(text: &str) -> bool {
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
    bytes.len() <= 63 && bytes.iter().all(allowed) && end(bytes.first()) && end(bytes.last())
}

fn shown(text: &str) -> String {
    clip(text, MAX_NAME).replace(char::is_control, "\u{fffd}")
}

/// At most `most` bytes, then `…`, which is in no valid key.
pub(super) fn clip(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let fitting = text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= most);
    fitting.map(|(_, c)| c).chain(['…']).collect()
}
