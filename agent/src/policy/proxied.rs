//! That the proxy has what rows lead to, before they do and as long as they do.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use wharf_core::{kernel::PolicyKernel, policy::PolicyRows};
use wharf_policy::compile::Tables;

use super::{Policy, error::PolicyError, inner::Inner, redirects, rows};
use crate::proxy::{Completion, Wanted};

/// How long connections to the proxy may last after nothing leads there: Envoy ends them after 2 s.
const PROXY_DRAINS: Duration = Duration::from_secs(4);

impl<K: PolicyKernel> Policy<K> {
    /// Looks whether the proxy has acknowledged what it had not, and whether it is needed.
    pub(super) async fn look_at_proxy(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        if inner.unacknowledged {
            let outstanding = self.redirects.outstanding();
            inner.unacknowledged = !outstanding.is_empty();
            if inner.unacknowledged {
                inner.problem = Some(unacknowledged(&outstanding));
            } else {
                (inner.realized, inner.problem) = (inner.wanted.revision, None);
            }
        }
        self.leave_proxy(inner).await
    }

    /// Takes the way to the proxy away when nothing has led there for as long as the proxy lets old connections end.
    async fn leave_proxy(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        if !inner.told.is_empty() || !self.uses_proxy() {
            inner.left_proxy = None;
            return Ok(());
        }
        if inner.left_proxy.get_or_insert_with(Instant::now).elapsed() < PROXY_DRAINS {
            return Ok(());
        }
        self.uses_proxy.store(false, Ordering::Relaxed);
        wharf_crash::point("policy/before-way-removal");
        self.kernel.ensure_way_to_proxy(false).await?;
        wharf_crash::point("policy/after-way-removal");
        Ok(())
    }

    /// The tables that these rows are, whose redirects the proxy goes on with.
    pub(super) fn take_over(&self, inner: &mut Inner, rows: &PolicyRows) -> Tables {
        let tables = rows::tables(rows, &inner.listeners);
        inner.told = redirects::both(&inner.told, &redirects::wanted(&tables, &inner.members));
        // Rows lead there already, so nobody waits.
        drop(self.redirects.set(inner.told.clone()));
        tables
    }

    /// Tells the proxy what it is to do, and keeps the ports.
    pub(super) fn tell_proxy(&self, inner: &mut Inner, wanted: Wanted) -> Vec<(String, Completion)> {
        if wanted == inner.told {
            return Vec::new();
        }
        let listeners = redirects::listeners(&wanted);
        if listeners != inner.listeners {
            wharf_crash::point("policy/before-ports");
            match redirects::save(&self.redirects_file, listeners.clone()) {
                Ok(()) => inner.listeners = listeners,
                Err(why) => {
                    let file = self.redirects_file.display();
                    tracing::warn!(%file, "keep the proxy's ports: {why}; after a restart connections through the proxy begin anew");
                }
            }
        }
        inner.told.clone_from(&wanted);
        let asked = self.redirects.set(wanted);
        wharf_crash::point("policy/after-telling");
        asked
    }

    /// Waits for what the proxy was told, as long as it is worth while; an error says what it has not acknowledged.
    pub(super) async fn await_proxy(&self, asked: Vec<(String, Completion)>) -> Result<(), String> {
        if asked.is_empty() {
            return Ok(());
        }
        let all = futures::future::join_all(asked.into_iter().map(|(_, completion)| completion));
        let answered = tokio::time::timeout(self.redirects.patience(), all).await;
        wharf_crash::point("policy/after-acknowledgement");
        match answered {
            Ok(answers) if answers.iter().all(Result::is_ok) => Ok(()),
            _ => Err(unacknowledged(&self.redirects.outstanding())),
        }
    }
}

/// What the proxy has not acknowledged, for the user.
fn unacknowledged(outstanding: &[String]) -> String {
    let (first, more) =
        (outstanding.first().map_or("nothing answers", String::as_str), outstanding.len().saturating_sub(1));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!(
        "the proxy does not do what policy asks: {first}{more}; its connections are dropped, or pass if failOpen says so, until it does"
    )
}
