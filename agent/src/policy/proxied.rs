//! After a change, the proxy ends connections of earlier rules.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::time::Instant;
use wharf_enforce::{redirects::Owed, state::PROXY_DRAINS, transaction::Transaction};

use super::{Guard, Policy, error::PolicyError, now};

const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// Later rows of the cluster feed wait meanwhile.
const SETTLES: Duration = Duration::from_secs(10);

impl Policy {
    /// Returns at `end`, or when connections of earlier rules have ended.
    pub(super) async fn settled(&self, revision: u64, end: Option<Instant>) -> u64 {
        let mut first_answer = Some(Instant::now() + FIRST_ANSWER);
        loop {
            let mut inner = self.lock().await;
            inner = self.let_go(inner).await;
            let state = &inner.state;
            let until = state.next_to_go().or(match state.owed() {
                Owed::Ends(until) => Some(until),
                Owed::Nothing | Owed::Answer { .. } => None,
            });
            let until = until.map(Instant::from_std);
            let waits = state.realized() < revision && state.inputs().documents.revision == revision;
            let is_first = state.realized() == 0 && matches!(state.owed(), Owed::Answer { .. });
            if let Some(until) = first_answer.take_if(|_| waits && is_first) {
                drop(inner);
                drop(tokio::time::timeout_at(until, self.proxy.redirects.answered()).await);
                continue;
            }
            let is_late = end.is_some_and(|end| end <= Instant::now());
            let Some(until) = until.filter(|_| waits && !is_late) else { return state.realized() };
            drop(inner);
            tokio::time::sleep_until(end.map_or(until, |end| end.min(until))).await;
        }
    }

    /// Waits at most 10 s until the proxy has answered and earlier connections have ended. Waits for an acknowledgement
    /// within the proxy's patience; [`Policy::refused_rows`] has the rows that depend on it.
    pub async fn settle(&self) {
        let end = Instant::now() + SETTLES;
        drop(tokio::time::timeout(self.proxy.redirects.patience(), self.proxy.redirects.answered()).await);
        let revision = self.lock().await.state.inputs().documents.revision;
        self.settled(revision, Some(end)).await;
    }

    pub(super) async fn look_at_proxy(&self, inner: Guard) -> Result<Guard, PolicyError> {
        let mut inner = self.let_go(inner).await;
        if matches!(inner.state.owed(), Owed::Answer { .. }) {
            // The cause of a refusal may be gone.
            drop(self.proxy.redirects.set(inner.state.redirects().clone()));
        }
        self.leave_proxy(&mut inner).await?;
        Ok(inner)
    }

    async fn let_go(&self, mut inner: Guard) -> Guard {
        let effect = Transaction::remove_due(&mut inner.state, now());
        (inner, _) = self.perform(inner, effect).await;
        if inner.state.owed() != Owed::Nothing {
            inner.state.look_at_owed(&self.proxy.redirects.outstanding(), now());
        }
        inner
    }

    /// Removes the path [`PROXY_DRAINS`] after the last listener: a busy Envoy needs that time.
    async fn leave_proxy(&self, inner: &mut Guard) -> Result<(), PolicyError> {
        let state = &inner.state;
        if !state.redirects().is_empty() || !state.may_have_way() || matches!(state.owed(), Owed::Ends(_)) {
            inner.left_proxy = None;
            return Ok(());
        }
        if inner.left_proxy.get_or_insert_with(Instant::now).elapsed() < PROXY_DRAINS {
            return Ok(());
        }
        wharf_crash::point("policy/before-way-removal");
        self.kernel.ensure_way_to_proxy(false).await?;
        self.uses_proxy.store(false, Ordering::Relaxed);
        inner.state.remove_way();
        wharf_crash::point("policy/after-way-removal");
        Ok(())
    }
}
