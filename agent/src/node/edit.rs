//! Changes of an endpoint's facts that a client asks for.

use std::collections::{BTreeMap, BTreeSet};

use wharf_core::{
    endpoint::EndpointRecord,
    identity::Label,
    ids::PortName,
    policy::{NamedPort, OwnEnforcement},
};

/// What changes; what is `None` or not named stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edit {
    /// All labels.
    pub labels: Option<BTreeSet<Label>>,
    /// Enforcement of policy in place of the node's mode; `Some(None)` follows the mode.
    pub enforcement: Option<Option<OwnEnforcement>>,
    /// Named ports that are put or, with `None`, removed.
    pub named_ports: BTreeMap<PortName, Option<NamedPort>>,
}

impl Edit {
    /// New labels.
    #[must_use]
    pub fn labels(labels: BTreeSet<Label>) -> Self {
        Self { labels: Some(labels), ..Self::default() }
    }

    /// Nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The record with the new enforcement and named ports; its labels stay.
    #[must_use]
    pub fn without_labels(&self, record: &EndpointRecord) -> EndpointRecord {
        let mut record = record.clone();
        if let Some(enforcement) = self.enforcement {
            record.policy_enforcement = enforcement;
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
