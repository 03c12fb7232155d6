//! Status of proxy and Envoy.

use std::{collections::BTreeMap, time::SystemTime};

use crate::{
    process::ProcessId,
    shares::{Connections, Share},
};

/// Status of the proxy and of Envoy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub state: EnvoyState,
    /// Last change of state.
    pub since: SystemTime,
    /// Version of a connected Envoy.
    pub version: Option<String>,
    /// Process number of a running Envoy.
    pub pid: Option<i32>,
    /// Restarts by this agent.
    pub restarts: u64,
    /// Envoy's last end or failed start.
    pub last_error: Option<String>,
    /// Served xDS streams.
    pub connected_streams: usize,
    /// Waits without an answer of Envoy.
    pub pending_waits: usize,
    /// Configured listeners.
    pub listeners: usize,
    /// Refused resources, with the reason.
    pub refused: BTreeMap<String, String>,
    /// Records lost to a slow receiver.
    pub records_lost: u64,
    /// Forwarded requests and TLS connections, updated once a second.
    pub forwarded: u64,
    /// Limits of Envoy's connections.
    pub connections: Connections,
    /// Shares exhausted within a minute, with refused connections.
    pub spent: BTreeMap<Share, u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EnvoyState {
    /// Not started.
    #[default]
    Absent,
    /// Running, without a connection.
    Starting,
    /// Running and connected.
    Serving,
    /// Ended; restart pending.
    Waiting,
}

#[derive(Debug)]
pub(crate) struct Supervised {
    pub(crate) only_supervised: bool,
    pub(crate) running: Option<ProcessId>,
    pub(crate) waiting: bool,
    pub(crate) since: SystemTime,
    pub(crate) restarts: u64,
    pub(crate) last_error: Option<String>,
}

impl Default for Supervised {
    fn default() -> Self {
        let since = SystemTime::now();
        Self { only_supervised: false, running: None, waiting: false, since, restarts: 0, last_error: None }
    }
}

impl Supervised {
    pub(crate) fn status(&self, streams: usize, process: Option<ProcessId>, version: Option<String>) -> Status {
        // An unsupervised Envoy is known only by its streams.
        let state = match (self.running, self.waiting) {
            _ if streams > 0 => EnvoyState::Serving,
            (Some(_), _) => EnvoyState::Starting,
            (None, true) => EnvoyState::Waiting,
            (None, false) => EnvoyState::Absent,
        };
        Status {
            state,
            since: self.since,
            version,
            pid: self.running.or(process).map(|process| process.pid),
            restarts: self.restarts,
            last_error: self.last_error.clone(),
            connected_streams: streams,
            pending_waits: 0,
            listeners: 0,
            refused: BTreeMap::new(),
            records_lost: 0,
            forwarded: 0,
            connections: Connections::here(),
            spent: BTreeMap::new(),
        }
    }
}
