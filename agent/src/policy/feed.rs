//! Rows of the cluster feed.

use std::collections::BTreeMap;

use wharf_cluster::feed::{Complete, Effects, FeedPod};
use wharf_policy::{model::Policy as Document, read::read};

use super::{
    Guard, Policy, Saves,
    documents::{self, Documents},
    error::PolicyError,
};

/// A container of another node by uid; `None` for one that is gone.
pub(super) type ChangedPod = (String, Option<FeedPod>);

/// Policies by row of the cluster feed; `None` for a row that is gone.
pub(super) type FeedRows = BTreeMap<String, Option<Vec<Document>>>;

type Texts = BTreeMap<String, Option<String>>;

/// A row of the cluster feed that is not in force as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedPolicy {
    /// Cause.
    pub why: String,
    /// The row's earlier policies are in force.
    pub stale: bool,
    /// Another row, an import or the policy directory has a policy of its name.
    pub conflict: bool,
}

impl Policy {
    /// Takes changes of the cluster feed: labels of namespaces, policies, and containers of nodes other than `own`.
    /// `complete`: with these. Before [`Policy::start`], no row is written.
    ///
    /// # Errors
    /// Rows of containers do not fit, or the policies are lost: these changes are to be taken again. The kernel refused:
    /// retried by [`Policy::ensure`].
    pub async fn take_feed(&self, own: &str, effects: Effects, complete: Complete) -> Result<(), PolicyError> {
        let Effects { pods, namespaces, policies, .. } = effects;
        let pods: Vec<ChangedPod> =
            pods.into_iter().map(|(uid, pod)| (uid, pod.filter(|pod| !pod.is_of(own)))).collect();
        let read = tokio::task::spawn_blocking(move || parsed(policies)).await;
        let (mut rows, unreadable) = read.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let mut inner = self.lock().await;
        if !rows.is_empty() {
            for (row, policies) in std::mem::take(&mut inner.unfit) {
                rows.entry(row).or_insert(policies);
            }
        }
        for row in rows.keys().chain(unreadable.keys()) {
            inner.refused_rows.remove(row);
        }
        let mut without = inner.wanted.clone();
        for (name, labels) in namespaces {
            without.set_labels_of_cluster(&name, labels);
        }
        without.awaits_cluster &= !complete.all || !unreadable.is_empty();
        without.awaits_namespaces &= !complete.namespaces;
        let refused =
            unreadable.into_iter().map(|(row, why)| (row, RefusedPolicy { why, stale: false, conflict: false }));
        inner.refused_rows.extend(refused);
        let wanted = with_rows(&without, &rows);
        if !inner.started {
            inner.wanted = wanted;
            for (uid, pod) in pods {
                inner.put_elsewhere(&uid, pod);
            }
            return Ok(());
        }
        let revision = inner.wanted.revision;
        let (mut inner, mut result) = self.take(inner, wanted, &pods, Saves::IfNeeded).await;
        if matches!(result, Err(PolicyError::Rows(_) | PolicyError::Proxy(_))) && !rows.is_empty() {
            (inner, result) = self.take(inner, without, &pods, Saves::IfNeeded).await;
            if result.is_ok() {
                (inner, result) = self.take_what_fits(inner, rows).await;
            }
        }
        result?;
        self.check_lost(&mut inner).await?;
        let now = inner.wanted.revision;
        drop(inner);
        if now != revision {
            self.settled(now).await;
        }
        Ok(())
    }

    /// Takes rows of the cluster feed, and refuses those that do not fit or that the proxy refuses.
    async fn take_what_fits(&self, mut inner: Guard, rows: FeedRows) -> (Guard, Result<(), PolicyError>) {
        let mut parts = vec![rows];
        while let Some(mut part) = parts.pop() {
            let wanted = with_rows(&inner.wanted, &part);
            let result;
            (inner, result) = self.take(inner, wanted, &[], Saves::IfNeeded).await;
            let why = match result {
                Ok(()) => continue,
                Err(why @ (PolicyError::Rows(_) | PolicyError::Proxy(_))) => why.to_string(),
                Err(why) => return (inner, Err(why)),
            };
            if let Some(half) = part.keys().nth(part.len() / 2).filter(|_| part.len() > 1).cloned() {
                let second = part.split_off(&half);
                parts.extend([second, part]);
                continue;
            }
            for (row, policies) in part {
                let stale = inner.wanted.has_row(&row);
                let refused = RefusedPolicy { why: why.clone(), stale, conflict: false };
                inner.refused_rows.insert(row.clone(), refused);
                inner.unfit.insert(row, policies);
            }
        }
        (inner, Ok(()))
    }

    /// Rows of the cluster feed that are not in force as they are, by key.
    pub async fn refused_rows(&self) -> BTreeMap<String, RefusedPolicy> {
        let inner = self.lock().await;
        let conflicts = inner.wanted.rows_in_conflict().into_iter();
        let mut refused: BTreeMap<_, _> =
            conflicts.map(|(row, why)| (row, RefusedPolicy { why, stale: false, conflict: true })).collect();
        refused.extend(inner.refused_rows.clone());
        refused
    }
}

fn with_rows(wanted: &Documents, rows: &FeedRows) -> Documents {
    let mut wanted = wanted.clone();
    for (row, policies) in rows {
        wanted.set_row(row, policies.clone());
    }
    wanted
}

/// Rows of the cluster feed to policies, and the refused rows with the cause.
fn parsed(texts: Texts) -> (FeedRows, BTreeMap<String, String>) {
    let (mut taken, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for (row, text) in texts {
        match text.map(|text| read(&row, &text)).transpose() {
            Ok(policies) => drop(taken.insert(row, policies)),
            Err(refusals) => drop(refused.insert(row, documents::told(&refusals))),
        }
    }
    (taken, refused)
}
