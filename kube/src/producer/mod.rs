//! Producer of the cluster feed: one task owns the rows and the stream. It applies updates even while the agent does
//! not read: the table coalesces them by key.

mod state;
mod stream;
mod table;

use std::{path::Path, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tonic::transport::{Channel, Endpoint};

use crate::{
    metrics::Metrics,
    source::Kind,
    watch::{States, Update, backoff::Delays},
};

pub use self::{
    state::{AgentState, Refused, cause},
    table::Subject,
};
use self::{stream::Ended, table::Table};

const NAME: &str = "wharf-kube";
/// Detects a hung agent.
const PING: Duration = Duration::from_secs(10);
/// A longer stream resets the delays.
const HEALTHY: Duration = Duration::from_secs(10);
/// Longest delay before a reconnect, without jitter.
const RETRY: Duration = Duration::from_secs(2);
/// Updates applied before the stream is served.
const BATCH: usize = 256;

/// Opens a channel to the agent.
pub type Connect = Arc<dyn Fn() -> BoxFuture<'static, Result<Channel, tonic::transport::Error>> + Send + Sync>;

/// Connects to the agent's feed socket.
///
/// # Errors
/// The path cannot be part of a URI.
pub fn unix(socket: &Path) -> Result<Connect, tonic::transport::Error> {
    let endpoint = endpoint(&format!("unix://{}", socket.display()))?;
    Ok(Arc::new(move || {
        let endpoint = endpoint.clone();
        Box::pin(async move { endpoint.connect().await })
    }))
}

/// An endpoint with the feed's timeouts.
///
/// # Errors
/// It is no URI.
pub fn endpoint(uri: &str) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(uri.to_owned())?;
    Ok(endpoint
        .connect_timeout(PING)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true))
}

/// Names in the opening.
#[derive(Debug, Clone)]
pub struct Names {
    /// Id of the cluster.
    pub cluster: String,
    pub node: String,
}

/// The task.
pub struct Producer {
    names: Names,
    connect: Connect,
    updates: mpsc::Receiver<Update>,
    watches: watch::Receiver<States>,
    table: Table,
    state: watch::Sender<AgentState>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Producer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("names", &self.names).finish_non_exhaustive()
    }
}

impl Producer {
    /// Without stream and rows.
    #[must_use]
    pub fn new(
        names: Names,
        connect: Connect,
        updates: mpsc::Receiver<Update>,
        watches: watch::Receiver<States>,
        state: watch::Sender<AgentState>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { names, connect, updates, watches, table: Table::default(), state, metrics }
    }

    /// Feeds the agent until all update senders are dropped.
    pub async fn run(mut self) {
        let (mut delays, mut cause) = (Delays::up_to(RETRY), String::new());
        loop {
            let began = Instant::now();
            let ended = self.stream().await;
            self.state.send_replace(AgentState::default());
            self.metrics.connected(false);
            let why = match ended {
                Ended::Closed => return,
                Ended::Stream(why) => format!("the stream to the agent ends: {why}"),
                Ended::Rejected(why) => format!("the agent rejects this producer: {why}"),
            };
            // A repeated cause is logged once.
            if why != cause {
                tracing::warn!("{why}");
                cause = why;
            }
            if began.elapsed() >= HEALTHY {
                delays.reset();
            }
            let until = Instant::now() + delays.next(None);
            loop {
                tokio::select! {
                    () = sleep_until(until) => break,
                    update = self.updates.recv() => match update {
                        Some(update) => self.apply(update),
                        None => return,
                    },
                }
            }
        }
    }

    /// Applies an update and the queued ones.
    fn apply(&mut self, update: Update) {
        self.table.apply(update);
        for _ in 0..BATCH {
            let Ok(update) = self.updates.try_recv() else { break };
            self.table.apply(update);
        }
        self.metrics.waiting(self.table.waiting());
        for kind in Kind::ALL {
            self.metrics.rows(kind, self.table.count(kind));
        }
    }
}
