//! Policies of the cluster feed that are not in force. A refused row does not affect others.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use wharf_policy::compile::{Limits, Sizes};

use crate::{
    documents::{Documents, FeedRows, RefusedPolicy},
    error::PolicyError,
    inputs::{Input, Inputs},
    redirects::Owed,
    state::{Base, State},
};

/// Between attempts if no table has more room: the proxy may accept the rows now.
const RETRY: Duration = Duration::from_secs(600);

const WAITS: &str = "it is not tried yet: other policies do not fit; it is tried within seconds";

const UNACKNOWLEDGED: &str = "the proxy has not acknowledged the rules about requests; until then, their connections \
                              are dropped, or pass if failOpen says so";

/// Policies of the cluster feed that are not wholly in force.
#[derive(Debug, Default)]
pub struct FeedPolicies {
    /// Rows that do not fit, or that the proxy refuses.
    unfit: FeedRows,
    /// Limits, sizes and time of the last attempt with `unfit`.
    tried: Option<(Limits, Sizes, Instant)>,
    /// For the next attempts, last first.
    waiting: Vec<FeedRows>,
    /// Rows that this version cannot read.
    unreadable: BTreeSet<String>,
    refused: BTreeMap<String, RefusedPolicy>,
}

impl FeedPolicies {
    /// Forgets changed rows. `unreadable`: cause by unreadable row.
    pub fn replace(&mut self, rows: &FeedRows, unreadable: BTreeMap<String, String>) {
        for row in rows.keys().chain(unreadable.keys()) {
            self.refused.remove(row);
            self.unreadable.remove(row);
            self.unfit.remove(row);
            for part in &mut self.waiting {
                part.remove(row);
            }
        }
        self.unreadable.extend(unreadable.keys().cloned());
        let refusal = |why| RefusedPolicy { why, stale: false, conflict: false };
        self.refused.extend(unreadable.into_iter().map(|(row, why)| (row, refusal(why))));
    }

    /// Every row is readable.
    #[must_use]
    pub fn are_readable(&self) -> bool {
        self.unreadable.is_empty()
    }

    /// Rows wait for an attempt.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds rows, which are tried separately if they do not fit together.
    pub fn try_later(&mut self, rows: FeedRows) {
        // Removed rows make room first.
        let (gone, put): (FeedRows, FeedRows) = rows.into_iter().partition(|(_, policies)| policies.is_none());
        self.waiting.extend([put, gone]);
    }

    fn refuse(&mut self, row: &str, why: String, stale: bool) {
        self.refused.insert(row.to_owned(), RefusedPolicy { why, stale, conflict: false });
    }
}

impl State {
    /// The next rows to try, and the documents with them.
    pub fn next_rows(&mut self) -> Option<(FeedRows, Documents)> {
        let part = std::iter::from_fn(|| self.feed.waiting.pop()).find(|part| !part.is_empty())?;
        let documents = self.inputs.documents.with_rows(&part);
        Some((part, documents))
    }

    /// Takes the result for [`State::next_rows`]. Halves a part that does not fit.
    ///
    /// # Errors
    /// The attempt failed for another reason: the rows wait.
    pub fn tried_rows(
        &mut self,
        mut part: FeedRows,
        result: Result<(), PolicyError>,
        now: Instant,
    ) -> Result<bool, PolicyError> {
        let why = match result {
            Ok(()) => {
                part.keys().for_each(|row| drop(self.feed.refused.remove(row)));
                return Ok(true);
            }
            Err(why @ (PolicyError::Rows(_) | PolicyError::Proxy(_))) => why.to_string(),
            Err(why) => {
                self.feed.waiting.push(part);
                return Err(why);
            }
        };
        if let Some(half) = part.keys().nth(part.len() / 2).filter(|_| part.len() > 1).cloned() {
            let second = part.split_off(&half);
            self.feed.waiting.extend([second, part]);
            return Ok(false);
        }
        for (row, policies) in part {
            let is_stale = self.inputs.documents.has_row(&row);
            self.feed.refuse(&row, why.clone(), is_stale);
            self.feed.unfit.insert(row, policies);
        }
        self.feed.tried = Some((self.limits, self.sizes().unwrap_or_default(), now));
        Ok(false)
    }

    /// After the last attempt: refuses waiting rows for now.
    pub fn refuse_waiting(&mut self) {
        let waiting: Vec<String> = self.feed.waiting.iter().flat_map(BTreeMap::keys).cloned().collect();
        for row in waiting.iter().filter(|row| !self.feed.refused.contains_key(*row)).collect::<Vec<_>>() {
            let is_stale = self.inputs.documents.has_row(row);
            self.feed.refuse(row, WAITS.to_owned(), is_stale);
        }
    }

    /// Retries unfit rows after `RETRY`, or once a table has fewer rows or another limit.
    pub fn retry_unfit(&mut self, now: Instant) {
        let (Some((limits, sizes, at)), Some(have)) = (&self.feed.tried, self.sizes()) else { return };
        let is_less = have.ipcache < sizes.ipcache
            || have.ports < sizes.ports
            || have.rules < sizes.rules
            || have.sets < sizes.sets
            || have.listeners < sizes.listeners;
        let is_time = now.saturating_duration_since(*at) >= RETRY;
        if self.feed.waiting.is_empty() && (is_less || self.limits != *limits || is_time) {
            let unfit = std::mem::take(&mut self.feed.unfit);
            self.feed.waiting.extend((!unfit.is_empty()).then_some(unfit));
        }
    }

    /// Refuses policies of the cluster feed that do not fit. Writes no rows, so that the kernel's rows change once and
    /// no container is open meanwhile. Refuses nothing while the kernel's rows are unknown.
    ///
    /// # Errors
    /// The documents do not fit without policies of the cluster feed. Nothing has changed.
    pub fn fit(&mut self, mut documents: Documents, now: Instant) -> Result<Documents, PolicyError> {
        if self.base.engine().is_none() {
            return Ok(documents);
        }
        let rows = documents.take_rows();
        let mut trial = Trial { inputs: self.inputs.clone(), base: self.base.clone() };
        trial.take(documents, self)?;
        let mut waiting = vec![rows];
        while let Some(mut part) = waiting.pop() {
            let with = trial.inputs.documents.with_rows(&part);
            match trial.take(with, self) {
                Ok(()) => part.keys().for_each(|row| drop(self.feed.refused.remove(row))),
                Err(_) if part.len() > 1 => {
                    let half = part.keys().nth(part.len() / 2).cloned().unwrap_or_default();
                    let second = part.split_off(&half);
                    waiting.extend([second, part]);
                }
                Err(why) => {
                    for (row, policies) in part {
                        self.feed.refuse(&row, why.to_string(), false);
                        self.feed.unfit.insert(row, policies);
                    }
                    let sizes = trial.base.engine().map(|engine| engine.sizes()).unwrap_or_default();
                    self.feed.tried = Some((self.limits, sizes, now));
                }
            }
        }
        Ok(trial.inputs.documents)
    }

    /// Rows of the cluster feed that are not wholly in force, by key.
    #[must_use]
    pub fn refused_rows(&self) -> BTreeMap<String, RefusedPolicy> {
        let documents = &self.inputs.documents;
        let conflicts = documents.rows_in_conflict().into_iter();
        let mut refused: BTreeMap<_, _> =
            conflicts.map(|(row, why)| (row, RefusedPolicy { why, stale: false, conflict: true })).collect();
        refused.extend(self.feed.refused.clone());
        if matches!(self.proxy.owed, Owed::Answer { .. }) {
            let refusal = || RefusedPolicy { why: UNACKNOWLEDGED.to_owned(), stale: true, conflict: false };
            for row in documents.rows_with_requests() {
                refused.entry(row.clone()).or_insert_with(refusal);
            }
        }
        refused
    }
}

/// What the policies would be with rows that are tried.
struct Trial {
    inputs: Inputs,
    base: Base,
}

impl Trial {
    fn take(&mut self, documents: Documents, state: &State) -> Result<(), PolicyError> {
        let mut next = self.inputs.clone();
        let services = &state.settings.services;
        let events = next.apply(Input::Documents(documents), services);
        let (mut engine, events) = match (&self.base, events) {
            (Base::Inputs(engine), Some(events)) => (engine.clone(), events),
            (Base::Rows(engine, _), _) => (engine.clone(), next.all(services)),
            _ => return Ok(()),
        };
        engine.apply(events)?;
        *self = Self { inputs: next, base: Base::Inputs(engine) };
        Ok(())
    }
}
