//! Rows of the cluster feed.

use std::collections::BTreeMap;

use wharf_cluster::feed::{Changed, Complete, Effects, FeedPolicy};
use wharf_enforce::{
    documents::{Documents, FeedRows, RefusedPolicy},
    error::told,
    inputs::{ChangedPod, Input},
    transaction::Terms,
};
use wharf_policy::read::read;

use super::{Guard, Policy, effects::Realized, error::PolicyError, now};

/// Failed attempts per call, during which policy is locked. Other rows wait for [`Policy::ensure`].
const ATTEMPTS: usize = 32;

impl Policy {
    /// Takes the feed's changes: labels of namespaces, policies, and containers of nodes other than `own`. `complete`:
    /// with these. Writes no row before [`Policy::start`].
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
        let state = &mut inner.state;
        state.feed.replace(&rows, unreadable);
        let mut without = state.inputs().documents.clone();
        for (name, labels) in namespaces {
            without.set_labels_of_cluster(&name, labels.map(|row| row.labels.clone()));
        }
        let was_lost = without.awaits_cluster || without.lacks_rows;
        without.awaits_cluster &= !complete.all || !state.feed.are_readable();
        without.lacks_rows &= !complete.rows;
        without.awaits_namespaces &= !complete.namespaces;
        without.refused_namespaces = complete.refused_namespaces.into();
        let change = [Input::Documents(without.with_rows(&rows)), Input::Pods(pods.clone())];
        if !self.has_started() {
            change.into_iter().for_each(|input| state.take(input));
            return Ok(());
        }
        let is_found = was_lost && !without.is_lost();
        let (mut inner, mut result) = self.realize_with_addresses(inner, Terms::FEED, change.into()).await;
        let is_refused = matches!(result, Err(PolicyError::Rows(_) | PolicyError::Proxy(_)));
        if is_refused && is_found {
            inner.state.take(Input::Pods(pods));
            (inner, result) = self.fit(inner, without.with_rows(&rows)).await;
        } else if is_refused && !rows.is_empty() {
            let change = vec![Input::Documents(without), Input::Pods(pods)];
            (inner, result) = self.realize(inner, Terms::FEED, change).await;
            if result.is_ok() {
                inner.state.feed.try_later(rows);
                (inner, result) = self.try_rows(inner).await;
            }
        }
        drop(inner);
        result
    }

    /// Refuses waiting rows that do not fit or that the proxy refuses, one by one.
    async fn try_rows(&self, mut inner: Guard) -> Realized {
        let mut failed = 0;
        while failed < ATTEMPTS
            && let Some((part, documents)) = inner.state.next_rows()
        {
            let result;
            (inner, result) = self.realize(inner, Terms::FEED, vec![Input::Documents(documents)]).await;
            match inner.state.tried_rows(part, result, now()) {
                Ok(is_taken) => failed += usize::from(!is_taken),
                Err(why) => return (inner, Err(why)),
            }
        }
        inner.state.refuse_waiting();
        (inner, Ok(()))
    }

    /// Also tries refused rows when tables have more room.
    pub(super) async fn retry_rows(&self, mut inner: Guard) -> Result<(), PolicyError> {
        inner.state.retry_unfit(now());
        if !inner.state.feed.has_waiting() {
            return Ok(());
        }
        self.try_rows(inner).await.1
    }

    /// Leaves out feed policies that do not fit.
    pub(super) async fn fit(&self, mut inner: Guard, documents: Documents) -> Realized {
        let fitted = tokio::task::spawn_blocking(move || {
            let fitted = inner.state.fit(documents, now());
            (inner, fitted)
        });
        let fitted = fitted.await;
        let (inner, fitted) = fitted.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        match fitted {
            Ok(documents) => self.realize(inner, Terms::FITTED, vec![Input::Documents(documents)]).await,
            Err(why) => (inner, Err(why)),
        }
    }

    /// Rows of the feed that are not fully in force, by key.
    pub async fn refused_rows(&self) -> BTreeMap<String, RefusedPolicy> {
        self.lock_early().await.state.refused_rows()
    }
}

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
