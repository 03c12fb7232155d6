//! What is known of the health endpoint, and the names that are its own.

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

/// Network, container id and holder of the addresses of the health endpoint; no container may have any of them.
pub const NAME: &str = "wharf-health";
/// Its interface.
const IFNAME: &str = "eth0";
/// Who may wait for a round that was asked for; whoever comes then is told to come again.
const ASKERS: usize = 16;

/// Somebody who waits for the end of a round.
pub(crate) type Asker = oneshot::Sender<()>;

/// What is known of the health endpoint: written by its controller, read by all.
pub struct Health {
    view: Mutex<NodeHealth>,
    asks: mpsc::Sender<Asker>,
    inbox: Mutex<Option<mpsc::Receiver<Asker>>>,
    /// The controller serves those who ask.
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

    /// A copy of what is known.
    #[must_use]
    pub fn view(&self) -> NodeHealth {
        lock(&self.view).clone()
    }

    /// In the API's words.
    #[must_use]
    pub fn report(&self) -> HealthReport {
        HealthReport { nodes: vec![self.view()] }
    }

    /// Asks for a round; the receiver is told when it has ended. None when nobody would serve it, or too many wait.
    pub fn ask(&self) -> Option<oneshot::Receiver<()>> {
        if !self.is_on.load(Ordering::Acquire) {
            return None;
        }
        let (asker, answer) = oneshot::channel();
        self.asks.try_send(asker).ok().map(|()| answer)
    }

    /// Those who ask, for the one controller that serves them.
    pub(crate) fn take_inbox(&self) -> Option<mpsc::Receiver<Asker>> {
        lock(&self.inbox).take()
    }

    /// The controller begins or ends to serve those who ask.
    pub(crate) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Whether rounds can be asked for now.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Changes what is known; called by the controller.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut NodeHealth) -> T) -> T {
        change(&mut lock(&self.view))
    }
}

/// Its attachment.
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

/// Whether an attachment is the health endpoint's, or would pass for it: its network and container id are the agent's
/// own to give.
#[must_use]
pub fn is_reserved(attachment: &Attachment) -> bool {
    attachment.network.as_str() == NAME || attachment.container_id.as_str() == NAME
}

/// Whether a lease is the health endpoint's: nobody else may use it or give it back, also while it is launched anew.
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
