//! A change of policy as a sequence of [`Effect`]s that the caller performs.
//!
//! At no time, also after a kill, does a packet pass that the states before and after the change both deny. The proxy
//! acknowledges the listeners of both states, the documents are saved, the rows change, then the proxy gets the new
//! state.
//!
//! A dropped transaction leaves the earlier inputs, or the new ones if a file may have them. Once the proxy or the
//! kernel may have part of the change, the kernel's rows count as unknown: the next transaction reads them and computes
//! everything.

use std::{sync::Arc, time::Instant};

use wharf_core::{kernel::KernelError, policy::RowChange};
use wharf_dns::cache::Cache;
use wharf_policy::compile::{EndpointKey, Engine, Event, ListenerId, Refused, Tables, TooLarge};

use crate::{
    documents::Documents,
    error::PolicyError,
    inputs::{Input, Inputs},
    redirects::{self, HANDSHAKES, Owed, Ports, ProxyError, Redirect, RedirectTable},
    rounds::Place,
    rows,
    state::{Awaited, Base, KernelRows, ProxyAnswer, ProxyUpdate, State},
};

/// Taken ports that a change skips at most.
const OTHER_PORTS: usize = 8;

/// File that is saved before rows change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    Nothing,
    Documents,
    /// The documents, without the feed's policies, if their file has other flags.
    ClusterFlag,
    Names,
}

/// How failures affect a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Rows that do not fit refuse the change. Otherwise, it stays wanted and is retried.
    pub can_be_refused: bool,
    /// A refusal by the proxy refuses the change.
    pub needs_proxy: bool,
    /// A kernel failure restores the inputs.
    pub needs_kernel: bool,
    /// File to save.
    pub saves: Saves,
}

impl Terms {
    /// An external event that the rows must follow.
    pub const FACT: Self =
        Self { can_be_refused: false, needs_proxy: false, needs_kernel: false, saves: Saves::Nothing };
    /// A new or changed endpoint.
    pub const ENDPOINT: Self = Self { can_be_refused: true, needs_kernel: true, ..Self::FACT };
    /// Answers of DNS.
    pub const ANSWERS: Self = Self { can_be_refused: true, saves: Saves::Names, ..Self::FACT };
    /// Names without addresses that expired.
    pub const EXPIRED_NAMES: Self = Self { saves: Saves::Names, ..Self::FACT };
    /// An operator's policies and labels.
    pub const DOCUMENTS: Self = Self { can_be_refused: true, needs_proxy: true, saves: Saves::Documents, ..Self::FACT };
    /// Rows of the cluster feed.
    pub const FEED: Self = Self { saves: Saves::ClusterFlag, ..Self::DOCUMENTS };
    /// Fitting rows of the cluster feed, after a start or a loss.
    pub const FITTED: Self = Self { saves: Saves::ClusterFlag, ..Self::FACT };
}

/// A file to write.
#[derive(Debug)]
pub enum File {
    /// Policies and labels.
    Documents {
        /// The content.
        documents: Documents,
        /// A failure refuses the change.
        is_required: bool,
    },
    /// Addresses of names; a failure is tolerated.
    Names(Cache),
}

/// For the caller to perform; the result goes to the linked method.
#[derive(Debug)]
pub enum Effect {
    /// [`Transaction::compute`], which may take long.
    Compute(Box<Transaction>),
    /// Read the kernel's rows: [`Transaction::kernel_read`].
    ReadKernel(Box<Transaction>),
    /// Create the kernel's part of redirects: [`Transaction::way_ensured`].
    EnsureWay(Box<Transaction>),
    /// Save ports and pass redirects to the proxy without an `await` between, then await acknowledgements:
    /// [`Transaction::proxy_updated`].
    UpdateProxy(ProxyUpdate, Box<Transaction>),
    /// Write a file: [`Transaction::saved`].
    Save(File, Box<Transaction>),
    /// Save ports, then change the kernel's rows: [`Transaction::written`].
    Write(Option<Ports>, Vec<RowChange>, Box<Transaction>),
    End(Result<(), PolicyError>),
}

/// A change of policy in progress.
#[derive(Debug)]
pub struct Transaction {
    terms: Terms,
    change: Vec<Input>,
    /// The kernel's rows are read even if known.
    reads: bool,
    isolation: Isolation,
    next: Inputs,
    /// `None`: everything must be computed.
    events: Option<Vec<Event>>,
    plan: Option<Plan>,
    ports: Option<Ports>,
    before: Inputs,
    was_active: bool,
    /// Earlier base while there is a plan, and the proxy's earlier redirects.
    base: Base,
    sent: RedirectTable,
    answer: Result<(), ProxyError>,
    avoided: usize,
    stage: Stage,
    /// Result after a file is written; `None`: the rows are next.
    end: Option<Result<(), PolicyError>>,
    /// True: a failure to save the documents refuses the change.
    documents_required: Option<bool>,
    now: Instant,
}

#[derive(Debug)]
struct Plan {
    engine: Engine,
    rows: Vec<RowChange>,
    redirects: RedirectTable,
    /// Members that lose some connections to a listener that stays.
    moved: Vec<Place>,
}

/// Isolation of endpoints, when earlier and new rows do not fit together.
#[derive(Debug, PartialEq, Eq)]
enum Isolation {
    None,
    Next,
    Done,
}

#[derive(Debug)]
enum Stage {
    /// Redirects of the kernel's rows. `has_rules`: the rows isolate endpoints.
    TakeOver { has_rules: bool },
    /// Redirects of both states.
    Both,
    /// Earlier redirects, before another attempt.
    Again,
    /// Redirects of the new state. `ends`: connections end.
    After { ends: bool },
    /// Earlier redirects, after a refusal.
    Revert(PolicyError),
}

impl Transaction {
    #[must_use]
    pub fn begin(state: &State, terms: Terms, change: Vec<Input>, now: Instant) -> Effect {
        let mut this = Self::new(state, terms, change, now);
        if let [input @ (Input::Endpoint(_) | Input::NoEndpoint(..))] = &this.change[..] {
            let is_put_back = matches!(input, Input::Endpoint(_)) && !terms.needs_kernel;
            this.apply(state);
            if this.events.as_ref().is_some_and(Vec::is_empty) && (!is_put_back || state.is_settled()) {
                return Effect::End(Ok(()));
            }
        }
        Effect::Compute(this)
    }

    /// As [`Transaction::begin`], after reading the kernel's rows.
    #[must_use]
    pub fn correct(state: &State, terms: Terms, change: Vec<Input>, now: Instant) -> Effect {
        let mut this = Self::new(state, terms, change, now);
        this.reads = true;
        Effect::Compute(this)
    }

    /// Removes due members that leave a listener, and begins due rounds.
    #[must_use]
    pub fn remove_due(state: &mut State, now: Instant) -> Effect {
        let is_due = state.next_to_go().is_some_and(|until| until <= now);
        let Some(tables) = state.tables().filter(|_| is_due) else { return Effect::End(Ok(())) };
        let redirects = redirects::wanted(tables, &state.inputs.members);
        Self::new(state, Terms::FACT, Vec::new(), now).send_after(state, &redirects)
    }

    fn new(state: &State, terms: Terms, change: Vec<Input>, now: Instant) -> Box<Self> {
        Box::new(Self {
            terms,
            change,
            reads: false,
            isolation: Isolation::None,
            next: state.inputs.clone(),
            events: Some(Vec::new()),
            plan: None,
            ports: None,
            before: Inputs::default(),
            was_active: state.is_active,
            base: Base::Unknown,
            sent: RedirectTable::new(),
            answer: Ok(()),
            avoided: 0,
            stage: Stage::Both,
            end: None,
            documents_required: None,
            now,
        })
    }

    fn apply(&mut self, state: &State) {
        for input in std::mem::take(&mut self.change) {
            match (self.next.apply(input, &state.settings.services), &mut self.events) {
                (Some(more), Some(events)) => events.extend(more),
                _ => self.events = None,
            }
        }
    }

    /// [`Transaction::compute`] is cheap at any table size: the kernel's rows are unknown or absent, or a new endpoint
    /// differs from a known one only by address.
    #[must_use]
    pub fn is_quick(&self, state: &State) -> bool {
        let Some(events) = self.events.as_deref().filter(|_| self.change.is_empty()) else { return false };
        match (&state.base, events) {
            (Base::Inputs(engine), [Event::Endpoint(key, member)]) => {
                engine.knows(*key, member) && !engine.tables().sets.contains_key(key)
            }
            (Base::Unknown, _) => true,
            _ => !state.is_active && !self.next.need_rows(),
        }
    }

    /// Result of [`Effect::Compute`].
    #[must_use]
    pub fn compute(mut self: Box<Self>, state: &mut State) -> Effect {
        self.apply(state);
        let is_known = !self.reads
            && match state.base {
                Base::Unknown => false,
                Base::Rows(..) => true,
                Base::Inputs(_) => self.events.is_some(),
            };
        if self.next.documents.is_lost() {
            return if is_known { self.keep_lost(state) } else { Effect::ReadKernel(self) };
        }
        if !state.is_active && !self.next.need_rows() {
            self.adopt(state);
            return self.save(state, Some(Ok(())));
        }
        if is_known { self.plan(state) } else { Effect::ReadKernel(self) }
    }

    #[must_use]
    pub fn kernel_read(mut self: Box<Self>, state: &mut State, kernel: Result<KernelRows, KernelError>) -> Effect {
        let kernel = match kernel {
            Ok(kernel) => kernel,
            Err(why) => return self.fail(state, why.into()),
        };
        self.reads = false;
        let (base, has_rules) = state.take_kernel_rows(kernel, &mut self.next);
        // Until the proxy has the redirects of these rows.
        (self.base, state.base) = (base, Base::Unknown);
        self.stage = Stage::TakeOver { has_rules };
        let mut redirects = state.proxy.sent.clone();
        state.proxy.rounds.tell(&mut redirects);
        state.proxy.sent.clone_from(&redirects);
        // Unconditional, because an earlier agent may have given the proxy others.
        Effect::UpdateProxy(ProxyUpdate { redirects: Some(redirects), ..ProxyUpdate::default() }, self)
    }

    #[must_use]
    pub fn way_ensured(self: Box<Self>, state: &mut State, made: Result<(), KernelError>) -> Effect {
        state.proxy.has_way = made.is_ok();
        match made {
            Ok(()) => self.propose(state),
            Err(why) => self.fail(state, why.into()),
        }
    }

    /// Result of [`Effect::UpdateProxy`].
    #[must_use]
    pub fn proxy_updated(mut self: Box<Self>, state: &mut State, answer: ProxyAnswer, now: Instant) -> Effect {
        let ProxyAnswer { is_kept, answer, outstanding } = answer;
        self.now = now;
        self.keep_ports(state, is_kept);
        match std::mem::replace(&mut self.stage, Stage::Both) {
            Stage::TakeOver { has_rules } => {
                state.base = std::mem::replace(&mut self.base, Base::Unknown);
                if state.proxy.owed == Owed::Nothing && !outstanding.is_empty() {
                    // The previous agent may not have sent the proxy a round.
                    state.proxy.owed = Owed::Answer { ends: state.proxy.rounds.is_any() };
                }
                if self.next.documents.is_lost() && has_rules {
                    // An empty write sets the agent's mode.
                    return Effect::Write(None, Vec::new(), self);
                }
                Effect::Compute(self)
            }
            Stage::Both => self.proposed(state, answer),
            Stage::Again => Effect::ReadKernel(self),
            Stage::After { ends } => {
                state.set_owed(ends, self.answer.and(answer), now);
                state.look_at_owed(&outstanding, now);
                Effect::End(Ok(()))
            }
            Stage::Revert(why) => {
                (state.base, state.is_active) = (self.base, self.was_active);
                Effect::End(Err(why))
            }
        }
    }

    #[must_use]
    pub fn saved(mut self: Box<Self>, state: &mut State, done: Result<(), PolicyError>, now: Instant) -> Effect {
        self.now = now;
        let saved_documents = self.documents_required.take();
        match (saved_documents, done) {
            (Some(_), Ok(())) => state.set_kept(),
            (Some(true), Err(why)) => {
                state.inputs = std::mem::take(&mut self.before);
                return self.revert(state, why);
            }
            _ => {}
        }
        if saved_documents.is_some() && self.terms.saves == Saves::Names {
            return Effect::Save(File::Names(state.inputs.names.clone()), self);
        }
        self.proceed(state)
    }

    /// Result of [`Effect::Write`]. `is_kept`: the file has the ports.
    #[must_use]
    pub fn written(
        mut self: Box<Self>,
        state: &mut State,
        is_kept: bool,
        done: Result<(), KernelError>,
        now: Instant,
    ) -> Effect {
        self.now = now;
        self.keep_ports(state, is_kept);
        match (done, self.plan.take()) {
            (Ok(()), Some(Plan { engine, .. })) if self.isolation == Isolation::Next => {
                tracing::warn!(
                    "the earlier and the new rows of policy do not fit together: endpoints with policies are isolated \
                     until their rows are written"
                );
                state.base = Base::Inputs(engine);
                state.rebase();
                self.next.clone_from(&state.inputs);
                self.isolation = Isolation::Done;
                Effect::Compute(self)
            }
            (Ok(()), Some(Plan { engine, redirects, moved, .. })) => {
                moved.into_iter().for_each(|place| state.proxy.rounds.put_off(place, now + HANDSHAKES));
                state.base = Base::Inputs(engine);
                self.send_after(state, &redirects)
            }
            (Ok(()), None) => self.keep_lost(state),
            (Err(why), None) => self.fail(state, why.into()),
            (Err(why), Some(_)) => {
                let why = PolicyError::from(why);
                state.problem = Some(why.to_string());
                if self.terms.needs_kernel {
                    state.inputs = self.before;
                }
                Effect::End(Err(why))
            }
        }
    }

    fn keep_ports(&mut self, state: &mut State, is_kept: bool) {
        if let Some(ports) = self.ports.take().filter(|_| is_kept) {
            state.proxy.kept = ports;
        }
    }

    fn plan(mut self: Box<Self>, state: &mut State) -> Effect {
        let Some(engine) = state.base.engine() else { return Effect::ReadKernel(self) };
        let mut engine = engine.clone().without_listeners(Arc::clone(&state.proxy.taken));
        let before = engine.tables().clone();
        let events = match (&state.base, self.events.take()) {
            (Base::Inputs(_), Some(events)) => events,
            _ if self.isolation == Isolation::Next => self.next.isolated(&before),
            _ => self.next.all(&state.settings.services),
        };
        let changes = match engine.apply(events) {
            Ok(changes) => changes,
            // Changed rows get new numbers. Without isolation, a start could not restore policies that were in force.
            Err(Refused::TooLarge(TooLarge { during: true, .. })) if self.fits_after_isolation(state, &before) => {
                self.isolation = Isolation::Next;
                return Effect::Compute(self);
            }
            Err(why) => return self.refuse(state, PolicyError::Rows(why)),
        };
        let rows = state.rows_of(&self.next, &changes);
        let redirects = redirects::wanted(engine.tables(), &self.next.members);
        let place = |(port, key): (ListenerId, EndpointKey)| {
            let id = rows::endpoint(key)?;
            let member = (id, self.next.members.get(id)?.epoch);
            redirects.get(&port.0)?.members.contains_key(&member).then_some((port.0, member))
        };
        let moved = before.moved(engine.tables()).into_iter().filter_map(place).collect();
        let needs_way = !redirects.is_empty() && !state.proxy.has_way;
        self.plan = Some(Plan { engine, rows, redirects, moved });
        self.base = std::mem::replace(&mut state.base, Base::Unknown);
        // From here on, proxy or kernel may have a part of the change.
        state.is_active = true;
        if needs_way {
            state.proxy.may_have_way = true;
            return Effect::EnsureWay(self);
        }
        self.propose(state)
    }

    fn fits_after_isolation(&self, state: &State, before: &Tables) -> bool {
        let Base::Rows(engine, _) = &state.base else { return false };
        if self.isolation != Isolation::None || self.terms.can_be_refused {
            return false;
        }
        let mut engine = engine.clone();
        let isolated = engine.apply(self.next.isolated(before)).map(|_| state.engine(engine.into_tables()));
        isolated.is_ok_and(|mut engine| engine.apply(self.next.all(&state.settings.services)).is_ok())
    }

    fn propose(mut self: Box<Self>, state: &mut State) -> Effect {
        let after = self.plan.as_ref().map(|plan| &plan.redirects);
        let both = after.map(|after| redirects::both(&state.proxy.sent, after)).unwrap_or_default();
        let is_new = |(port, redirect): &(&u16, &Redirect)| state.proxy.sent.get(port) != Some(*redirect);
        let new = both.iter().filter(is_new).map(|(port, _)| *port).collect();
        self.sent.clone_from(&state.proxy.sent);
        // Without redirects that earlier changes await.
        self.send(state, both, Awaited::Ports(new), Stage::Both)
    }

    fn proposed(mut self: Box<Self>, state: &mut State, answer: Result<(), ProxyError>) -> Effect {
        match answer {
            // A taken port that rows already lead to is not replaced.
            Err(ProxyError::Taken(port, why))
                if self.avoided < OTHER_PORTS && Arc::make_mut(&mut state.proxy.taken).insert(port) =>
            {
                tracing::warn!(port, "the proxy cannot have a port, and takes another one: {why}");
                self.avoided += 1;
                self.plan = None;
                let sent = self.sent.clone();
                self.send(state, sent, Awaited::Nothing, Stage::Again)
            }
            Err(ProxyError::Refused(why) | ProxyError::Taken(_, why)) if self.terms.needs_proxy => {
                self.revert(state, PolicyError::Proxy(why))
            }
            answer => {
                self.answer = answer;
                self.adopt(state);
                self.save(state, None)
            }
        }
    }

    fn send(
        mut self: Box<Self>,
        state: &mut State,
        redirects: RedirectTable,
        awaited: Awaited,
        stage: Stage,
    ) -> Effect {
        let update = state.update_proxy(redirects, awaited);
        self.ports.clone_from(&update.ports);
        self.stage = stage;
        Effect::UpdateProxy(update, self)
    }

    fn send_after(mut self: Box<Self>, state: &mut State, redirects: &RedirectTable) -> Effect {
        let (update, ends) = state.update_after(redirects, self.now);
        self.ports.clone_from(&update.ports);
        self.stage = Stage::After { ends };
        Effect::UpdateProxy(update, self)
    }

    /// From here on, the change is wanted.
    fn adopt(&mut self, state: &mut State) {
        self.before = std::mem::replace(&mut state.inputs, std::mem::take(&mut self.next));
        state.is_active |= state.inputs.need_rows();
    }

    /// Saves the terms' files before the rows or `end`.
    fn save(mut self: Box<Self>, state: &mut State, end: Option<Result<(), PolicyError>>) -> Effect {
        let documents = &state.inputs.documents;
        let is_required = match self.terms.saves {
            Saves::Documents => true,
            Saves::ClusterFlag => documents.flags() != state.kept_flags,
            Saves::Nothing | Saves::Names => false,
        };
        let has_rows = end.is_none() && self.plan.as_ref().is_some_and(|plan| !plan.rows.is_empty());
        self.end = end;
        // A start that finds rows but no file considers the policies lost.
        if is_required || (has_rows && !state.is_kept) {
            self.documents_required = Some(is_required);
            return Effect::Save(File::Documents { documents: documents.clone(), is_required }, self);
        }
        if self.terms.saves == Saves::Names {
            return Effect::Save(File::Names(state.inputs.names.clone()), self);
        }
        self.proceed(state)
    }

    fn proceed(mut self: Box<Self>, state: &mut State) -> Effect {
        if let Some(end) = self.end.take() {
            if end.is_ok() {
                (state.realized, state.problem) = (state.inputs.documents.revision, None);
            }
            return Effect::End(end);
        }
        let Some(Plan { rows, moved, .. }) = &mut self.plan else { return Effect::End(Ok(())) };
        // Saved with the ports: the next agent ends the connections if this one does not.
        for place in moved.iter() {
            state.proxy.rounds.begin(*place, self.now + HANDSHAKES);
        }
        let rows = std::mem::take(rows);
        self.ports = state.ports_of(&state.proxy.sent);
        state.writes += 1;
        Effect::Write(self.ports.clone(), rows, self)
    }

    /// Restores the state before the change.
    fn revert(mut self: Box<Self>, state: &mut State, why: PolicyError) -> Effect {
        if self.plan.take().is_none() {
            state.is_active = self.was_active;
            return Effect::End(Err(why));
        }
        let sent = std::mem::take(&mut self.sent);
        self.send(state, sent, Awaited::Nothing, Stage::Revert(why))
    }

    fn refuse(mut self: Box<Self>, state: &mut State, why: PolicyError) -> Effect {
        if self.terms.can_be_refused {
            return Effect::End(Err(why));
        }
        state.problem = Some(why.to_string());
        state.rebase();
        self.adopt(state);
        self.save(state, Some(Err(why)))
    }

    /// The change stays wanted and is retried.
    fn fail(mut self: Box<Self>, state: &mut State, why: PolicyError) -> Effect {
        state.base = Base::Unknown;
        self.plan = None;
        if !self.terms.needs_kernel || state.is_active {
            state.problem = Some(why.to_string());
        }
        if self.terms.needs_kernel {
            return Effect::End(Err(why));
        }
        self.adopt(state);
        self.save(state, Some(Err(why)))
    }

    /// Keeps the rows of lost policies. The change takes effect when the policies are replaced.
    fn keep_lost(mut self: Box<Self>, state: &mut State) -> Effect {
        let documents = &self.next.documents;
        let why = PolicyError::Lost { path: state.settings.file.clone(), of_cluster: documents.is_cluster_lost() };
        state.problem = Some(why.to_string());
        if self.terms.needs_kernel {
            return Effect::End(Err(why));
        }
        self.adopt(state);
        self.save(state, Some(Err(why)))
    }
}
