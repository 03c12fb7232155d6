//! State of an endpoint: written by its task, read by others.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use ipnet::IpNet;
use tokio::{
    sync::{Notify, futures::Notified, mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::Span;
use wharf_api::{ContainerRoute, EndpointLogEntry, EndpointMode, EndpointStatus, LogStatus, StepError};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    endpoint::{EndpointRecord, IpOwner},
    ids::{EndpointId, Epoch},
    kernel::KernelError,
    plan::DeleteOptions,
    state::{Fsm, Level, State},
    store::Lease,
    timeline::{Ended, Entries, Entry, Life, Operation, Outcome, Who},
};
use wharf_kit::{
    clock,
    sync::lock,
    telemetry::operation::{self, OpId},
};

use crate::node::{edit::Edit, error::CommandError};

/// About 10 KiB.
const LOG_LINES: usize = 64;

/// A snapshot.
#[derive(Debug, Clone)]
pub struct View {
    /// Interface indexes are 0 until the link exists.
    pub record: EndpointRecord,
    /// State machine.
    pub fsm: Fsm,
    /// For the API.
    pub status: EndpointStatus,
    /// Begin of the current step.
    pub step_since: Instant,
    /// Forwarded packets are traced.
    pub trace: bool,
    /// The record is stored.
    pub committed: bool,
    /// Of the last delete.
    pub delete_options: DeleteOptions,
    /// Leases before the create took them over; its undo restores them.
    pub taken_over: Vec<Lease>,
}

impl View {
    /// Before the first step. `committed`: in the store.
    #[must_use]
    pub fn new(record: EndpointRecord, fsm: Fsm, committed: bool) -> Self {
        Self {
            record,
            fsm,
            status: EndpointStatus::default(),
            step_since: Instant::now(),
            trace: false,
            committed,
            delete_options: DeleteOptions::default(),
            taken_over: Vec::new(),
        }
    }

    pub(crate) fn begin_step(&mut self, name: &str) {
        self.status.phase = name.to_owned();
        self.status.since_unix_ms = clock::unix_ms();
        self.step_since = Instant::now();
    }

    /// Whether a kernel difference is a fault: stored, and no build runs or is queued. A failed build that awaits its
    /// retry is settled.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let quiet = match self.fsm.state {
            State::Ready => true,
            State::WaitingToRegenerate => self.fsm.failures > 0,
            State::WaitingForIdentity
            | State::Regenerating
            | State::Restoring
            | State::Disconnecting
            | State::Disconnected
            | State::Invalid => false,
        };
        self.committed && quiet
    }

    /// Whether no build, transition or change happened since.
    #[must_use]
    pub fn is_as(&self, before: &Self) -> bool {
        self.fsm == before.fsm
            && self.status.regenerations == before.status.regenerations
            && self.record == before.record
    }
}

/// Shared with other tasks.
#[derive(Debug)]
pub struct Shared {
    view: Mutex<View>,
    changed: Notify,
    log: Mutex<VecDeque<EndpointLogEntry>>,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    entries: Entries,
    unwritten: bool,
}

impl Shared {
    /// State of a new endpoint.
    #[must_use]
    pub fn new(view: View) -> Arc<Self> {
        let (log, line, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Arc::new(Self { view: Mutex::new(view), changed, log, line })
    }

    /// A copy.
    #[must_use]
    pub fn view(&self) -> View {
        lock(&self.view).clone()
    }

    /// Reads without a copy.
    pub fn read<T>(&self, f: impl FnOnce(&View) -> T) -> T {
        f(&lock(&self.view))
    }

    /// Changes the view and wakes waiters.
    pub fn update<T>(&self, f: impl FnOnce(&mut View) -> T) -> T {
        let result = f(&mut lock(&self.view));
        self.changed.notify_waiters();
        result
    }

    /// Waits for the next change.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Adds a line.
    pub fn log(&self, status: LogStatus, event: &str, message: impl Into<String>) {
        let (state, committed) = self.read(|v| (v.fsm.state, v.committed));
        let message = message.into();
        if status != LogStatus::Ok {
            let outcome = if status == LogStatus::Failure { Outcome::Failed } else { Outcome::Warning };
            let operation = match state {
                _ if !committed => Operation::Create,
                State::Disconnecting => Operation::Delete,
                State::Restoring => Operation::Restore,
                _ if event == "build" => Operation::Regenerate,
                _ => Operation::Notice,
            };
            self.note(operation, event, None, outcome, &message);
        }
        let mut log = lock(&self.log);
        if log.len() == LOG_LINES {
            log.pop_front();
        }
        log.push_back(EndpointLogEntry {
            time_unix_ms: clock::unix_ms(),
            status,
            state,
            event: event.to_owned(),
            message,
        });
    }

    /// Adds a timeline entry for the next batch or commit.
    pub fn note(&self, operation: Operation, phase: &str, took: Option<Duration>, outcome: Outcome, text: &str) {
        let mut line = lock(&self.line);
        line.entries.push(entry(operation, phase, took, outcome, text));
        line.unwritten = true;
    }

    /// The timeline so far.
    #[must_use]
    pub fn entries(&self) -> Entries {
        lock(&self.line).entries.clone()
    }

    /// The life to store.
    #[must_use]
    pub fn life(&self, ended: Option<Ended>) -> Life {
        Life { who: self.read(|v| Who::of(&v.record)), ended, entries: self.entries() }
    }

    /// Prepends an earlier run's entries.
    pub fn adopt(&self, before: Entries) {
        let mut line = lock(&self.line);
        let since = std::mem::replace(&mut line.entries, before);
        since.list().iter().cloned().for_each(|entry| line.entries.push(entry));
    }

    /// Marks all as written; returns whether some were not.
    #[must_use]
    pub fn take_unwritten(&self) -> bool {
        std::mem::take(&mut lock(&self.line).unwritten)
    }

    /// Undoes [`Self::take_unwritten`].
    pub fn set_unwritten(&self) {
        lock(&self.line).unwritten = true;
    }

    /// Log lines, oldest first.
    #[must_use]
    pub fn log_lines(&self) -> Vec<EndpointLogEntry> {
        lock(&self.log).iter().cloned().collect()
    }
}

/// Further commands are answered "busy".
pub const MAILBOX: usize = 8;

/// Answer to a change.
pub type Done = oneshot::Sender<Result<(), CommandError>>;

/// Commands to an endpoint's task.
#[derive(Debug)]
pub enum Command {
    /// Answered when realized.
    Regenerate(Level, Done),
    /// Labels, enforcement, named ports or source prefixes.
    Edit(Box<Edit>, Done),
    /// The row of its pod may have changed. Answered when realized.
    PodRow(Done),
    /// Of forwarded packets.
    Trace(bool, Done),
    /// The link's MTU.
    Mtu(u32, Done),
    /// The container is gone without a delete.
    Abandon,
    /// Removes all but addresses and record, in the delete's span and with a written intent.
    Teardown(Span, oneshot::Sender<Torn>),
    /// The record is gone: ends the task.
    Finish(Span, oneshot::Sender<()>),
    /// The record is out of service: ends the task.
    Retire,
}

/// Result of a teardown.
#[derive(Debug, Clone)]
pub struct Torn {
    pub record: EndpointRecord,
    /// Failed steps.
    pub errors: Vec<StepError>,
    /// Unreachable and unlisted: addresses and record may go after [`Self::release`].
    pub clean: bool,
    /// `None` if the link was not removed.
    pub release: Option<Release>,
}

/// Resolves when the kernel has released the link.
pub type Release = futures::future::Shared<futures::future::BoxFuture<'static, Result<(), KernelError>>>;

/// Handle to an endpoint.
#[derive(Debug, Clone)]
pub struct Handle {
    pub id: EndpointId,
    pub epoch: Epoch,
    /// The task's mailbox.
    pub mailbox: mpsc::Sender<Command>,
    /// View, log and timeline.
    pub shared: Arc<Shared>,
    /// Set by a delete; a create or build stops before its next step.
    pub cancel: CancellationToken,
}

impl Handle {
    /// With the task's mailbox.
    #[must_use]
    pub fn new(view: View) -> (Self, mpsc::Receiver<Command>) {
        let (id, epoch) = (view.record.id, view.record.epoch);
        let (mailbox, commands) = mpsc::channel(MAILBOX);
        (Self { id, epoch, mailbox, shared: Shared::new(view), cancel: CancellationToken::new() }, commands)
    }

    /// Whether the container is gone and no delete has begun.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        !self.cancel.is_cancelled() && self.shared.read(|v| v.fsm.state == State::Disconnecting)
    }

    /// Span of an operation.
    #[must_use]
    pub fn span(&self, op: OpId) -> Span {
        let span = op.span();
        let attachment = self.shared.read(|v| v.record.attachment.clone());
        operation::about(&span, Some((self.id, self.epoch)), &attachment);
        span
    }
}

/// An entry with the current time.
#[must_use]
pub fn entry(operation: Operation, phase: &str, took: Option<Duration>, outcome: Outcome, text: &str) -> Entry {
    Entry {
        at_unix_ms: clock::unix_ms(),
        operation,
        phase: phase.to_owned(),
        took_us: took.map(|t| u64::try_from(t.as_micros()).unwrap_or(u64::MAX)),
        outcome,
        text: text.to_owned(),
    }
}

fn bandwidth(limits: &Bandwidth) -> wharf_api::Bandwidth {
    let of = |l: Option<Limit>| l.map(|l| wharf_api::BandwidthLimit { rate: l.rate.get(), burst: l.burst.get() });
    wharf_api::Bandwidth { ingress: of(limits.ingress), egress: of(limits.egress) }
}

#[must_use]
pub fn api_endpoint(view: &View, masquerades: bool) -> wharf_api::Endpoint {
    let r = &view.record;
    wharf_api::Endpoint {
        id: r.id.get(),
        epoch: r.epoch.0,
        state: view.fsm.state,
        container_id: r.attachment.container_id.to_string(),
        ifname: r.attachment.ifname.to_string(),
        network: r.attachment.network.to_string(),
        identity: r.identity.0,
        labels: r.labels.iter().map(ToString::to_string).collect(),
        ipv4: r.ipv4,
        ipv6: r.ipv6,
        ifindex: r.host_ifindex.0,
        host_ifname: r.host_ifname.to_string(),
        container_mac: r.container_mac.to_string(),
        host_mac: r.host_mac.to_string(),
        gateway4: r.gateway4,
        gateway6: r.gateway6,
        mtu: r.mtu,
        pool: if r.ip_owner == IpOwner::External { String::new() } else { r.pool.to_string() },
        ipam: r.ipam.clone(),
        routes: r.routes.as_ref().map(|routes| {
            let by_gateway = |to: &IpNet| ContainerRoute { dst: *to, gw: r.gateway_of(to.addr()) };
            routes.iter().map(by_gateway).collect()
        }),
        netns: r.netns.path.display().to_string(),
        pod_name: r.pod_name.clone(),
        pod_namespace: r.pod_namespace.clone(),
        runtime: r.runtime.as_ref().map(ToString::to_string),
        created_unix_ms: r.created_unix_ms,
        ports: r.ports.clone(),
        ports_off: !r.ports.is_empty() && !masquerades,
        masquerade: r.masquerade,
        bandwidth: bandwidth(&r.bandwidth),
        source_prefixes: r.sources.iter().copied().collect(),
        policy_enforcement: r.policy_enforcement,
        named_ports: r.all_named_ports().map(|(name, port)| (name.to_string(), *port)).collect(),
        mode: if r.link_owner.is_wharf() { EndpointMode::Own } else { EndpointMode::Chained },
        delegated: None,
        status: view.status.clone(),
    }
}
