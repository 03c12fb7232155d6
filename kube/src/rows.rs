//! Maps objects of the API to rows of the feed.

use std::{collections::BTreeSet, net::IpAddr};

use prost::Message as _;
use serde_json::value::RawValue;
use wharf_feed::v1::{self, row::Row};

use crate::{
    objects::{
        Any, Metadata,
        node::{HEALTH, Node, ROUTERS},
        pod::{Container, Pod},
        policy,
    },
    source::{Kind, Source},
};

/// Limit of the feed for a pod's named ports. More would refuse the whole row.
const MAX_PORTS: usize = 256;
/// Bytes of the largest row in a message. The agent refuses and lists rows of more than 1.5 MiB.
const MAX_SENT: usize = 3 << 20;

/// Why an object has no row.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// A field has an unexpected type.
    #[error("it does not decode: {0}")]
    Undecodable(#[from] serde_json::Error),
    /// Exceeds a message.
    #[error("its row has {0} bytes")]
    TooLarge(usize),
}

/// An object and its row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defined {
    /// Key of the object: `NAMESPACE/NAME`, or the name without a namespace.
    pub object: String,
    pub uid: String,
    /// Encoded; `None` if the object defines no row.
    pub row: Option<Box<[u8]>>,
}

/// Decodes the objects of a source.
#[derive(Debug, Clone)]
pub struct Reader {
    /// Kind of the objects.
    pub source: Source,
    /// This node's name.
    pub own: String,
}

impl Reader {
    /// Decodes an object. `api_version`: the API version of the list or watch.
    ///
    /// # Errors
    /// The object exists, and no row can be made from it.
    pub fn read(&self, api_version: &str, object: &RawValue) -> Result<Defined, Unusable> {
        let defined = self.decode(api_version, object)?;
        match defined.row.as_deref().map_or(0, <[u8]>::len) {
            size if size > MAX_SENT => Err(Unusable::TooLarge(size)),
            _ => Ok(defined),
        }
    }

    fn decode(&self, api_version: &str, object: &RawValue) -> Result<Defined, serde_json::Error> {
        let text = object.get();
        match self.source.kind() {
            Kind::Node => {
                let node: Node = serde_json::from_str(text)?;
                Ok(defined(&node.metadata, node_row(&node)))
            }
            Kind::Namespace => {
                let Any { metadata } = serde_json::from_str(text)?;
                let labels = metadata.labels.clone().unwrap_or_default();
                let row = Row::Namespace(v1::Namespace { name: metadata.name.clone(), labels });
                Ok(defined(&metadata, Some(row)))
            }
            Kind::Pod => {
                let pod: Pod = serde_json::from_str(text)?;
                Ok(defined(&pod.metadata, pod_row(&pod, &self.own)))
            }
            Kind::Policy => {
                let (identity, text) = policy::document(self.source, api_version, object)?;
                let (object, metadata) = (identity.key(), identity.metadata);
                let key = self.source.row_key(&object, &metadata.uid);
                let row = encode(Row::Policy(v1::Policy { key, text }));
                Ok(Defined { object, uid: metadata.uid, row: Some(row) })
            }
        }
    }
}

fn defined(metadata: &Metadata, row: Option<Row>) -> Defined {
    Defined { object: metadata.key(), uid: metadata.uid.clone(), row: row.map(encode) }
}

/// Deterministic: maps are ordered.
fn encode(row: Row) -> Box<[u8]> {
    v1::Row { row: Some(row) }.encode_to_vec().into_boxed_slice()
}

/// `None` without an address: no route can lead to the node.
fn node_row(node: &Node) -> Option<Row> {
    let all = node.status.addresses.as_deref().unwrap_or_default();
    let of_kind = |kind| -> Vec<String> {
        let mut addresses: Vec<String> = Vec::new();
        for address in all.iter().filter(|address| address.kind == kind).filter_map(|address| usable(&address.address))
        {
            if !addresses.contains(&address) && addresses.len() < MAX_ADDRESSES {
                addresses.push(address);
            }
        }
        addresses
    };
    let mut addresses = of_kind("InternalIP");
    if addresses.is_empty() {
        addresses = of_kind("ExternalIP");
    }
    let metadata = &node.metadata;
    let listed = |name| metadata.annotation(name).map(addresses_of).unwrap_or_default();
    let router_addresses = listed(ROUTERS);
    let mut health_addresses = listed(HEALTH);
    health_addresses.retain(|address| !router_addresses.contains(address));
    (!addresses.is_empty()).then(|| {
        Row::Node(v1::Node {
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            addresses,
            pod_cidrs: node.spec.pod_cidrs.clone().unwrap_or_default(),
            health_addresses,
            router_addresses,
        })
    })
}

/// Bounded and checked: any user who may annotate the node writes it.
fn addresses_of(annotation: &str) -> Vec<String> {
    let unique: BTreeSet<_> = annotation.split(',').filter_map(usable).collect();
    unique.into_iter().take(MAX_ADDRESSES).collect()
}

/// Per list of a node's row.
const MAX_ADDRESSES: usize = 8;

/// An address that the agent accepts: any other would refuse the node's whole row.
fn usable(text: &str) -> Option<String> {
    let address: IpAddr = text.trim().parse().ok()?;
    let is_usable = match address {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && v6.to_ipv4_mapped().is_none(),
    };
    let is_usable = is_usable && !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
    is_usable.then(|| address.to_string())
}

/// A pod without addresses has a row only on its node, whose agent can use the labels early.
fn pod_row(pod: &Pod, own: &str) -> Option<Row> {
    let node = pod.spec.node_name.clone().unwrap_or_default();
    let addresses = pod.addresses();
    if !pod.is_live() || (addresses.is_empty() && node != own) {
        return None;
    }
    let Metadata { name, namespace, uid, labels, .. } = pod.metadata.clone();
    Some(Row::Pod(v1::Pod {
        uid,
        namespace: namespace.unwrap_or_default(),
        name,
        node,
        addresses,
        labels: labels.unwrap_or_default(),
        named_ports: named_ports(pod),
    }))
}

/// The first port of a name and protocol counts.
fn named_ports(pod: &Pod) -> Vec<v1::NamedPort> {
    let sidecar = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let containers = pod.spec.containers.iter().flatten();
    let all = containers.chain(pod.spec.init_containers.iter().flatten().filter(sidecar));
    let (mut ports, mut seen) = (Vec::new(), BTreeSet::new());
    for port in all.flat_map(|container| container.ports.iter().flatten()) {
        let Some(name) = port.name.as_ref().filter(|name| !name.is_empty()) else { continue };
        let protocol = match port.protocol.as_deref() {
            None | Some("" | "TCP") => v1::named_port::Protocol::Tcp,
            Some("UDP") => v1::named_port::Protocol::Udp,
            Some("SCTP") => v1::named_port::Protocol::Sctp,
            Some(_) => continue,
        };
        if seen.insert((protocol as i32, name)) && ports.len() < MAX_PORTS {
            ports.push(v1::NamedPort { name: name.clone(), protocol: protocol as i32, port: port.container_port });
        }
    }
    ports
}

#[cfg(test)]
mod tests;
