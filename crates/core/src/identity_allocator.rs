//! Reference-counted identities of label sets.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use crate::identity::{Identity, Label};

/// 16 bits, to keep policy map keys small; four times the endpoint limit.
pub const LAST_LOCAL: Identity = Identity(65_535);

/// Source of reserved labels; only the agent may assign it.
pub const RESERVED_SOURCE: &str = "reserved";

const RESERVED: [(&str, Identity); 6] = [
    ("host", Identity::HOST),
    ("world", Identity::WORLD),
    ("unmanaged", Identity::UNMANAGED),
    ("health", Identity::HEALTH),
    ("init", Identity::INIT),
    ("remote-node", Identity::REMOTE_NODE),
];

/// They differ between pods of a workload or rollouts: each pod would need an identity.
const PER_POD_KEYS: [&str; 10] = [
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.uid",
    "io.kubernetes.pod.infra-container-id",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "batch.kubernetes.io/controller-uid",
    "pod-template-hash",
    "pod-template-generation",
    "controller-revision-hash",
];

/// Why an allocation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Every number is in use.
    #[error("allocate identity: all {total} are in use; delete endpoints, or give them fewer different labels")]
    Exhausted {
        /// Number of identities.
        total: u32,
    },
    /// Unknown, or combined with other labels.
    #[error("resolve identity of label {label}: {why}")]
    Reserved {
        label: Label,
        /// Violated rule.
        why: &'static str,
    },
    /// The number has other labels, or the labels another number.
    #[error("claim identity {identity}: {why}; the endpoint's labels are resolved anew")]
    Conflict {
        /// Number.
        identity: Identity,
        why: String,
    },
}

/// An identity in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityRow {
    /// Number.
    pub identity: Identity,
    /// Its security-relevant labels.
    pub labels: BTreeSet<Label>,
    /// Reference count.
    pub references: u64,
}

/// Numbers sets of security-relevant labels while references exist.
#[derive(Debug, Clone, Default)]
pub struct IdentityAllocator {
    by_labels: BTreeMap<BTreeSet<Label>, Identity>,
    rows: BTreeMap<Identity, IdentityRow>,
    /// A number is reused as late as possible.
    last: Option<Identity>,
}

impl IdentityAllocator {
    /// Without identities.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Identity of these labels, with a reference.
    ///
    /// # Errors
    /// [`IdentityError::Exhausted`], [`IdentityError::Reserved`].
    pub fn acquire(&mut self, labels: &BTreeSet<Label>) -> Result<Identity, IdentityError> {
        let labels = security_relevant(labels);
        if let Some(identity) = reserved(&labels)? {
            return Ok(identity);
        }
        let identity = match self.by_labels.get(&labels) {
            Some(identity) => *identity,
            None => {
                let fresh = self.next_free()?;
                self.last = Some(fresh);
                fresh
            }
        };
        self.refer(identity, labels);
        Ok(identity)
    }

    /// Drops a reference; true when the number is free now.
    pub fn release(&mut self, identity: Identity) -> bool {
        let Some(row) = self.rows.get_mut(&identity) else { return false };
        row.references = row.references.saturating_sub(1);
        if row.references > 0 {
            return false;
        }
        if let Some(row) = self.rows.remove(&identity) {
            self.by_labels.remove(&row.labels);
        }
        true
    }

    /// `None` for reserved and unused identities.
    #[must_use]
    pub fn get(&self, identity: Identity) -> Option<&BTreeSet<Label>> {
        self.rows.get(&identity).map(|r| &r.labels)
    }

    /// Adds a reference for a restored endpoint.
    ///
    /// # Errors
    /// [`IdentityError::Conflict`]: acquire a new identity.
    pub fn claim(&mut self, identity: Identity, labels: &BTreeSet<Label>) -> Result<(), IdentityError> {
        let labels = security_relevant(labels);
        let conflict = |why: String| Err(IdentityError::Conflict { identity, why });
        match reserved(&labels)? {
            Some(fixed) if fixed == identity => return Ok(()),
            Some(fixed) => return conflict(format!("its labels are those of the reserved identity {fixed}")),
            None => {}
        }
        if !(Identity::FIRST_LOCAL..=LAST_LOCAL).contains(&identity) {
            return conflict(format!("it is not one of {} to {LAST_LOCAL}", Identity::FIRST_LOCAL));
        }
        if self.get(identity).is_some_and(|held| *held != labels) {
            return conflict("it stands for other labels".to_owned());
        }
        if let Some(other) = self.by_labels.get(&labels).filter(|other| **other != identity) {
            return conflict(format!("its labels have the identity {other}"));
        }
        self.last = self.last.max(Some(identity));
        self.refer(identity, labels);
        Ok(())
    }

    /// By number, without reserved ones.
    #[must_use]
    pub fn list(&self) -> Vec<IdentityRow> {
        self.rows.values().cloned().collect()
    }

    fn refer(&mut self, identity: Identity, labels: BTreeSet<Label>) {
        self.by_labels.insert(labels.clone(), identity);
        let row = self.rows.entry(identity).or_insert(IdentityRow { identity, labels, references: 0 });
        row.references += 1;
    }

    fn next_free(&self) -> Result<Identity, IdentityError> {
        let (first, last) = (Identity::FIRST_LOCAL.0, LAST_LOCAL.0);
        let from = self.last.map_or(first, |l| l.0 + 1);
        (from..=last)
            .chain(first..from.min(last + 1))
            .map(Identity)
            .find(|candidate| !self.rows.contains_key(candidate))
            .ok_or(IdentityError::Exhausted { total: last - first + 1 })
    }
}

/// A label is security-relevant and not the namespace name.
#[must_use]
pub fn says_what(labels: &BTreeSet<Label>) -> bool {
    let namespace = |l: &Label| l.source == "k8s" && l.key == "io.kubernetes.pod.namespace";
    labels.iter().any(|label| !is_per_pod(label) && !namespace(label))
}

/// Without the container's name and id, and labels of a single pod or rollout.
#[must_use]
pub fn security_relevant(labels: &BTreeSet<Label>) -> BTreeSet<Label> {
    labels.iter().filter(|l| !is_per_pod(l)).cloned().collect()
}

fn is_per_pod(label: &Label) -> bool {
    match label.source.as_str() {
        "container" => matches!(label.key.as_str(), "id" | "name"),
        "k8s" => PER_POD_KEYS.contains(&label.key.as_str()) || label.key.starts_with("annotation."),
        _ => false,
    }
}

fn reserved(labels: &BTreeSet<Label>) -> Result<Option<Identity>, IdentityError> {
    let Some(label) = labels.iter().find(|l| l.source == RESERVED_SOURCE) else { return Ok(None) };
    let refuse = |why| Err(IdentityError::Reserved { label: label.clone(), why });
    if labels.len() > 1 {
        return refuse("a reserved label stands alone; remove it or the others");
    }
    match RESERVED.iter().find(|(key, _)| *key == label.key && label.value.is_empty()) {
        Some((_, identity)) => Ok(Some(*identity)),
        None => refuse("no such reserved label; known are host, world, unmanaged, health, init and remote-node"),
    }
}

#[cfg(test)]
mod tests;
