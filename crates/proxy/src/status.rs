//! How the proxy is, for whoever asks.

use std::{collections::BTreeMap, time::SystemTime};

use crate::{
    process::ProcessId,
    shares::{Connections, Share},
};

/// How the proxy is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// What its Envoy does.
    pub state: EnvoyState,
    /// Since when it does that.
    pub since: SystemTime,
    /// Envoy's version, once it has connected.
    pub version: Option<String>,
    /// Envoy's process, as long as there is one.
    pub pid: Option<i32>,
    /// How often Envoy ended or could not be started, and was to be started again, since this agent supervises it.
    pub restarts: u64,
    /// Why Envoy ended or did not start, last time.
    pub last_error: Option<String>,
    /// xDS streams of Envoys that are served.
    pub connected_streams: usize,
    /// Waits that Envoy has not answered.
    pub pending_waits: usize,
    /// Listeners wanted.
    pub listeners: usize,
    /// Resources that Envoy refused and has no later version of, and its reason.
    pub refused: BTreeMap<String, String>,
    /// Records that were dropped because nobody took them in time, since the proxy was made.
    pub records_lost: u64,
    /// What Envoys sent on to servers, requests and TLS connections, since the proxy was made, as far as they count it themselves: records of these
    /// say so ([`Record::is_counted`](crate::Record::is_counted)). Told once a second.
    pub forwarded: u64,
    /// Connections that Envoy takes, and the shares of them.
    pub connections: Connections,
    /// Shares that were spent within the last minute, each with the connections that Envoy refused for it since the endpoint or the listener is there.
    pub spent: BTreeMap<Share, u64>,
}

/// What Envoy does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EnvoyState {
    /// Nobody has started one.
    #[default]
    Absent,
    /// It runs and has not connected, or not again.
    Starting,
    /// It runs and is connected.
    Serving,
    /// It ended, and is started again soon.
    Waiting,
}

/// What the supervisor knows.
#[derive(Debug)]
pub(crate) struct Supervised {
    /// No other Envoy is served than one that was started or taken over here.
    pub(crate) only_supervised: bool,
    pub(crate) running: Option<ProcessId>,
    /// Whether it will be started again.
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
    /// The status, without what the proxy itself knows.
    pub(crate) fn status(&self, streams: usize, process: Option<ProcessId>, version: Option<String>) -> Status {
        // An Envoy that nobody here supervises shows by its streams alone.
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
