//! ADD, DEL, CHECK and GC.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout, timeout_at},
};
use wharf_core::{
    admission::Refusal,
    ids::{Attachment, NetworkName, RuntimeName},
};
use wharf_delegate::v1;
use wharf_kit::{
    gate::Place,
    telemetry::operation::{self, Kind, OpId},
};

use crate::{
    delegate::{
        Delegation,
        answer::{Made, Seen},
        records::{DEL_LIMIT, Unsettled},
        request,
        service::CallError,
        turns::Held,
    },
    endpoint::create::CreateSpec,
    node::queue::{Cause, QueueFailure},
};

/// Wait for an absent service; the runtime retries after CNI error 11.
const ADD_ABSENT: Duration = Duration::from_secs(1);
/// Wait for an absent service, before the DEL is recorded.
const DEL_ABSENT: Duration = Duration::from_secs(2);
/// Wait for a running operation; with [`DEL_LIMIT`] and [`DEL_ABSENT`] below the shim's 30 s.
const DEL_TURN: Duration = Duration::from_secs(14);
/// Below CHECK's 10 s.
const CHECK_LIMIT: Duration = Duration::from_secs(5);
const GC_LIMIT: Duration = Duration::from_secs(25);
const LEAST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A failed operation.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// The call to the service.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Too many waiting ADDs.
    #[error(transparent)]
    Overloaded(#[from] Refusal),
    #[error(transparent)]
    Records(#[from] QueueFailure),
    /// An owed DEL was not sent.
    #[error("an earlier DEL of it is owed to the service first, and could not be sent: {0}")]
    DeletePending(Box<WorkError>),
    /// An owed DEL of a listed attachment was not sent.
    #[error("a DEL of {0}, which is listed as valid, is owed to the service first, and could not be sent")]
    CollectPending(Attachment),
    /// Nothing was sent before the deadline.
    #[error("its deadline passed while it waited for {0}; nothing was sent")]
    Deadline(&'static str),
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// Too many waiting calls.
    #[error("{0} calls wait for the service already")]
    Busy(usize),
}

impl From<Unsettled> for WorkError {
    fn from(e: Unsettled) -> Self {
        match e {
            Unsettled::Call(e) => e.into(),
            Unsettled::Records(e) => e.into(),
        }
    }
}

/// Outcome of a DEL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// The service answered.
    Done,
    /// The service knew no attachment.
    Unknown,
    /// The DEL is recorded.
    Deferred,
}

struct Added {
    made: Made,
    unclaimed: Unclaimed,
}

/// Undoes an ADD when dropped with its turn: a disconnected caller sends no DEL.
struct Unclaimed {
    this: Arc<Delegation>,
    attachment: Attachment,
    turn: Option<Held>,
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        if tokio::runtime::Handle::try_current().is_err() {
            // The runtime sends a DEL.
            return;
        }
        let (this, a, op) = (Arc::clone(&self.this), self.attachment.clone(), OpId::next(Kind::Delete));
        let span = op.span();
        operation::about(&span, None, &a);
        let work = async move {
            tracing::info!("the caller of an ADD went away before its answer; it is undone");
            // The agent may end first.
            if let Err(error) = this.records.begin(&a).await {
                tracing::error!("record an ADD that is to be undone: {error}; the runtime's DEL undoes it");
            }
            this.undo(&a, turn).await;
        };
        self.this.tasks.operations.spawn(operation::within(op, span, work));
    }
}

type Reply<T> = oneshot::Sender<Result<T, WorkError>>;

impl Delegation {
    /// Attaches a container in a task. A caller's disconnect undoes the ADD.
    ///
    /// # Errors
    /// Not attached, or a DEL is owed and recorded.
    pub async fn add(self: &Arc<Self>, spec: CreateSpec) -> Result<Made, WorkError> {
        let place = self.gate.offer(spec.deadline.saturating_duration_since(Instant::now()))?;
        let (owned, a) = (Arc::clone(self), spec.attachment.clone());
        let work = async move |reply| owned.add_task(place, spec, reply).await;
        let Added { made, mut unclaimed } = self.as_task(Kind::Create, &a, work).await?;
        unclaimed.turn = None;
        Ok(made)
    }

    /// Detaches a container in a task, also without the caller.
    pub async fn del(self: &Arc<Self>, attachment: Attachment) -> Result<Deleted, WorkError> {
        let owned = Arc::clone(self);
        self.as_task(Kind::Delete, &attachment.clone(), async move |reply: Reply<Deleted>| {
            let result = owned.del_task(&attachment).await;
            drop(reply.send(result));
        })
        .await
    }

    async fn as_task<T: Send + 'static, F>(
        self: &Arc<Self>,
        kind: Kind,
        attachment: &Attachment,
        work: impl FnOnce(Reply<T>) -> F,
    ) -> Result<T, WorkError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let op = OpId::current_or_next(kind);
        let span = op.span();
        operation::about(&span, None, attachment);
        self.tasks.operations.spawn(operation::within(op, span, work(reply)));
        answer.await.unwrap_or(Err(WorkError::Stopping))
    }

    async fn add_task(self: Arc<Self>, place: Place, spec: CreateSpec, mut reply: Reply<Added>) {
        let (end, a) = (spec.deadline, spec.attachment.clone());
        let began = Instant::now();
        let adding = self.turns.add(&a);
        // A cancelled wait needs no DEL: nothing is sent yet.
        let begun = async {
            adding.listed().await;
            (place.start().await, self.turns.take(&a).await)
        };
        let (_running, turn) = tokio::select! {
            begun = timeout_at(end, begun) => match begun {
                Ok(begun) => begun,
                Err(_) => {
                    drop(reply.send(Err(WorkError::Deadline("its turn"))));
                    return;
                }
            },
            () = reply.closed() => return,
            () = self.tasks.halt.cancelled() => return,
        };
        let result = self.add_in_turn(&a, spec, end, &reply).await;
        self.metrics.operation("create", began.elapsed(), result.is_ok());
        // Nothing was sent: the record is an older DEL's.
        let owes = !matches!(result, Err(WorkError::DeletePending(_))) && self.records.is_owed(&a);
        match result {
            Ok(made) => {
                let unclaimed = Unclaimed { this: Arc::clone(&self), attachment: a, turn: Some(turn) };
                drop(reply.send(Ok(Added { made, unclaimed })));
            }
            Err(error) => {
                tracing::debug!("ADD failed: {error}");
                // First: the caller waits only until its deadline.
                drop(reply.send(Err(error)));
                if owes {
                    self.undo(&a, turn).await;
                }
            }
        }
    }

    async fn add_in_turn(
        &self,
        a: &Attachment,
        spec: CreateSpec,
        end: Instant,
        reply: &Reply<Added>,
    ) -> Result<Made, WorkError> {
        // An older DEL must not follow.
        self.settle(a).await.map_err(|e| WorkError::DeletePending(Box::new(e.into())))?;
        self.records.begin(a).await?;
        wharf_crash::point("delegate/add/after-record");
        let added = self.send_add(&request::add(&spec), end).await;
        wharf_crash::point("delegate/add/after-answer");
        match added {
            Ok(made) if !reply.is_closed() => {
                // The next start would undo a recorded ADD.
                self.records.end(a).await?;
                wharf_crash::point("delegate/add/after-record-removed");
                Ok(made)
            }
            Ok(made) => Ok(made),
            Err(error) => {
                let nothing = match &error {
                    WorkError::Call(call) => call.made_nothing(),
                    WorkError::Deadline(_) => true,
                    _ => false,
                };
                if nothing && let Err(why) = self.records.end(a).await {
                    tracing::warn!("remove the record of a failed ADD: {why}; a DEL is sent for it");
                }
                Err(error)
            }
        }
    }

    async fn send_add(&self, request: &v1::AddRequest, end: Instant) -> Result<Made, WorkError> {
        let mut pause = Pause::new(ADD_ABSENT);
        loop {
            let limit = end.saturating_duration_since(Instant::now());
            if limit.is_zero() {
                return Err(WorkError::Deadline("the service"));
            }
            match self.ask(self.service.add(request.clone(), limit)).await {
                Err(error @ CallError::Unreachable { .. }) => {
                    if !pause.again().await {
                        return Err(error.into());
                    }
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// A failure leaves the record.
    async fn undo(&self, a: &Attachment, _turn: Held) {
        match self.settle(a).await {
            Ok(()) => tracing::info!("an ADD whose end was not known is undone"),
            Err(error) => tracing::warn!("undo an ADD: {error}; it is tried again"),
        }
    }

    async fn del_task(self: &Arc<Self>, a: &Attachment) -> Result<Deleted, WorkError> {
        let began = Instant::now();
        let result = self.del_in_turn(a).await;
        self.metrics.operation("delete", began.elapsed(), result.is_ok());
        result
    }

    async fn del_in_turn(self: &Arc<Self>, a: &Attachment) -> Result<Deleted, WorkError> {
        let begun = async { (self.places.acquire().await, self.turns.take(a).await) };
        let begun = tokio::select! {
            begun = timeout(DEL_TURN, begun) => begun.ok(),
            () = self.tasks.halt.cancelled() => None,
        };
        let Some((_place, _turn)) = begun else { return self.defer(a, "other calls are under way").await };
        let mut pause = Pause::new(DEL_ABSENT);
        let error = loop {
            match self.ask(self.service.del(request::key(a), DEL_LIMIT)).await {
                Ok(()) => break None,
                Err(error) if error.is_unknown() => break Some(error),
                Err(error @ (CallError::Unreachable { .. } | CallError::Broken { .. })) => {
                    if !pause.again().await || self.tasks.halt.is_cancelled() {
                        return self.defer(a, &error.to_string()).await;
                    }
                }
                Err(error @ (CallError::TimedOut { .. } | CallError::Stopping { .. })) => {
                    return self.defer(a, &error.to_string()).await;
                }
                Err(error) => return Err(error.into()),
            }
        };
        wharf_crash::point("delegate/del/after-answer");
        if let Err(why) = self.records.served(a).await {
            tracing::warn!("{why}; the DEL is sent again, which does no harm");
        }
        Ok(if error.is_some() { Deleted::Unknown } else { Deleted::Done })
    }

    async fn defer(&self, a: &Attachment, why: &str) -> Result<Deleted, WorkError> {
        self.records.defer(a).await?;
        wharf_crash::point("delegate/del/after-record");
        tracing::warn!("DEL: {why}; a record stands for it, and it is tried again");
        Ok(Deleted::Deferred)
    }

    /// Checks an attachment; the key may lack the network.
    pub async fn check(&self, key: v1::AttachmentKey) -> Result<Seen, WorkError> {
        let _place = self.place().await?;
        Ok(self.ask(self.service.check(key, CHECK_LIMIT)).await?)
    }

    /// Collects unlisted attachments. Owed DELs, possibly of listed attachments, precede. Running ADDs, unknown to the
    /// runtime, join the list; later ADDs wait.
    pub async fn collect(
        &self,
        network: &NetworkName,
        valid: &[Attachment],
        runtime: Option<&RuntimeName>,
    ) -> Result<u32, WorkError> {
        let _place = self.place().await?;
        self.drain(Cause::Event).await?;
        if let Some(owed) = valid.iter().find(|a| self.records.is_owed(a)) {
            return Err(WorkError::CollectPending(owed.clone()));
        }
        let (_collecting, adding) = self.turns.collect(network);
        let valid = valid.iter().chain(&adding).map(request::key).collect();
        let request = v1::GcRequest { network: network.to_string(), valid, runtime: runtime.map(ToString::to_string) };
        Ok(self.ask(self.service.gc(request, GC_LIMIT)).await?)
    }

    async fn place(&self) -> Result<tokio::sync::SemaphorePermit<'_>, WorkError> {
        match timeout(CHECK_LIMIT, self.places.acquire()).await {
            Ok(place) => place.map_err(|_| WorkError::Stopping),
            Err(_) => Err(WorkError::Busy(super::CALLS)),
        }
    }

    /// Ends with the agent; records the reach.
    pub(super) async fn ask<T>(&self, call: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
        let _in_flight = self.reach.call();
        let result = tokio::select! {
            result = call => result,
            () = self.tasks.halt.cancelled() => {
                Err(CallError::Stopping { socket: self.service.socket().to_owned() })
            }
        };
        self.reach.note(&result);
        result
    }
}

struct Pause {
    end: Instant,
    next: Duration,
}

impl Pause {
    fn new(patience: Duration) -> Self {
        Self { end: Instant::now() + patience, next: LEAST_PAUSE }
    }

    async fn again(&mut self) -> bool {
        let left = self.end.saturating_duration_since(Instant::now());
        if left <= self.next {
            return false;
        }
        sleep(self.next).await;
        self.next = (self.next * 2).min(LONGEST_PAUSE);
        true
    }
}
