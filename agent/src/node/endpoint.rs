//! What others may see of an endpoint: written by its task alone, read by REST handlers and the audit.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::Notified, mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::Span;
use wharf_api::{EndpointLogEntry, EndpointStatus, LogStatus, StepError};
use wharf_core::{
    endpoint::EndpointRecord,
    identity::Label,
    ids::{EndpointId, Epoch},
    plan::DeleteOptions,
    state::{Fsm, Level, State},
    store::Lease,
    timeline::{Ended, Entries, Entry, Life, Operation, Outcome, Who},
};

use crate::{
    clock,
    sync::lock,
    telemetry::operation::{self, OpId},
};

/// Lines kept of an endpoint's log; about 10 KiB when full.
const LOG_LINES: usize = 64;

/// Present picture of an endpoint.
#[derive(Debug, Clone)]
pub struct View {
    /// Its facts; interface indexes are 0 until the link exists.
    pub record: EndpointRecord,
    /// Its place in the state machine.
    pub fsm: Fsm,
    /// What it is doing.
    pub status: EndpointStatus,
    /// When the step it is at began.
    pub step_since: Instant,
    /// Forwarded packets are traced.
    pub trace: bool,
    /// The record is in the store.
    pub committed: bool,
    /// What the last delete asked for.
    pub delete_options: DeleteOptions,
    /// Leases that an earlier delete kept for this attachment and that the create took over, as they were: the undo of
    /// the create puts them back.
    pub taken_over: Vec<Lease>,
}

impl View {
    /// A step of a create, build or delete begins.
    pub(crate) fn begin_step(&mut self, name: &str) {
        self.status.phase = name.to_owned();
        self.status.since_unix_ms = clock::unix_ms();
        self.step_since = Instant::now();
    }

    /// Its record is stored and no build runs or is about to: what the kernel holds otherwise is a fault. A build that has
    /// failed and waits for its next try explains nothing.
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

    /// Nothing has worked on it between the two.
    #[must_use]
    pub fn is_as(&self, before: &Self) -> bool {
        self.fsm == before.fsm
            && self.status.regenerations == before.status.regenerations
            && self.record == before.record
    }
}

/// The part of an endpoint that is shared.
#[derive(Debug)]
pub struct Shared {
    view: Mutex<View>,
    /// Wakes who waits for a change of the picture.
    changed: Notify,
    log: Mutex<VecDeque<EndpointLogEntry>>,
    line: Mutex<Line>,
}

/// What happened, and whether the store has all of it.
#[derive(Debug, Default)]
struct Line {
    entries: Entries,
    unwritten: bool,
}

impl Shared {
    /// A new endpoint's.
    #[must_use]
    pub fn new(view: View) -> Arc<Self> {
        let (log, line, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Arc::new(Self { view: Mutex::new(view), changed, log, line })
    }

    /// A copy of the picture.
    #[must_use]
    pub fn view(&self) -> View {
        lock(&self.view).clone()
    }

    /// Looks at the picture without copying it.
    pub fn read<T>(&self, f: impl FnOnce(&View) -> T) -> T {
        f(&lock(&self.view))
    }

    /// Changes the picture; called by the endpoint's task only.
    pub fn update<T>(&self, f: impl FnOnce(&mut View) -> T) -> T {
        let result = f(&mut lock(&self.view));
        self.changed.notify_waiters();
        result
    }

    /// The next change of the picture.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Adds a line to the log.
    pub fn log(&self, status: LogStatus, event: &str, message: impl Into<String>) {
        let (state, committed) = self.read(|v| (v.fsm.state, v.committed));
        let message = message.into();
        // What went wrong is what is asked about later.
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
            state: api_state(state),
            event: event.to_owned(),
            message,
        });
    }

    /// Adds an entry to the timeline; the next batch writes it, unless a commit of the endpoint's own does.
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

    /// Its life as the store is to have it.
    #[must_use]
    pub fn life(&self, ended: Option<Ended>) -> Life {
        Life { who: self.read(|v| Who::of(&v.record)), ended, entries: self.entries() }
    }

    /// What was before this start.
    pub fn adopt(&self, before: Entries) {
        let mut line = lock(&self.line);
        let since = std::mem::replace(&mut line.entries, before);
        since.list().iter().cloned().for_each(|entry| line.entries.push(entry));
    }

    /// Was anything noted that nobody has written? From here on it is written.
    #[must_use]
    pub fn take_unwritten(&self) -> bool {
        std::mem::take(&mut lock(&self.line).unwritten)
    }

    /// What was taken could not be written.
    pub fn set_unwritten(&self) {
        lock(&self.line).unwritten = true;
    }

    /// The log, oldest first.
    #[must_use]
    pub fn log_lines(&self) -> Vec<EndpointLogEntry> {
        lock(&self.log).iter().cloned().collect()
    }
}

/// Commands that may wait for an endpoint: a client each; a full mailbox is "busy" to the next.
pub const MAILBOX: usize = 8;

/// Answer to a command that changes the endpoint.
pub type Done = oneshot::Sender<Result<(), String>>;

/// What others may ask of an endpoint.
#[derive(Debug)]
pub enum Command {
    /// Regenerate, and answer when it is realized.
    Regenerate(Level, Done),
    /// Replace the labels; the identity follows.
    Relabel(BTreeSet<Label>, Done),
    /// Trace forwarded packets.
    Trace(bool, Done),
    /// Phase one of a delete, within the delete's span: everything but addresses and record. The intent is written.
    Teardown(DeleteOptions, Span, oneshot::Sender<Torn>),
    /// Phase two has ended: the record is gone. The task ends.
    Finish(Span, oneshot::Sender<()>),
    /// The record went out of service, and the registry has forgotten the endpoint. The task ends.
    Retire,
}

/// How a teardown ended.
#[derive(Debug, Clone)]
pub struct Torn {
    /// What the endpoint was.
    pub record: EndpointRecord,
    /// Steps that failed.
    pub errors: Vec<StepError>,
    /// Nothing of it is left in the kernel: addresses and record may go.
    pub clean: bool,
}

/// How others reach an endpoint: its mailbox and its picture.
#[derive(Debug, Clone)]
pub struct Handle {
    /// Id.
    pub id: EndpointId,
    /// Epoch.
    pub epoch: Epoch,
    /// Mailbox of its task.
    pub mailbox: mpsc::Sender<Command>,
    /// Picture.
    pub shared: Arc<Shared>,
    /// Set by a delete: a create or build that runs ends at its next step.
    pub cancel: CancellationToken,
}

impl Handle {
    /// The span of an operation on this endpoint.
    #[must_use]
    pub fn span(&self, op: OpId) -> Span {
        let span = op.span();
        let attachment = self.shared.read(|v| v.record.attachment.clone());
        operation::about(&span, Some((self.id, self.epoch)), &attachment);
        span
    }
}

/// An entry of now.
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

/// The state machine's state in the API's words.
#[must_use]
pub fn api_state(state: State) -> wharf_api::EndpointState {
    use wharf_api::EndpointState as Api;
    match state {
        State::WaitingForIdentity => Api::WaitingForIdentity,
        State::WaitingToRegenerate => Api::WaitingToRegenerate,
        State::Regenerating => Api::Regenerating,
        State::Ready => Api::Ready,
        State::Restoring => Api::Restoring,
        State::Disconnecting => Api::Disconnecting,
        State::Disconnected => Api::Disconnected,
        State::Invalid => Api::Invalid,
    }
}

/// An endpoint in the API's words.
#[must_use]
pub fn api_endpoint(view: &View) -> wharf_api::Endpoint {
    let r = &view.record;
    wharf_api::Endpoint {
        id: r.id.get(),
        epoch: r.epoch.0,
        state: api_state(view.fsm.state),
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
        pool: r.pool.to_string(),
        netns: r.netns.path.display().to_string(),
        pod_name: r.pod_name.clone(),
        pod_namespace: r.pod_namespace.clone(),
        created_unix_ms: r.created_unix_ms,
        status: view.status.clone(),
    }
}
