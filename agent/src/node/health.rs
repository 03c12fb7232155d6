//! The state of the health endpoint, and its reserved names.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::{mpsc, oneshot};
use wharf_api::{HealthReport, HealthState, NodeHealth};
use wharf_core::{
    ids::{Attachment, ContainerId, IdError, IfName, NetworkName},
    store::LeaseOwner,
};

use crate::{clock, config::AgentConfig, sync::lock};

/// Network, container id and lease owner of the health endpoint; containers may not use them.
pub const NAME: &str = "wharf-health";
/// Interface of the health endpoint.
const IFNAME: &str = "eth0";
/// Clients that may wait for a requested round; further ones are told to retry.
const ASKERS: usize = 16;

/// A client that waits for the end of a round.
pub(crate) type Asker = oneshot::Sender<()>;

/// The state of the health endpoint: written by its controller, read by all tasks.
pub struct Health {
    view: Mutex<NodeHealth>,
    asks: mpsc::Sender<Asker>,
    inbox: Mutex<Option<mpsc::Receiver<Asker>>>,
    /// The controller serves requests for rounds.
    is_on: AtomicBool,
}

impl Health {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(config: &AgentConfig) -> Self {
        let (asks, inbox) = mpsc::channel(ASKERS);
        let interval_ms = u64::try_from(config.health_interval.as_millis()).unwrap_or(u64::MAX);
        let off = interval_ms == 0;
        let view = NodeHealth {
            node: config.node_name.clone(),
            local: true,
            state: if off { HealthState::Off } else { HealthState::Starting },
            message: if off { "turned off by --health-interval-ms 0" } else { "not launched yet" }.to_owned(),
            since_unix_ms: clock::unix_ms(),
            interval_ms,
            ..NodeHealth::default()
        };
        Self { view: Mutex::new(view), asks, inbox: Mutex::new(Some(inbox)), is_on: AtomicBool::new(false) }
    }

    /// A copy of the state.
    #[must_use]
    pub fn view(&self) -> NodeHealth {
        lock(&self.view).clone()
    }

    /// In the API's words.
    #[must_use]
    pub fn report(&self) -> HealthReport {
        HealthReport { nodes: vec![self.view()] }
    }

    /// Requests a round; the receiver resolves when it has ended. None when the controller is off or too many clients
    /// wait.
    pub fn ask(&self) -> Option<oneshot::Receiver<()>> {
        if !self.is_on.load(Ordering::Acquire) {
            return None;
        }
        let (asker, answer) = oneshot::channel();
        self.asks.try_send(asker).ok().map(|()| answer)
    }

    /// The receiver of requests, for the one controller that serves them.
    pub(crate) fn take_inbox(&self) -> Option<mpsc::Receiver<Asker>> {
        lock(&self.inbox).take()
    }

    /// Sets whether the controller serves requests.
    pub(crate) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Whether rounds can be requested now.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Changes the state; called by the controller.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut NodeHealth) -> T) -> T {
        change(&mut lock(&self.view))
    }
}

/// The attachment of the health endpoint.
///
/// # Errors
/// Never: the names are constants, which a test reads.
pub fn attachment() -> Result<Attachment, IdError> {
    Ok(Attachment {
        network: NetworkName::parse(NAME)?,
        container_id: ContainerId::parse(NAME)?,
        ifname: IfName::parse(IFNAME)?,
    })
}

/// Whether an attachment has the network or the container id that is reserved for the health endpoint.
#[must_use]
pub fn is_reserved(attachment: &Attachment) -> bool {
    attachment.network.as_str() == NAME || attachment.container_id.as_str() == NAME
}

/// Whether a lease belongs to the health endpoint: others may not use or release it, also while the endpoint is
/// relaunched.
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
