//! Interface of the proxy.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc},
    task::{JoinError, JoinSet},
};

use crate::{
    books::Books,
    listener::{Listener, Names},
    query::Port,
    record::{Record, Transport},
    socket::Sockets,
    speaker::Speaker,
    tcp, udp,
};

pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// A port is not served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Port 0.
    #[error("serve DNS at port 0: that is no port; take one from 1 to 65535")]
    NoPort,
    /// A listening socket failed.
    #[error("listen for DNS queries at {address} ({transport}): {source}; end what has the port, or take another one")]
    Bind { address: SocketAddr, transport: Transport, source: io::Error },
    /// Sockets for answers failed.
    #[error("make the sockets for answers to DNS queries: {source}; the agent needs CAP_NET_ADMIN and CAP_NET_RAW")]
    Speaker { source: io::Error },
}

/// Status of the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// Served ports.
    pub listeners: Vec<u16>,
    /// Ports that failed to open, with the reason.
    pub failed: BTreeMap<u16, String>,
    /// Queries that wait for an answer or for learning.
    pub pending: usize,
    /// TCP connections of clients.
    pub connections: usize,
    /// Queries per [`crate::Outcome::name`].
    pub totals: BTreeMap<&'static str, u64>,
    /// Packets and connections dropped without member or redirection.
    pub strangers: u64,
    /// Connections closed at the limit.
    pub connections_refused: u64,
    /// Records lost to a slow receiver.
    pub records_lost: u64,
}

/// The proxy. Dropping it ends its work.
pub struct DnsProxy {
    node: Arc<dyn Names>,
    books: Arc<Books>,
    /// Serializes [`DnsProxy::set`]: a removed port is free before a later bind.
    turn: Semaphore,
    /// Never held across an await.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ports: BTreeMap<u16, Open>,
    failed: BTreeMap<u16, String>,
    speaker: Option<Arc<Speaker>>,
}

struct Open {
    port: Arc<Port>,
    tasks: JoinSet<()>,
}

impl DnsProxy {
    /// The proxy and its records, of which at most `records` (at least 1) are buffered.
    #[must_use]
    pub fn new(node: Arc<dyn Names>, records: usize) -> (Self, mpsc::Receiver<Record>) {
        let (sender, receiver) = mpsc::channel(records.max(1));
        let books = Arc::new(Books::new(sender));
        (Self { node, books, turn: Semaphore::new(1), state: Mutex::default() }, receiver)
    }

    /// Replaces all listeners, by port (host byte order), and retries failed ports. A served port keeps its sockets and
    /// pending queries; a removed one answers no pending queries.
    ///
    /// Call it in a tokio runtime, whose threads' network namespace applies. A dropped future has closed some ports and
    /// opened none.
    ///
    /// # Errors
    /// Per port.
    pub async fn set(&self, listeners: BTreeMap<u16, Listener>) -> BTreeMap<u16, Result<(), Error>> {
        // Never closed.
        let _turn = self.turn.acquire().await;
        let gone: Vec<_> = {
            let mut state = self.state();
            state.failed.clear();
            state.ports.extract_if(.., |port, open| open.has_ended() || !listeners.contains_key(port)).collect()
        };
        for (_, mut open) in gone {
            open.tasks.shutdown().await;
        }
        let mut state = self.state();
        let mut results = BTreeMap::new();
        for (port, listener) in listeners {
            let result = self.ensure(&mut state, port, listener);
            if let Err(error) = &result {
                state.failed.insert(port, error.to_string());
            }
            results.insert(port, result);
        }
        if state.ports.is_empty() {
            state.speaker = None;
        }
        results
    }

    fn ensure(&self, state: &mut State, number: u16, listener: Listener) -> Result<(), Error> {
        if let Some(open) = state.ports.get(&number) {
            open.port.serve(listener);
            return Ok(());
        }
        let speaker = match &state.speaker {
            Some(speaker) => Arc::clone(speaker),
            None => Arc::new(Speaker::new().map_err(|source| Error::Speaker { source })?),
        };
        let sockets = Sockets::open(number)?;
        state.speaker = Some(Arc::clone(&speaker));
        let port = Port::new(number, listener, Arc::clone(&self.node), Arc::clone(&self.books), speaker);
        let (port, mut tasks) = (Arc::new(port), JoinSet::new());
        for socket in sockets.udp {
            tasks.spawn(udp::serve(Arc::clone(&port), socket));
        }
        for socket in sockets.tcp {
            tasks.spawn(tcp::serve(Arc::clone(&port), socket));
        }
        state.ports.insert(number, Open { port, tasks });
        Ok(())
    }

    /// The proxy's status.
    #[must_use]
    pub fn status(&self) -> Status {
        let (listeners, failed) = {
            let state = self.state();
            (state.ports.keys().copied().collect(), state.failed.clone())
        };
        let pages = self.books.pages();
        Status {
            listeners,
            failed,
            pending: pages.all.queries,
            connections: pages.all.connections,
            totals: pages.totals.clone(),
            strangers: pages.strangers,
            connections_refused: pages.connections_refused,
            records_lost: pages.records_lost,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Consistent after every step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Tasks end only by panic.
    fn has_ended(&mut self) -> bool {
        let Some(end) = self.tasks.try_join_next() else { return false };
        ended(end, self.port.number);
        true
    }
}

pub(crate) fn ended(end: Result<(), JoinError>, port: u16) {
    if let Err(error) = end {
        tracing::error!(port, %error, "a task of the DNS proxy ended");
    }
}
