//! Rows of the cluster feed.

use std::{collections::BTreeMap, mem, sync::Arc, time::Duration};

use tokio::time::Instant;
use wharf_cluster::feed::{Changed, Complete, Effects, FeedPod, FeedPolicy};
use wharf_policy::read::read;

use super::{
    Guard, Policy, Saves,
    documents::{Documents, FeedRows, RefusedPolicy},
    error::{PolicyError, told},
    inner::Inner,
    redirects::Owed,
};

/// Failed attempts with rows that do not fit, in one call: policy is locked meanwhile. The other rows wait for
/// [`Policy::ensure`].
const ATTEMPTS: usize = 32;

/// Until refused rows are tried again without more room: the proxy may accept them.
const RETRY: Duration = Duration::from_secs(600);

/// Of a row that waits for its attempt.
const WAITS: &str = "it is not tried yet: other policies do not fit; it is tried within seconds";

/// Of a row whose listeners the proxy has not acknowledged.
const UNACKNOWLEDGED: &str = "the proxy has not acknowledged the rules about requests; until then, their connections \
                              are dropped, or pass if failOpen says so";

/// A container of another node by uid; `None` for one that is gone.
pub(super) type ChangedPod = (Arc<str>, Option<Arc<FeedPod>>);

/// What an attempt with rows of the cluster feed changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempts {
    /// The kernel's rows. After [`ATTEMPTS`] failures, the rest waits.
    Written,
    /// Only the engine.
    Computed,
}

impl Policy {
    /// Takes changes of the cluster feed: labels of namespaces, policies, and containers of nodes other than `own`.
    /// `complete`: with these. Before [`Policy::start`], no row is written.
    ///
    /// # Errors
    /// Rows of containers do not fit, or the policies are lost: these changes are to be taken again. The kernel
    /// refused: retried by [`Policy::ensure`].
    pub async fn take_feed(&self, own: &str, effects: Effects, complete: Complete) -> Result<(), PolicyError> {
        let Effects { pods, namespaces, policies, .. } = effects;
        let pods: Vec<ChangedPod> =
            pods.into_iter().map(|(uid, pod)| (uid, pod.filter(|pod| !pod.is_of(own)))).collect();
        let read = tokio::task::spawn_blocking(move || parsed(policies)).await;
        let (rows, unreadable) = read.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let mut inner = self.lock_early().await;
        for row in rows.keys().chain(unreadable.keys()) {
            inner.forget_attempts(row);
        }
        inner.unreadable.extend(unreadable.keys().cloned());
        let mut without = inner.wanted.clone();
        for (name, labels) in namespaces {
            without.set_labels_of_cluster(&name, labels.map(|row| row.labels.clone()));
        }
        without.awaits_cluster &= !complete.all || !inner.unreadable.is_empty();
        without.awaits_namespaces &= !complete.namespaces;
        without.refused_namespaces = Arc::new(complete.refused_namespaces);
        let refused =
            unreadable.into_iter().map(|(row, why)| (row, RefusedPolicy { why, stale: false, conflict: false }));
        inner.refused_rows.extend(refused);
        let wanted = with_rows(&without, &rows);
        if !self.has_started() {
            let before = std::mem::replace(&mut inner.wanted, wanted);
            if !inner.wanted.says_the_same_of_endpoints(&before) {
                inner.renew();
            }
            for (uid, pod) in pods {
                inner.put_elsewhere(&uid, pod);
            }
            return Ok(());
        }
        let (mut inner, mut result) = self.take(inner, wanted, &pods, Saves::IfNeeded).await;
        let is_refused = matches!(result, Err(PolicyError::Rows(_) | PolicyError::Proxy(_)));
        if is_refused && inner.wanted.awaits_cluster && !without.awaits_cluster {
            for (uid, pod) in pods {
                inner.put_elsewhere(&uid, pod);
            }
            (inner, result) = self.fit_rows(inner, with_rows(&without, &rows)).await;
        } else if is_refused && !rows.is_empty() {
            (inner, result) = self.take(inner, without, &pods, Saves::IfNeeded).await;
            if result.is_ok() {
                // First those that are gone, which make room.
                let (gone, put): (FeedRows, FeedRows) = rows.into_iter().partition(|(_, policies)| policies.is_none());
                inner.waiting.extend([put, gone]);
                (inner, result) = self.take_waiting(inner, Attempts::Written).await;
            }
        }
        result?;
        self.check_lost(&mut inner).await
    }

    /// Takes the rows that wait, and refuses those that do not fit or that the proxy refuses, one by one.
    async fn take_waiting(&self, mut inner: Guard, attempts: Attempts) -> (Guard, Result<(), PolicyError>) {
        let mut failed = 0;
        while (failed < ATTEMPTS || attempts == Attempts::Computed)
            && let Some(mut part) = inner.waiting.pop()
        {
            if part.is_empty() {
                continue;
            }
            let wanted = with_rows(&inner.wanted, &part);
            let result;
            (inner, result) = match attempts {
                Attempts::Written => self.take(inner, wanted, &[], Saves::IfNeeded).await,
                Attempts::Computed => self.fit(inner, wanted).await,
            };
            let why = match result {
                Ok(()) => {
                    part.keys().for_each(|row| drop(inner.refused_rows.remove(row)));
                    continue;
                }
                Err(why @ (PolicyError::Rows(_) | PolicyError::Proxy(_))) => why.to_string(),
                Err(why) => {
                    inner.waiting.push(part);
                    return (inner, Err(why));
                }
            };
            failed += 1;
            if let Some(half) = part.keys().nth(part.len() / 2).filter(|_| part.len() > 1).cloned() {
                let second = part.split_off(&half);
                inner.waiting.extend([second, part]);
                continue;
            }
            for (row, policies) in part {
                inner.refuse(&row, why.clone());
                inner.unfit.insert(row, policies);
            }
            let sizes = inner.engine.as_ref().map(|engine| engine.sizes()).unwrap_or_default();
            inner.tried = Some((inner.limits, sizes, Instant::now()));
        }
        let waiting: Vec<String> = inner.waiting.iter().flat_map(BTreeMap::keys).cloned().collect();
        for row in waiting.iter().filter(|row| !inner.refused_rows.contains_key(*row)).collect::<Vec<_>>() {
            inner.refuse(row, WAITS.to_owned());
        }
        (inner, Ok(()))
    }

    /// Tries rows that wait, and refused rows when tables have more room.
    pub(super) async fn retry_rows(&self, mut inner: Guard) -> Result<(), PolicyError> {
        if inner.waiting.is_empty() && inner.has_more_room() {
            let unfit = mem::take(&mut inner.unfit);
            inner.waiting.push(unfit);
        }
        if inner.waiting.is_empty() {
            return Ok(());
        }
        self.take_waiting(inner, Attempts::Written).await.1
    }

    /// The first rows of the kernel, if the policies of `wanted` do not fit: without policies of the cluster feed that
    /// do not fit. The kernel's rows change once, so that no container is open meanwhile.
    pub(super) async fn fit_rows(&self, mut inner: Guard, mut wanted: Documents) -> (Guard, Result<(), PolicyError>) {
        let before = inner.wanted.clone();
        let rows = wanted.take_rows();
        inner.engine = None;
        let mut result;
        (inner, result) = self.fit(inner, wanted).await;
        if result.is_ok() {
            inner.waiting.push(rows);
            (inner, result) = self.take_waiting(inner, Attempts::Computed).await;
        }
        // The kernel does not have its rows.
        inner.engine = None;
        if let Err(why) = result {
            inner.wanted = before;
            inner.waiting.clear();
            for row in mem::take(&mut inner.unfit).into_keys() {
                inner.refused_rows.remove(&row);
            }
            return (inner, Err(why));
        }
        self.realize(inner, Vec::new()).await
    }

    /// Computes the rows of `wanted`, or refuses it.
    async fn fit(&self, mut inner: Guard, wanted: Documents) -> (Guard, Result<(), PolicyError>) {
        let mut events = wanted.events_since(&inner.wanted, &self.services);
        let (known, members) = (inner.engine.clone(), inner.members.clone());
        let before = mem::replace(&mut inner.wanted, wanted);
        if !inner.wanted.says_the_same_of_endpoints(&before) {
            events.extend(inner.renew());
        }
        inner.active |= inner.is_needed();
        let (mut inner, computed) = self.compute(inner, events).await;
        match computed {
            Ok(change) => {
                inner.engine = change.map(|change| change.engine);
                (inner, Ok(()))
            }
            Err(why) => {
                (inner.engine, inner.wanted, inner.members) = (known, before, members);
                (inner, Err(why))
            }
        }
    }

    /// Rows of the cluster feed that are not in force as they are, by key.
    pub async fn refused_rows(&self) -> BTreeMap<String, RefusedPolicy> {
        let inner = self.lock_early().await;
        let conflicts = inner.wanted.rows_in_conflict().into_iter();
        let mut refused: BTreeMap<_, _> =
            conflicts.map(|(row, why)| (row, RefusedPolicy { why, stale: false, conflict: true })).collect();
        refused.extend(inner.refused_rows.clone());
        if matches!(inner.owed, Owed::Answer { .. }) {
            let refusal = || RefusedPolicy { why: UNACKNOWLEDGED.to_owned(), stale: true, conflict: false };
            for row in inner.wanted.rows_with_requests() {
                refused.entry(row.clone()).or_insert_with(refusal);
            }
        }
        refused
    }
}

impl Inner {
    /// A row of the cluster feed is replaced or gone.
    fn forget_attempts(&mut self, row: &str) {
        self.refused_rows.remove(row);
        self.unreadable.remove(row);
        self.unfit.remove(row);
        for part in &mut self.waiting {
            part.remove(row);
        }
    }

    fn refuse(&mut self, row: &str, why: String) {
        let stale = self.wanted.has_row(row);
        self.refused_rows.insert(row.to_owned(), RefusedPolicy { why, stale, conflict: false });
    }

    /// Since the last attempt with the refused rows, a table has lost rows or its limit has changed. Also after
    /// [`RETRY`].
    fn has_more_room(&self) -> bool {
        let (Some((limits, sizes, at)), Some(engine)) = (&self.tried, &self.engine) else { return false };
        let now = engine.sizes();
        let is_less = now.ipcache < sizes.ipcache
            || now.ports < sizes.ports
            || now.rules < sizes.rules
            || now.sets < sizes.sets
            || now.listeners < sizes.listeners;
        !self.unfit.is_empty() && (is_less || self.limits != *limits || at.elapsed() >= RETRY)
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
fn parsed(rows: Changed<FeedPolicy>) -> (FeedRows, BTreeMap<String, String>) {
    let (mut taken, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for (key, row) in rows {
        match row.map(|row| read(&key, &row.text)).transpose() {
            Ok(policies) => drop(taken.insert(key.to_string(), policies)),
            Err(refusals) => drop(refused.insert(key.to_string(), told(&refusals))),
        }
    }
    (taken, refused)
}
