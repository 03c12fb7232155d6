//! The rows in force, for a restart. In a file, nodes come first, to be readable alone; label sets are stored once.

use std::{borrow::Cow, collections::HashMap, net::IpAddr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{
    rows::{FeedNamespace, FeedNode, FeedPod, FeedPolicy, Labels, MAX_QUOTED, NamedPorts, clip},
    shared::Shared,
};

/// Copies share the rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub(super) nodes: Vec<Arc<FeedNode>>,
    pub(super) pods: Vec<Arc<FeedPod>>,
    pub(super) namespaces: Vec<Arc<FeedNamespace>>,
    pub(super) policies: Vec<Arc<FeedPolicy>>,
}

impl State {
    #[must_use]
    pub fn nodes(&self) -> &[Arc<FeedNode>] {
        &self.nodes
    }

    /// With other nodes.
    #[must_use]
    pub fn with_nodes(self, nodes: Vec<Arc<FeedNode>>) -> Self {
        Self { nodes, ..self }
    }

    /// The rows of other kinds, to serialize.
    #[must_use]
    pub const fn rest(&self) -> Rest<'_> {
        Rest(self)
    }

    #[must_use]
    pub fn without_pods(self) -> Self {
        Self { pods: Vec::new(), ..self }
    }
}

/// The rows of a state without nodes. [`State`] deserializes them.
#[derive(Debug, Clone, Copy)]
pub struct Rest<'a>(&'a State);

#[derive(Serialize)]
struct Written<'a> {
    label_sets: &'a [&'a Labels],
    pods: Pods<'a>,
    namespaces: &'a [Arc<FeedNamespace>],
    policies: &'a [Arc<FeedPolicy>],
}

/// Pods, and indices of their labels.
struct Pods<'a>(&'a [Arc<FeedPod>], &'a [usize]);

#[derive(Deserialize)]
struct Read<'a> {
    /// In older files.
    #[serde(default)]
    nodes: Vec<Arc<FeedNode>>,
    /// Absent in older files.
    #[serde(default)]
    label_sets: Vec<Arc<Labels>>,
    // Required: an incomplete document is an error.
    #[serde(borrow)]
    pods: Vec<Pod<'a>>,
    namespaces: Vec<Arc<FeedNamespace>>,
    policies: Vec<Arc<FeedPolicy>>,
}

#[derive(Serialize, Deserialize)]
struct Pod<'a> {
    #[serde(borrow)]
    uid: Cow<'a, str>,
    #[serde(borrow)]
    namespace: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    addresses: Cow<'a, [IpAddr]>,
    #[serde(borrow)]
    node: Cow<'a, str>,
    /// Index of the labels.
    label_set: Option<usize>,
    /// In older files, in place of the index.
    #[serde(skip_serializing)]
    labels: Option<Arc<Labels>>,
    #[serde(default, skip_serializing_if = "is_empty", with = "port_list")]
    named_ports: Arc<NamedPorts>,
}

fn is_empty(ports: &Arc<NamedPorts>) -> bool {
    ports.is_empty()
}

/// A list, because JSON keys are strings.
mod port_list {
    use wharf_core::nat::Protocol;

    use super::{Arc, Deserialize, Deserializer, NamedPorts, Serializer};

    pub(super) fn serialize<S: Serializer>(ports: &Arc<NamedPorts>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ports.iter().map(|((protocol, name), port)| (protocol, name, port)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<NamedPorts>, D::Error> {
        let ports: Vec<(Protocol, String, u16)> = Deserialize::deserialize(deserializer)?;
        Ok(Arc::new(ports.into_iter().map(|(protocol, name, port)| ((protocol, name), port)).collect()))
    }
}

impl Serialize for Rest<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let State { nodes: _, pods, namespaces, policies } = self.0;
        let (mut label_sets, mut indices): (Vec<&Labels>, HashMap<&Labels, usize>) = Default::default();
        let mut index = |labels| {
            *indices.entry(labels).or_insert_with(|| {
                label_sets.push(labels);
                label_sets.len() - 1
            })
        };
        let indices: Vec<usize> = pods.iter().map(|pod| index(&pod.labels)).collect();
        let pods = Pods(pods, &indices);
        Written { label_sets: &label_sets, pods, namespaces, policies }.serialize(serializer)
    }
}

impl Serialize for Pods<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().zip(self.1).map(|(pod, index)| Pod::of(pod, *index)))
    }
}

impl<'de> Deserialize<'de> for State {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Read { nodes, label_sets, pods, namespaces, policies } = Deserialize::deserialize(deserializer)?;
        let mut shared = Shared::default();
        let label_sets: Vec<Arc<Labels>> = label_sets.into_iter().map(|labels| shared.labels(labels)).collect();
        let pods = pods.into_iter().map(|pod| pod.row(&label_sets, &mut shared).map(Arc::new));
        let pods = pods.collect::<Result<_, String>>().map_err(D::Error::custom)?;
        Ok(Self { nodes, pods, namespaces, policies })
    }
}

impl<'a> Pod<'a> {
    fn of(pod: &'a FeedPod, index: usize) -> Self {
        Self {
            uid: Cow::Borrowed(&pod.uid),
            namespace: Cow::Borrowed(&pod.namespace),
            name: Cow::Borrowed(&pod.name),
            addresses: Cow::Borrowed(&pod.addresses),
            node: Cow::Borrowed(&pod.node),
            label_set: Some(index),
            labels: None,
            named_ports: Arc::clone(&pod.named_ports),
        }
    }

    /// # Errors
    /// The file is damaged.
    fn row(self, label_sets: &[Arc<Labels>], shared: &mut Shared) -> Result<FeedPod, String> {
        let labels = match (self.label_set, self.labels) {
            (Some(index), None) => label_sets.get(index).cloned(),
            (None, Some(labels)) => Some(shared.labels(labels)),
            _ => None,
        };
        let labels = labels.ok_or_else(|| format!("pod {:?} has no set of labels", clip(&self.uid, MAX_QUOTED)))?;
        Ok(FeedPod {
            uid: self.uid.into(),
            namespace: shared.name(self.namespace),
            name: self.name.into(),
            addresses: self.addresses.into(),
            node: shared.name(self.node),
            labels,
            named_ports: shared.ports(self.named_ports),
        })
    }
}
