//! The proxy as its user sees it: listeners wanted, and waits until Envoy has them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::Future,
    net::IpAddr,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    forwarded::Forwarded,
    ledger::{Ended, Ledgers, Registered, WaitError, WaitId},
    listener::{Listener, ListenerKey},
    process::{Process, ProcessId},
    records::Record,
    resources,
    shares::{Connections, Refusals},
    speakers::Speakers,
    status::{Status, Supervised},
};

/// What Envoy shall have, and what it has. Clones are the same proxy.
///
/// Changes take effect at once for an Envoy that is connected, and for any other one when it connects. The server that Envoy
/// connects to is [`Proxy::serve`]; begin it when the listeners of an earlier run are set again, because an Envoy that outlived
/// that run drops every listener that it does not find.
#[derive(Debug, Clone)]
pub struct Proxy {
    pub(crate) shared: Arc<Shared>,
}

/// What the streams, the waits and the user of a proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Held for a change of the tables alone, never across an await; a change of one resource is as long as a few
    /// look-ups, a response as long as the copies of what changed.
    state: Mutex<State>,
    /// Wakes the streams: something changed. Holds one value, so that a slow stream costs nothing.
    pub(crate) changed: watch::Sender<()>,
    /// Wakes who waits for Envoy to tell of requests: a request came on a stream, or Envoy ended. Holds one value.
    pub(crate) answered: watch::Sender<()>,
    /// The process behind the newest stream, for whoever watches its end.
    pub(crate) process: watch::Sender<Option<Arc<Process>>>,
    records: mpsc::Sender<Record>,
    /// Records that nobody took in time.
    lost: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledgers: Ledgers,
    listeners: BTreeMap<ListenerKey, Listener>,
    speakers: Speakers,
    waiting: HashMap<WaitId, oneshot::Sender<Result<(), WaitError>>>,
    /// The Envoy that is served, as long as it lives.
    pub(crate) process: Option<ProcessId>,
    /// The file that names the process that was told listeners last, for the next agent.
    pub(crate) told: Option<PathBuf>,
    /// ADS streams whose first request was accepted, and those that have not sent it yet.
    pub(crate) streams: usize,
    pub(crate) new_streams: usize,
    pub(crate) next_stream: u64,
    /// The server has ended: nobody will answer any more.
    pub(crate) closed: bool,
    /// What Envoy says of its version.
    pub(crate) version: Option<String>,
    /// Who wants to be told of each request.
    watchers: usize,
    pub(crate) forwarded: Forwarded,
    /// How Envoy's connections are divided, and for which shares it refused some.
    connections: Connections,
    pub(crate) refusals: Refusals,
    pub(crate) supervised: Supervised,
}

impl Proxy {
    /// A proxy that wants nothing yet, and the records of what passes (ALS). Of the records that are not taken in time at most
    /// `records` (at least 1) are kept; later ones are counted in [`Status::records_lost`] and dropped.
    #[must_use]
    pub fn new(records: usize) -> (Self, mpsc::Receiver<Record>) {
        let (sender, receiver) = mpsc::channel(records.max(1));
        let first = first_version();
        let mut ledgers = Ledgers::new(first);
        ledgers
            .clusters
            .set(resources::ORIGINAL_DESTINATION, Some(resources::pack(&resources::original_destination())));
        let mut state = State {
            ledgers,
            listeners: BTreeMap::new(),
            speakers: Speakers::default(),
            waiting: HashMap::new(),
            process: None,
            told: None,
            streams: 0,
            new_streams: 0,
            next_stream: 0,
            closed: false,
            version: None,
            watchers: 0,
            forwarded: Forwarded::default(),
            connections: Connections::here(),
            refusals: Refusals::default(),
            supervised: Supervised::default(),
        };
        state.set_runtime();
        let shared = Shared {
            state: Mutex::new(state),
            changed: watch::Sender::new(()),
            answered: watch::Sender::new(()),
            process: watch::Sender::new(None),
            records: sender,
            lost: AtomicU64::new(0),
        };
        (Self { shared: Arc::new(shared) }, receiver)
    }

    /// Makes sure of a listener with just these members; gives the wait until Envoy has it so. With no member at all it stays open and closes
    /// every connection.
    pub fn ensure(&self, listener: Listener) -> Wait {
        let key = listener.key();
        if listener.port == 0 {
            let reason = "port 0 is no port".to_owned();
            return Wait::over(key, Err(WaitError::Refused { listener: key.to_string(), reason }));
        }
        let addresses = listener.members.values().flatten().map(IpAddr::to_canonical).collect();
        let connections = self.shared.lock().connections;
        let resource = resources::pack(&resources::listener(&listener, connections));
        let mut state = self.shared.lock();
        let removal = state.listeners.get(&key).is_some_and(|before| has_no_more(&listener, before));
        if state.listeners.insert(key, listener).is_none() {
            state.set_runtime();
        }
        self.set(state, key, Some(resource), addresses, removal)
    }

    /// Takes a listener away; gives the wait until Envoy no longer has it. A listener that was not set is gone at once: what
    /// an Envoy has of an earlier agent it drops when it connects.
    pub fn remove(&self, key: ListenerKey) -> Wait {
        let mut state = self.shared.lock();
        if state.listeners.remove(&key).is_some() {
            state.set_runtime();
        }
        self.set(state, key, None, Vec::new(), true)
    }

    /// The listeners of which Envoy has not what was last asked, with its reason where it refused that.
    #[must_use]
    pub fn unacknowledged(&self) -> BTreeMap<String, Option<String>> {
        let state = self.shared.lock();
        let all = state.ledgers.listeners.unacknowledged();
        all.map(|(name, reason)| (name.to_owned(), reason.map(str::to_owned))).collect()
    }

    /// Whether Envoy owes an answer about a listener: it has neither acknowledged nor refused what was last asked.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.shared.lock().ledgers.listeners.unacknowledged().any(|(_, refusal)| refusal.is_none())
    }

    /// Resolves when Envoy owes no answer about a listener; at once while no Envoy runs. To be bounded by the caller.
    pub async fn answered(&self) {
        let mut answered = self.shared.answered.subscribe();
        let is_outstanding = || {
            let state = self.shared.lock();
            let runs = state.process.is_some() || state.supervised.running.is_some();
            runs && state.ledgers.listeners.unacknowledged().any(|(_, refusal)| refusal.is_none())
        };
        // The sender lives as long as `self`.
        while is_outstanding() && answered.changed().await.is_ok() {}
    }

    /// The listener as it was last set.
    #[must_use]
    pub fn listener(&self, key: ListenerKey) -> Option<Listener> {
        self.shared.lock().listeners.get(&key).cloned()
    }

    /// Listeners that may still serve connections of this address: it is a member's, or it was and Envoy has not acknowledged that
    /// it is no longer. Empty for an address that nobody in the proxy speaks for.
    #[must_use]
    pub fn speakers(&self, address: IpAddr) -> BTreeSet<ListenerKey> {
        let state = self.shared.lock();
        let accepted = |key: ListenerKey| state.ledgers.listeners.versions(&key.to_string()).1;
        state.speakers.of(address.to_canonical(), accepted)
    }

    /// The process of an Envoy that an earlier agent told listeners, and that has not acknowledged all that this agent wants: nobody
    /// knows which addresses it serves, so it may be any.
    #[must_use]
    pub fn inherited(&self) -> Option<i32> {
        let state = self.shared.lock();
        state.process.filter(|_| state.ledgers.listeners.is_inherited()).map(|process| process.pid)
    }

    /// How the proxy is.
    #[must_use]
    pub fn status(&self) -> Status {
        let state = self.shared.lock();
        let ledgers = [&state.ledgers.listeners, &state.ledgers.clusters, &state.ledgers.runtime];
        let refused = ledgers.iter().flat_map(|ledger| ledger.refusals());
        Status {
            refused: refused.map(|(name, reason)| (name.to_owned(), reason.to_owned())).collect(),
            connected_streams: state.streams,
            pending_waits: state.ledgers.listeners.pending(),
            listeners: state.listeners.len(),
            records_lost: self.shared.lost.load(Ordering::Relaxed),
            forwarded: state.forwarded.total(),
            connections: state.connections,
            spent: state.refusals.spent(Instant::now()),
            ..state.supervised.status(state.streams, state.process, state.version.clone())
        }
    }

    /// From now on Envoy tells of each request, as long as somebody holds this. Without it, it tells of those that were denied or failed.
    pub fn watch(&self) -> Watching {
        self.shared.watchers(|watchers| watchers.saturating_add(1));
        Watching { shared: Arc::clone(&self.shared) }
    }

    fn set(
        &self,
        mut state: MutexGuard<'_, State>,
        key: ListenerKey,
        resource: Option<resources::Resource>,
        addresses: Vec<IpAddr>,
        removal: bool,
    ) -> Wait {
        let name = key.to_string();
        state.ledgers.listeners.set(&name, resource);
        let (version, accepted) = state.ledgers.listeners.versions(&name);
        state.speakers.set(key, version, addresses, accepted);
        let registered = state.ledgers.listeners.wait(&name, removal);
        let wait = match registered {
            Registered::Ended => Wait::over(key, Ok(())),
            Registered::Pending(id) if state.closed => {
                state.ledgers.listeners.cancel(id);
                Wait::over(key, Err(WaitError::Cancelled { listener: name }))
            }
            Registered::Pending(id) => {
                let (sender, receiver) = oneshot::channel();
                state.waiting.insert(id, sender);
                Wait { listener: key, end: End::Pending { id, receiver, shared: Arc::clone(&self.shared) } }
            }
        };
        drop(state);
        self.shared.changed.send_replace(());
        wait
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // The tables are whole after every step; a panic elsewhere is no reason to stop the proxy.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a record, or counts it.
    pub(crate) fn record(&self, record: Record) {
        if self.records.try_send(record).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes how many want to be told of each request, and what Envoy shall tell with it.
    fn watchers(&self, change: impl FnOnce(usize) -> usize) {
        let mut state = self.lock();
        state.watchers = change(state.watchers);
        state.set_runtime();
        drop(state);
        self.changed.send_replace(());
    }

    /// An Envoy speaks. If it is another one than before, that one and all that it had are gone.
    pub(crate) fn on_process(&self, process: Arc<Process>) {
        let mut state = self.lock();
        if state.process == Some(process.id) {
            return;
        }
        state.end_process();
        state.process = Some(process.id);
        state.ledgers.process_began();
        state.forwarded.process_began(process.id);
        state.refusals.process_began(process.id);
        drop(state);
        self.process.send_replace(Some(process));
        // Streams of the one before end.
        self.changed.send_replace(());
    }

    /// An Envoy that an earlier agent told listeners lives.
    pub(crate) fn inherit(&self, process: Process) {
        self.on_process(Arc::new(process));
        self.lock().ledgers.listeners.inherit();
    }

    /// An Envoy ended.
    pub(crate) fn on_process_end(&self, id: ProcessId) {
        let mut state = self.lock();
        if state.process == Some(id) {
            state.end_process();
        }
        drop(state);
        self.answered.send_replace(());
    }

    /// The server ended: nobody answers any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for (id, sender) in std::mem::take(&mut state.waiting) {
            state.ledgers.listeners.cancel(id);
            drop(sender);
        }
    }
}

impl State {
    /// What Envoy takes without new listeners.
    fn set_runtime(&mut self) {
        let runtime = resources::runtime(self.watchers > 0, self.listeners.keys(), self.connections);
        self.ledgers.runtime.set(resources::RUNTIME, Some(resources::pack(&runtime)));
    }

    fn end_process(&mut self) {
        self.process = None;
        let ended = self.ledgers.listeners.process_ended();
        let ledger = &self.ledgers.listeners;
        self.speakers.process_ended(|key| ledger.versions(&key.to_string()).0);
        self.tell(ended);
        for ledger in [&mut self.ledgers.clusters, &mut self.ledgers.runtime] {
            // Nobody waits for these.
            drop(ledger.process_ended());
        }
        self.forwarded.process_ended();
    }

    /// Tells the waits that ended.
    pub(crate) fn tell(&mut self, ended: Ended) {
        for (id, result) in ended {
            if let Some(sender) = self.waiting.remove(&id) {
                // The wait was dropped in this very moment; nobody is left to tell.
                drop(sender.send(result));
            }
        }
    }
}

/// As long as somebody holds one, Envoy tells of each request.
#[derive(Debug)]
#[must_use = "dropped, it ends"]
pub struct Watching {
    shared: Arc<Shared>,
}

impl Watching {
    /// Resolves when an Envoy that is served has acknowledged that it is to tell; at once if there is none. To be bounded by the caller.
    pub async fn begun(&self) {
        let mut answered = self.shared.answered.subscribe();
        let is_outstanding = || {
            let state = self.shared.lock();
            state.process.is_some()
                && state.forwarded.is_counted()
                && state.ledgers.runtime.unacknowledged().next().is_some()
        };
        // The sender lives as long as `self`.
        while is_outstanding() && answered.changed().await.is_ok() {}
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.shared.watchers(|watchers| watchers.saturating_sub(1));
    }
}

/// Whether the one lets nothing through that the other did not.
fn has_no_more(listener: &Listener, before: &Listener) -> bool {
    listener.requests == before.requests
        && listener.members.iter().all(|(member, addresses)| {
            before.members.get(member).is_some_and(|before| addresses.iter().all(|address| before.contains(address)))
        })
}

/// Microseconds since the boot: an Envoy does not outlive it, and no two servers begin in the same one.
fn first_version() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(|time| u64::try_from(Duration::from(time).as_micros()).unwrap_or(u64::MAX / 2))
        .unwrap_or(1)
        .max(1)
}

/// Resolves when Envoy has answered about a change of a listener: acknowledged, refused, or never (the server ended). A later
/// change that is answered answers this one too. An Envoy that ends answers only what took something away.
///
/// Dropped, it is forgotten.
#[derive(Debug)]
#[must_use = "the change is made, but nobody learns whether Envoy has it"]
pub struct Wait {
    listener: ListenerKey,
    end: End,
}

#[derive(Debug)]
enum End {
    Over(Option<Result<(), WaitError>>),
    Pending { id: WaitId, receiver: oneshot::Receiver<Result<(), WaitError>>, shared: Arc<Shared> },
}

impl Wait {
    const fn over(listener: ListenerKey, result: Result<(), WaitError>) -> Self {
        Self { listener, end: End::Over(Some(result)) }
    }

    /// Waits no longer than that.
    ///
    /// # Errors
    /// Envoy refused, the server ended, or the time passed.
    pub async fn within(self, time: Duration) -> Result<(), WaitError> {
        let listener = self.listener;
        match tokio::time::timeout(time, self).await {
            Ok(result) => result,
            Err(_) => Err(WaitError::TimedOut { listener: listener.to_string(), after: time }),
        }
    }
}

impl Future for Wait {
    type Output = Result<(), WaitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let cancelled = || WaitError::Cancelled { listener: this.listener.to_string() };
        match &mut this.end {
            // Polled after its end, it has no other answer.
            End::Over(result) => Poll::Ready(result.take().unwrap_or_else(|| Err(cancelled()))),
            End::Pending { receiver, .. } => match Pin::new(receiver).poll(context) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(result) => {
                    let result = result.unwrap_or_else(|_| Err(cancelled()));
                    this.end = End::Over(None);
                    Poll::Ready(result)
                }
            },
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let End::Pending { id, shared, .. } = &self.end {
            let mut state = shared.lock();
            state.waiting.remove(id);
            state.ledgers.listeners.cancel(*id);
        }
    }
}
