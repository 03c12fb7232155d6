//! Interface of the proxy.

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

/// Envoy's wanted and actual state, shared by clones.
///
/// [`Proxy::serve`] must follow the listeners of an earlier run: Envoy drops others.
#[derive(Debug, Clone)]
pub struct Proxy {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    /// Never held across an await.
    state: Mutex<State>,
    /// One value: a slow stream costs no memory.
    pub(crate) changed: watch::Sender<()>,
    /// Wakes [`Proxy::answered`] and [`Watching::begun`].
    pub(crate) answered: watch::Sender<()>,
    pub(crate) process: watch::Sender<Option<Arc<Process>>>,
    records: mpsc::Sender<Record>,
    lost: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledgers: Ledgers,
    listeners: BTreeMap<ListenerKey, Listener>,
    speakers: Speakers,
    waiting: HashMap<WaitId, oneshot::Sender<Result<(), WaitError>>>,
    pub(crate) process: Option<ProcessId>,
    /// File that names the process with listeners.
    pub(crate) told: Option<PathBuf>,
    /// ADS streams after their first request; `new_streams`: before it.
    pub(crate) streams: usize,
    pub(crate) new_streams: usize,
    pub(crate) next_stream: u64,
    pub(crate) closed: bool,
    pub(crate) version: Option<String>,
    watchers: usize,
    pub(crate) forwarded: Forwarded,
    connections: Connections,
    pub(crate) refusals: Refusals,
    pub(crate) supervised: Supervised,
}

impl Proxy {
    /// The proxy and its records, of which at most `records` (at least 1) are buffered.
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

    /// Sets a listener.
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

    /// Removes a listener; Envoy drops an unknown one when it connects.
    pub fn remove(&self, key: ListenerKey) -> Wait {
        let mut state = self.shared.lock();
        if state.listeners.remove(&key).is_some() {
            state.set_runtime();
        }
        self.set(state, key, None, Vec::new(), true)
    }

    /// Unacknowledged listeners, with the reason if refused.
    #[must_use]
    pub fn unacknowledged(&self) -> BTreeMap<String, Option<String>> {
        let state = self.shared.lock();
        let all = state.ledgers.listeners.unacknowledged();
        all.map(|(name, reason)| (name.to_owned(), reason.map(str::to_owned))).collect()
    }

    /// Whether an answer of Envoy is due.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.shared.lock().ledgers.listeners.unacknowledged().any(|(_, refusal)| refusal.is_none())
    }

    /// Resolves when no answer is due, or without Envoy. The caller sets a deadline.
    pub async fn answered(&self) {
        let mut answered = self.shared.answered.subscribe();
        let is_outstanding = || {
            let state = self.shared.lock();
            let runs = state.process.is_some() || state.supervised.running.is_some();
            runs && state.ledgers.listeners.unacknowledged().any(|(_, refusal)| refusal.is_none())
        };
        while is_outstanding() && answered.changed().await.is_ok() {}
    }

    /// The listener as last set.
    #[must_use]
    pub fn listener(&self, key: ListenerKey) -> Option<Listener> {
        self.shared.lock().listeners.get(&key).cloned()
    }

    /// Listeners that may serve this address, until Envoy acknowledges its removal.
    #[must_use]
    pub fn speakers(&self, address: IpAddr) -> BTreeSet<ListenerKey> {
        let state = self.shared.lock();
        let accepted = |key: ListenerKey| state.ledgers.listeners.versions(&key.to_string()).1;
        state.speakers.of(address.to_canonical(), accepted)
    }

    /// Process number of an Envoy that may have an earlier agent's listeners, for any address.
    #[must_use]
    pub fn inherited(&self) -> Option<i32> {
        let state = self.shared.lock();
        state.process.filter(|_| state.ledgers.listeners.is_inherited()).map(|process| process.pid)
    }

    /// Status of the proxy.
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

    /// Makes Envoy log all requests, until the value is dropped.
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
        // Consistent after every step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record(&self, record: Record) {
        if self.records.try_send(record).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn watchers(&self, change: impl FnOnce(usize) -> usize) {
        let mut state = self.lock();
        state.watchers = change(state.watchers);
        state.set_runtime();
        drop(state);
        self.changed.send_replace(());
    }

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
        // Ends streams of the previous process.
        self.changed.send_replace(());
    }

    pub(crate) fn inherit(&self, process: Process) {
        self.on_process(Arc::new(process));
        self.lock().ledgers.listeners.inherit();
    }

    pub(crate) fn on_process_end(&self, id: ProcessId) {
        let mut state = self.lock();
        if state.process == Some(id) {
            state.end_process();
        }
        drop(state);
        self.answered.send_replace(());
    }

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
            // These types have no waits.
            drop(ledger.process_ended());
        }
        self.forwarded.process_ended();
    }

    pub(crate) fn tell(&mut self, ended: Ended) {
        for (id, result) in ended {
            if let Some(sender) = self.waiting.remove(&id) {
                drop(sender.send(result));
            }
        }
    }
}

/// While one exists, Envoy logs all requests.
#[derive(Debug)]
#[must_use = "dropped, it ends"]
pub struct Watching {
    shared: Arc<Shared>,
}

impl Watching {
    /// Resolves when Envoy logs all requests, or without Envoy. The caller sets a deadline.
    pub async fn begun(&self) {
        let mut answered = self.shared.answered.subscribe();
        let is_outstanding = || {
            let state = self.shared.lock();
            state.process.is_some()
                && state.forwarded.is_counted()
                && state.ledgers.runtime.unacknowledged().next().is_some()
        };
        while is_outstanding() && answered.changed().await.is_ok() {}
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.shared.watchers(|watchers| watchers.saturating_sub(1));
    }
}

fn has_no_more(listener: &Listener, before: &Listener) -> bool {
    listener.requests == before.requests
        && listener.members.iter().all(|(member, addresses)| {
            before.members.get(member).is_some_and(|before| addresses.iter().all(|address| before.contains(address)))
        })
}

/// Microseconds since boot: unique among the servers of an Envoy.
fn first_version() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(|time| u64::try_from(Duration::from(time).as_micros()).unwrap_or(u64::MAX / 2))
        .unwrap_or(1)
        .max(1)
}

/// Resolves when Envoy answers this or a later change of the listener, or the server ends; a removal, also when Envoy
/// ends. Dropping it keeps the change.
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

    /// Waits with a deadline.
    ///
    /// # Errors
    /// Refused, cancelled, or timed out.
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
