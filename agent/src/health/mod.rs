//! The health endpoint: a process of our own in a network namespace of its own, attached like any container's, and
//! probed from the node through the same programs that containers use.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | controller ([`run`]) | time, the process's end, who asks for a round | the endpoint, [`Health`], metrics, monitor |
//! | `wharf-health` (`launch`), a thread for each process | the process | its start, its first word, its end |
//! | the process (`server`) | standard input, connections | answers |

mod address;
mod controller;
mod host;
mod judge;
mod launch;
mod probe;
pub mod server;
mod window;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::{mpsc, oneshot};
use wharf_api::{ComponentStatus, HealthReport, HealthState, NodeHealth};
use wharf_core::{
    identity::Label,
    identity_allocator::RESERVED_SOURCE,
    ids::{Attachment, ContainerId, IdError, IfName, NetworkName},
    kernel::Kernel,
    store::LeaseOwner,
};

pub use self::{
    controller::run,
    host::{Host, Responder, ThisHost},
    launch::Process,
    probe::{Outcome, Probed},
};
use crate::{clock, config::AgentConfig, node::Node, sync::lock};

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

    /// Whether rounds can be asked for now.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    fn update<T>(&self, change: impl FnOnce(&mut NodeHealth) -> T) -> T {
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

fn label() -> Label {
    Label { source: RESERVED_SOURCE.to_owned(), key: "health".to_owned(), value: String::new() }
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
    address::is_ours(owner)
}

/// Right after restore, before anything is served: leases the kept addresses before anybody else can. What fails is
/// said, and tried again by the controller.
pub async fn reserve<K: Kernel>(node: &Arc<Node<K>>) {
    let done = if node.config.health_interval.is_zero() {
        address::let_go(node).await
    } else {
        address::lease(node).await.map(|kept| {
            node.health.update(|h| (h.ipv4, h.ipv6) = (kept.ipv4, kept.ipv6));
        })
    };
    if let Err(why) = done {
        tracing::warn!("health endpoint: {why}");
    }
}

/// Its line in `wharf status`.
#[must_use]
pub fn component<K: Kernel>(node: &Node<K>) -> ComponentStatus {
    use wharf_api::Health as Level;
    let view = node.health.view();
    let health = match view.state {
        HealthState::Ok | HealthState::Off => Level::Ok,
        HealthState::Starting => Level::Pending,
        // Down itself, it does not put the node down: containers may be well, and the agent serves.
        HealthState::Degraded | HealthState::WrongAnswer | HealthState::Down => Level::Degraded,
    };
    let message = if view.state == HealthState::Ok {
        view.message
    } else {
        format!("{}: {}; see `wharf health status`", view.state.as_str(), view.message)
    };
    ComponentStatus { name: "health".to_owned(), health, message, stale_ms: None }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wharf_core::{identity::Identity, identity_allocator::IdentityAllocator};

    use super::*;

    #[test]
    fn the_names_are_names() {
        let attachment = attachment().expect("parses");
        assert!(is_reserved(&attachment));
        assert_eq!(attachment.to_string(), "wharf-health/wharf-health:eth0");
    }

    #[test]
    fn the_label_stands_for_the_reserved_identity() {
        let identity = IdentityAllocator::new().acquire(&BTreeSet::from([label()]));
        assert_eq!(identity, Ok(Identity::HEALTH));
    }
}
