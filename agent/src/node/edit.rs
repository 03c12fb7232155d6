//! Changes that a client requests of an endpoint.

use std::collections::{BTreeMap, BTreeSet};

use wharf_core::{
    endpoint::EndpointRecord,
    identity::Label,
    ids::PortName,
    policy::{Enforcement, NamedPort},
    sources::SourcePrefixes,
};

/// `None` keeps a value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edit {
    /// All labels.
    pub labels: Option<BTreeSet<Label>>,
    /// Overrides the node's mode.
    pub enforcement: Option<Enforcement>,
    /// `None` removes a port.
    pub named_ports: BTreeMap<PortName, Option<NamedPort>>,
    /// All source prefixes.
    pub sources: Option<SourcePrefixes>,
}

impl Edit {
    /// Changes labels only.
    #[must_use]
    pub fn labels(labels: BTreeSet<Label>) -> Self {
        Self { labels: Some(labels), ..Self::default() }
    }

    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The changed record, with its old labels.
    #[must_use]
    pub fn without_labels(&self, record: &EndpointRecord) -> EndpointRecord {
        let mut record = record.clone();
        if let Some(enforcement) = self.enforcement {
            record.policy_enforcement = enforcement;
        }
        if let Some(sources) = &self.sources {
            record.sources.clone_from(sources);
        }
        for (name, port) in &self.named_ports {
            match port {
                Some(port) => drop(record.named_ports.insert(name.clone(), *port)),
                None => drop(record.named_ports.remove(name)),
            }
        }
        record
    }
}
