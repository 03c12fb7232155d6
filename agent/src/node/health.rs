//! The health endpoint's state and reserved names, and the probe results of other nodes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{mpsc, oneshot};
use wharf_api::{HealthReport, HealthState, NodeHealth};
use wharf_core::{
    ids::{Attachment, ContainerId, IdError, IfName, NetworkName},
    store::LeaseOwner,
};
use wharf_kit::{clock, sync::lock};

use crate::config::AgentConfig;

/// Reserved network, container id and lease owner.
pub const NAME: &str = "wharf-health";
const IFNAME: &str = "eth0";
/// Further askers must retry.
const ASKERS: usize = 16;

pub(crate) type Asker = oneshot::Sender<()>;

pub(crate) type Peers = BTreeMap<String, Arc<NodeHealth>>;

/// Written by the controllers.
pub struct Health {
    view: Mutex<NodeHealth>,
    peers: Mutex<Peers>,
    asks: mpsc::Sender<Asker>,
    inbox: Mutex<Option<mpsc::Receiver<Asker>>>,
    is_on: AtomicBool,
}

impl Health {
    /// Initial state.
    #[must_use]
    pub fn new(config: &AgentConfig) -> Self {
        Self::of(&config.node_name, config.health_interval)
    }

    pub(crate) fn of(node: &str, interval: Duration) -> Self {
        let (asks, inbox) = mpsc::channel(ASKERS);
        let interval_ms = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
        let off = interval_ms == 0;
        let view = NodeHealth {
            node: node.to_owned(),
            local: true,
            state: if off { HealthState::Off } else { HealthState::Starting },
            message: if off { "turned off by --health-interval-ms 0" } else { "not launched yet" }.to_owned(),
            since_unix_ms: clock::unix_ms(),
            interval_ms,
            ..NodeHealth::default()
        };
        Self {
            view: Mutex::new(view),
            peers: Mutex::default(),
            asks,
            inbox: Mutex::new(Some(inbox)),
            is_on: AtomicBool::new(false),
        }
    }

    /// This node's state.
    #[must_use]
    pub fn view(&self) -> NodeHealth {
        lock(&self.view).clone()
    }

    /// For the API.
    #[must_use]
    pub fn report(&self) -> HealthReport {
        let peers: Vec<Arc<NodeHealth>> = lock(&self.peers).values().cloned().collect();
        let peers = peers.iter().map(|peer| NodeHealth::clone(peer));
        HealthReport { nodes: std::iter::once(self.view()).chain(peers).collect() }
    }

    /// Numbers of other nodes: all, not probed yet, failing.
    #[must_use]
    pub fn peer_counts(&self) -> [u64; 3] {
        let peers = lock(&self.peers);
        let count = |of: &dyn Fn(&NodeHealth) -> bool| peers.values().filter(|peer| of(peer)).count() as u64;
        [count(&|_| true), count(&|peer| peer.state == HealthState::Starting), count(&is_failing)]
    }

    /// Number of other nodes by state.
    #[must_use]
    pub fn peer_states(&self) -> BTreeMap<HealthState, u64> {
        let mut states = BTreeMap::new();
        for peer in lock(&self.peers).values() {
            *states.entry(peer.state).or_default() += 1;
        }
        states
    }

    pub(crate) fn update_peers<T>(&self, change: impl FnOnce(&mut Peers) -> T) -> T {
        change(&mut lock(&self.peers))
    }

    /// Requests a round; resolves at its end. `None`: the controller is off, or too many wait.
    pub fn ask(&self) -> Option<oneshot::Receiver<()>> {
        if !self.is_on.load(Ordering::Acquire) {
            return None;
        }
        let (asker, answer) = oneshot::channel();
        self.asks.try_send(asker).ok().map(|()| answer)
    }

    pub(crate) fn take_inbox(&self) -> Option<mpsc::Receiver<Asker>> {
        lock(&self.inbox).take()
    }

    pub(crate) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Whether rounds can be requested.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut NodeHealth) -> T) -> T {
        change(&mut lock(&self.view))
    }
}

/// Consecutive failed rounds before another node counts as failing: a lost packet is not a fault.
pub const PATIENCE: u64 = 3;

/// Whether another node does not answer.
#[must_use]
pub fn is_failing(peer: &NodeHealth) -> bool {
    match peer.state {
        HealthState::Down | HealthState::WrongAnswer => true,
        HealthState::Degraded => peer.failed_rounds >= PATIENCE,
        HealthState::Ok | HealthState::Off | HealthState::Starting => false,
    }
}

/// The health endpoint's attachment. Never fails.
pub fn attachment() -> Result<Attachment, IdError> {
    Ok(Attachment {
        network: NetworkName::parse(NAME)?,
        container_id: ContainerId::parse(NAME)?,
        ifname: IfName::parse(IFNAME)?,
    })
}

/// Whether network or container id is reserved.
#[must_use]
pub fn is_reserved(attachment: &Attachment) -> bool {
    attachment.network.as_str() == NAME || attachment.container_id.as_str() == NAME
}

/// Only the health endpoint may use or release its leases, also during a relaunch.
#[must_use]
pub fn holds(owner: &LeaseOwner) -> bool {
    matches!(owner, LeaseOwner::Caller { name } if name == NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_names() {
        let attachment = attachment().expect("parses");
        assert!(is_reserved(&attachment));
        assert_eq!(attachment.to_string(), "wharf-health/wharf-health:eth0");
    }
}
