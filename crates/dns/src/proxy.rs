//! The proxy as its user sees it: which listeners there are, and how they are.

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

/// Pause after an error of a socket.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Why a port is not served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Port 0.
    #[error("serve DNS at port 0: that is no port; take one from 1 to 65535")]
    NoPort,
    /// A listening socket.
    #[error("listen for DNS queries at {address} ({transport}): {source}; end what has the port, or take another one")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// For what.
        transport: Transport,
        /// Why it failed.
        source: io::Error,
    },
    /// The sockets for answers.
    #[error("make the sockets for answers to DNS queries: {source}; the agent needs CAP_NET_ADMIN and CAP_NET_RAW")]
    Speaker {
        /// Why it failed.
        source: io::Error,
    },
}

/// How the proxy is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// Ports that are served.
    pub listeners: Vec<u16>,
    /// Ports that are wanted and could not be served when they were last set, and why.
    pub failed: BTreeMap<u16, String>,
    /// Queries whose answer is awaited or being learned.
    pub pending: usize,
    /// TCP connections of clients.
    pub connections: usize,
    /// Queries that have ended, by the name of their outcome ([`crate::Outcome::name`]), since the proxy was made.
    pub totals: BTreeMap<&'static str, u64>,
    /// Datagrams and connections that were dropped because they are of no member, or were not redirected.
    pub strangers: u64,
    /// Connections that were closed because there were too many.
    pub connections_refused: u64,
    /// Records that were dropped because nobody took them in time.
    pub records_lost: u64,
}

/// The proxy. Everything that it does ends when it is dropped.
pub struct DnsProxy {
    node: Arc<dyn Names>,
    books: Arc<Books>,
    /// One change at a time, in the order of the calls: a port that an earlier change removes is free before a later one binds it.
    turn: Semaphore,
    /// Held for a change of the table and the calls that bind sockets, never across an await.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ports: BTreeMap<u16, Open>,
    failed: BTreeMap<u16, String>,
    /// As long as any port is served.
    speaker: Option<Arc<Speaker>>,
}

/// A port that is served.
struct Open {
    port: Arc<Port>,
    /// One for each socket, which it owns.
    tasks: JoinSet<()>,
}

impl DnsProxy {
    /// A proxy without listeners, and the records of what is asked. Of the records that are not taken in time at most `records` (at least 1)
    /// are kept; later ones are counted in [`Status::records_lost`] and dropped.
    #[must_use]
    pub fn new(node: Arc<dyn Names>, records: usize) -> (Self, mpsc::Receiver<Record>) {
        let (sender, receiver) = mpsc::channel(records.max(1));
        let books = Arc::new(Books::new(sender));
        (Self { node, books, turn: Semaphore::new(1), state: Mutex::default() }, receiver)
    }

    /// Makes these all the listeners, by port (host byte order). A port that is served already goes on with its sockets and pending queries, by
    /// what is now to be asked. Before this returns, the sockets of new ports are bound, and those of ports that are gone are closed; the
    /// pending queries of the latter get no answer. A port that fails leaves the others alone and is tried again by the next call.
    ///
    /// Call it in a tokio runtime; the network namespace is that of the threads of the runtime. Dropped, it has closed some ports and opened none.
    ///
    /// # Errors
    ///
    /// Of each port on its own.
    pub async fn set(&self, listeners: BTreeMap<u16, Listener>) -> BTreeMap<u16, Result<(), Error>> {
        // Fails if the semaphore is closed, which it never is.
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

    /// How the proxy is.
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
        // The table is whole after every step; a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Whether a task has ended, which none does unless it panics.
    fn has_ended(&mut self) -> bool {
        let Some(end) = self.tasks.try_join_next() else { return false };
        ended(end, self.port.number);
        true
    }
}

/// A task has ended.
pub(crate) fn ended(end: Result<(), JoinError>, port: u16) {
    if let Err(error) = end {
        tracing::error!(port, %error, "a task of the DNS proxy ended");
    }
}
