//! The leak audit: compares kernel and store at a gentle pace, and mends what two rounds in a row have named. What only
//! an operator can decide (endpoints whose records were lost, records out of service) it leaves alone.

use std::{collections::BTreeSet, sync::Arc};

use wharf_core::{ids::EndpointId, kernel::Kernel};

use crate::{
    audit::{Key, Mend, audit_and},
    node::Node,
    orphan,
    sync::lock,
};

/// What one round remembers for the next.
#[derive(Debug, Default)]
pub struct Reconcile {
    last: BTreeSet<Key>,
}

impl Reconcile {
    /// One round.
    ///
    /// # Errors
    /// When the kernel or the store cannot be read.
    pub async fn run<K: Kernel>(&mut self, node: &Arc<Node<K>>) -> Result<(), String> {
        let mut kept: BTreeSet<EndpointId> = orphan::ids(node);
        kept.extend(lock(&node.quarantined).ids());
        let guards: Vec<_> = kept.into_iter().map(|id| node.working_on(id)).collect();
        let report = audit_and(node, &Mend::Only(std::mem::take(&mut self.last))).await.map_err(|e| e.message)?;
        drop(guards);
        let mut left = 0;
        for f in report.findings {
            let mended = f.repair.as_deref() == Some("mended");
            match &f.repair {
                Some(outcome) => tracing::warn!(
                    object = f.object,
                    subject = f.subject,
                    owner = f.owner,
                    "leak audit: {}: {outcome}",
                    f.problem
                ),
                None => {
                    tracing::info!(object = f.object, subject = f.subject, owner = f.owner, "leak audit: {}", f.problem)
                }
            }
            if !mended {
                left += 1;
                if f.repairable && f.object != "record" {
                    self.last.insert((f.object, f.subject, f.problem));
                }
            }
        }
        *lock(&node.audit_findings) = Some(left);
        orphan::forget_gone(node).await
    }
}
