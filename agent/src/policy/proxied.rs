//! Keeps the proxy in step: it has each listener before rows lead there, and as long as they do.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use tokio::time::Instant;
use wharf_core::policy::{PolicyRows, RowChange};
use wharf_policy::compile::{EndpointKey, Engine, ListenerId, Tables};

use super::{
    Change, Computed, Guard, Policy,
    error::PolicyError,
    inner::Inner,
    or_problem,
    redirects::{self, HANDSHAKES, Listeners, Owed, Ports},
    rounds::Place,
    rows,
};
use crate::proxy::{Completion, ProxyError, Redirect, Wanted};

/// Until connections end after an acknowledgement: Envoy takes 2 s.
const PROXY_DRAINS: Duration = Duration::from_millis(2_500);

const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// Of [`Policy::settle`]. Later rows of the cluster feed wait meanwhile.
const SETTLES: Duration = Duration::from_secs(10);

/// Ports of other programs that a change avoids.
const OTHER_PORTS: usize = 8;

pub(super) struct Prepared {
    engine: Engine,
    rows: Vec<RowChange>,
    after: Wanted,
    /// As `moved` of [`Change`].
    moved: Vec<Place>,
    pub(super) acknowledged: Result<(), ProxyError>,
}

impl Policy {
    /// Sends the proxy both states and waits within its patience. The engine stays unknown until the kernel has the
    /// rows: after a cancellation, the next change computes everything.
    pub(super) async fn prepare(&self, inner: &mut Inner, computed: Computed) -> Result<Option<Prepared>, PolicyError> {
        let Some(Change { engine, rows, moved }) = computed? else { return Ok(None) };
        inner.engine = None;
        let after = redirects::wanted(engine.tables(), &inner.members);
        if !after.is_empty() && !self.uses_proxy.swap(true, Ordering::Relaxed) {
            let made = self.kernel.ensure_way_to_proxy(true).await;
            self.uses_proxy.store(made.is_ok(), Ordering::Relaxed);
            or_problem(inner, made)?;
            wharf_crash::point("policy/after-way");
        }
        let both = redirects::both(&inner.told, &after);
        let is_new = |(port, redirect): &(&u16, &Redirect)| inner.told.get(port) != Some(*redirect);
        let new: BTreeSet<_> = both.iter().filter(is_new).map(|(port, redirect)| redirect.name(*port)).collect();
        let mut asked = self.tell_proxy(inner, both);
        // Earlier refusals do not concern this change.
        asked.retain(|(name, _)| new.contains(name));
        let place = |(port, key): (ListenerId, EndpointKey)| {
            let id = rows::endpoint(key)?;
            let member = (id, inner.members.get(id)?.epoch);
            after.get(&port.0)?.members.contains_key(&member).then_some((port.0, member))
        };
        let moved = moved.into_iter().filter_map(place).collect();
        let acknowledged = self.await_proxy(asked).await;
        Ok(Some(Prepared { engine, rows, after, moved, acknowledged }))
    }

    /// [`Self::prepare`], but avoids ports of other programs.
    pub(super) async fn propose(
        &self,
        mut inner: Guard,
        computed: Computed,
    ) -> (Guard, Result<Option<Prepared>, PolicyError>) {
        let told = inner.told.clone();
        let mut prepared = self.prepare(&mut inner, computed).await;
        for _ in 0..OTHER_PORTS {
            let Ok(Some(Prepared { acknowledged: Err(ProxyError::Taken(port, why)), .. })) = &prepared else { break };
            // A port that rows already lead to stays.
            if !Arc::make_mut(&mut inner.taken).insert(*port) {
                break;
            }
            tracing::warn!(port, "the proxy cannot have a port, and takes another one: {why}");
            drop(self.tell_proxy(&mut inner, told.clone()));
            // Computes everything.
            let (guard, computed) = self.compute(inner, Vec::new()).await;
            inner = guard;
            prepared = self.prepare(&mut inner, computed).await;
        }
        (inner, prepared)
    }

    pub(super) async fn write(&self, inner: &mut Inner, prepared: Prepared) -> Result<(), PolicyError> {
        let Prepared { engine, rows, after, moved, acknowledged } = prepared;
        if !inner.kept && !rows.is_empty() {
            // Safe: a start that finds these rows and no file keeps them.
            self.keep_or_warn(inner, "the next start takes them for lost").await;
        }
        // Saved first: the next agent ends the connections if this one does not.
        moved.iter().for_each(|place| inner.rounds.begin(*place, Instant::now() + HANDSHAKES));
        self.keep_ports(inner, redirects::listeners(&inner.told));
        inner.writes += 1;
        let changed = self.kernel.change_policy(rows, self.mode).await;
        or_problem(inner, changed)?;
        wharf_crash::point("policy/realized");
        moved.into_iter().for_each(|place| inner.rounds.put_off(place, Instant::now() + HANDSHAKES));
        inner.engine = Some(engine);
        self.tell_after(inner, &after, acknowledged).await;
        Ok(())
    }

    /// For rows that lead only to `after`. `acknowledged`: the answer to the previous state.
    async fn tell_after(&self, inner: &mut Inner, after: &Wanted, mut acknowledged: Result<(), ProxyError>) {
        let now = Instant::now();
        let Inner { told, members, outgoing, rounds, .. } = inner;
        let mut wanted = redirects::with_outgoing(after, told, members, outgoing, now);
        rounds.pass(&wanted, now);
        rounds.tell(&mut wanted);
        let ends = redirects::end(told, &wanted, members);
        let asked = self.tell_proxy(inner, wanted);
        if ends {
            acknowledged = acknowledged.and(self.await_proxy(asked).await);
        }
        inner.owed = match (acknowledged, inner.owed) {
            (Ok(()), Owed::Answer { .. }) if ends => Owed::Answer { ends },
            (Ok(()), _) if ends => Owed::Ends(Instant::now() + PROXY_DRAINS),
            // An earlier answer may be outstanding.
            (Ok(()), owed) => owed,
            (Err(_), owed) => Owed::Answer { ends: ends || owed.ends() },
        };
        self.look_at_owed(inner);
    }

    /// Removes due members and begins due rounds.
    async fn let_go(&self, inner: &mut Inner) {
        let is_due = inner.next_to_go().is_some_and(|until| until <= Instant::now());
        let after = inner.tables().filter(|_| is_due).map(|tables| redirects::wanted(tables, &inner.members));
        if let Some(after) = after {
            self.tell_after(inner, &after, Ok(())).await;
        }
    }

    /// Updates `owed`; a revision is realized when the proxy owes nothing.
    fn look_at_owed(&self, inner: &mut Inner) {
        if let Owed::Answer { ends } = inner.owed {
            let outstanding = self.redirects.outstanding();
            if !outstanding.is_empty() {
                inner.problem = Some(unacknowledged(&outstanding));
                return;
            }
            inner.owed = if ends { Owed::Ends(Instant::now() + PROXY_DRAINS) } else { Owed::Nothing };
        }
        inner.owed = match inner.owed {
            Owed::Ends(until) if until <= Instant::now() => Owed::Nothing,
            owed => owed,
        };
        if inner.owed != Owed::Nothing || !inner.outgoing.is_empty() || inner.rounds.next().is_some() {
            // Changes without a revision also end connections.
            inner.realized = inner.realized.min(inner.wanted.revision.saturating_sub(1));
            let seconds = PROXY_DRAINS.as_secs() + 1;
            inner.problem = Some(format!("the proxy ends connections of before the change; that takes {seconds} s"));
            return;
        }
        // Without an engine, the kernel refused later rows.
        if inner.engine.is_some() {
            (inner.realized, inner.problem) = (inner.wanted.revision, None);
        }
    }

    /// Returns once connections judged by earlier rules have ended, or at `end`.
    pub(super) async fn settled(&self, revision: u64, end: Option<Instant>) -> u64 {
        // A running Envoy reconnects within a second.
        let mut first_answer = Some(Instant::now() + FIRST_ANSWER);
        loop {
            let mut inner = self.lock().await;
            self.let_go(&mut inner).await;
            if inner.owed != Owed::Nothing {
                self.look_at_owed(&mut inner);
            }
            let until = inner.next_to_go().or(match inner.owed {
                Owed::Ends(until) => Some(until),
                _ => None,
            });
            let waits = inner.realized < revision && inner.wanted.revision == revision;
            let is_first = inner.realized == 0 && matches!(inner.owed, Owed::Answer { .. });
            if let Some(until) = first_answer.take_if(|_| waits && is_first) {
                drop(inner);
                drop(tokio::time::timeout_at(until, self.redirects.answered()).await);
                continue;
            }
            let is_late = end.is_some_and(|end| end <= Instant::now());
            let Some(until) = until.filter(|_| waits && !is_late) else { return inner.realized };
            drop(inner);
            tokio::time::sleep_until(end.map_or(until, |end| end.min(until))).await;
        }
    }

    /// Waits until the proxy has answered and no connection is judged by earlier rules, at most 10 s. A proxy that has
    /// not acknowledged is waited for within its patience: [`Policy::refused_rows`] has the rows that depend on it.
    pub async fn settle(&self) {
        let end = Instant::now() + SETTLES;
        drop(tokio::time::timeout(self.redirects.patience(), self.redirects.answered()).await);
        let revision = self.lock().await.wanted.revision;
        self.settled(revision, Some(end)).await;
    }

    pub(super) async fn look_at_proxy(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        self.let_go(inner).await;
        if inner.owed != Owed::Nothing {
            self.look_at_owed(inner);
        }
        if matches!(inner.owed, Owed::Answer { .. }) {
            // The cause of a refusal may be gone.
            drop(self.redirects.set(inner.told.clone()));
        }
        self.leave_proxy(inner).await
    }

    /// Removes the path [`PROXY_DRAINS`] after the last listener: a busy Envoy needs that time.
    async fn leave_proxy(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        if !inner.told.is_empty() || !self.uses_proxy() || matches!(inner.owed, Owed::Ends(_)) {
            inner.left_proxy = None;
            return Ok(());
        }
        if inner.left_proxy.get_or_insert_with(Instant::now).elapsed() < PROXY_DRAINS {
            return Ok(());
        }
        wharf_crash::point("policy/before-way-removal");
        self.kernel.ensure_way_to_proxy(false).await?;
        self.uses_proxy.store(false, Ordering::Relaxed);
        wharf_crash::point("policy/after-way-removal");
        Ok(())
    }

    /// The proxy keeps the rows' redirects.
    pub(super) fn take_over(&self, inner: &mut Inner, rows: &PolicyRows) -> Tables {
        inner.isolate_unrecorded(rows);
        let tables = rows::tables(rows, &inner.kept_ports.listeners);
        let mut there = redirects::both(&inner.told, &redirects::wanted(&tables, &inner.members));
        inner.rounds.tell(&mut there);
        inner.told = there;
        // Rows lead there already.
        drop(self.redirects.set(inner.told.clone()));
        if inner.owed == Owed::Nothing && !self.redirects.outstanding().is_empty() {
            // The previous agent may not have sent the proxy a round.
            inner.owed = Owed::Answer { ends: inner.rounds.is_any() };
        }
        tables
    }

    fn keep_ports(&self, inner: &mut Inner, listeners: Listeners) {
        let ports = Ports { listeners, rounds: inner.rounds.numbers().clone() };
        if ports == inner.kept_ports {
            return;
        }
        wharf_crash::point("policy/before-ports");
        match redirects::save(&self.redirects_file, &ports) {
            Ok(()) => inner.kept_ports = ports,
            Err(why) => {
                let file = self.redirects_file.display();
                tracing::warn!(%file, "keep the proxy's ports: {why}; after a restart connections through the proxy begin anew");
            }
        }
    }

    pub(super) fn tell_proxy(&self, inner: &mut Inner, mut wanted: Wanted) -> Vec<(String, Completion)> {
        inner.rounds.tell(&mut wanted);
        self.keep_ports(inner, redirects::listeners(&wanted));
        if wanted == inner.told {
            return Vec::new();
        }
        inner.told.clone_from(&wanted);
        let asked = self.redirects.set(wanted);
        wharf_crash::point("policy/after-telling");
        asked
    }

    async fn await_proxy(&self, asked: Vec<(String, Completion)>) -> Result<(), ProxyError> {
        if asked.is_empty() {
            return Ok(());
        }
        let mut answers: FuturesUnordered<_> = asked.into_iter().map(|(_, completion)| completion).collect();
        let late = |_| ProxyError::NoAnswer("the proxy does not answer".to_owned());
        let all = async {
            let mut unanswered = Ok(());
            while let Some(answer) = answers.next().await {
                match answer {
                    Err(refused @ (ProxyError::Refused(_) | ProxyError::Taken(..))) => return Err(refused),
                    other => unanswered = unanswered.and(other),
                }
            }
            unanswered
        };
        let answered = tokio::time::timeout(self.redirects.patience(), all).await;
        wharf_crash::point("policy/after-acknowledgement");
        answered.map_err(late)?
    }
}

fn unacknowledged(outstanding: &[String]) -> String {
    let (first, more) =
        (outstanding.first().map_or("nothing answers", String::as_str), outstanding.len().saturating_sub(1));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!(
        "the proxy does not do what policy asks: {first}{more}; its connections are dropped, or pass if failOpen says so, until it does"
    )
}
