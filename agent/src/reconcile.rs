//! The leak audit: slowly compares kernel and store, and repairs findings of two consecutive rounds, except an
//! operator's and containers' own. Logs each once.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use wharf_api::LogStatus;
use wharf_core::finding::{Mender, Problem};
use wharf_kit::sync::lock;

use crate::{
    audit::{AuditError, Audited, Key, Mend, audit_and, key_of},
    endpoint::orphan,
    findings::{self, Left},
    node::{lifecycle::Lifecycle, registry::Registry},
};

/// State between rounds.
#[derive(Debug, Default)]
pub struct Reconcile {
    last: BTreeSet<Key>,
    logged: BTreeSet<Problem>,
}

impl Reconcile {
    /// Runs a round. `told`: findings of the status.
    pub async fn run(&mut self, life: &Arc<Lifecycle>, told: &Mutex<Option<Left>>) -> Result<(), AuditError> {
        let kept =
            life.endpoints.leftovers.orphans.ids().into_iter().chain(life.endpoints.leftovers.out_of_service.ids());
        let guards: Vec<_> = kept.map(|id| life.endpoints.jobs.working_on(id)).collect();
        let outcome = audit_and(life, &Mend::Only(std::mem::take(&mut self.last))).await?;
        drop(guards);
        let left = outcome.left();
        let mut logged = BTreeSet::new();
        for audited in outcome.findings {
            self.log(&life.endpoints.registry, &audited);
            let Audited { finding, outcome } = audited;
            if !matches!(outcome, Some(Ok(()))) && is_the_agents(finding.problem.mender()) {
                self.last.insert(key_of(&finding.problem));
            }
            logged.insert(finding.problem);
        }
        self.logged = logged;
        *lock(told) = Some(left);
        Ok(orphan::forget_gone(life).await?)
    }

    fn log(&self, registry: &Registry, audited: &Audited) {
        let Audited { finding, outcome } = audited;
        let (problem, owner) = (&finding.problem, finding.owner.as_deref());
        let (object, subject) = (problem.object(), problem.subject());
        match outcome {
            Some(Ok(())) => tracing::warn!(object, subject, owner, "leak audit: {problem}: mended"),
            Some(Err(why)) => tracing::warn!(object, subject, owner, "leak audit: {problem}: not mended: {why}"),
            None if self.logged.contains(problem) => {}
            None => {
                tracing::info!(object, subject, owner, "leak audit: {problem}; remedy: {}", problem.remedy());
                if let (Mender::Container { .. }, Problem::Endpoint(id, _)) = (problem.mender(), problem)
                    && let Some(handle) = registry.get(*id)
                {
                    handle.shared.log(LogStatus::Warning, "audit", findings::in_words(problem));
                }
            }
        }
    }
}

const fn is_the_agents(mender: Mender) -> bool {
    match mender {
        Mender::Regeneration(_) | Mender::Repair => true,
        Mender::Removal | Mender::Container { .. } | Mender::Nobody | Mender::Operator => false,
    }
}
