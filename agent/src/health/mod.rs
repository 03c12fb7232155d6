//! The health endpoint: a process in a separate network namespace, attached and probed like a container.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | controller ([`run`]) | time, the process's end, requests | endpoint, [`crate::node::health::Health`], monitor |
//! | `wharf-health` (`launch`), a thread for each process | the process | its start, its first word, its end |
//! | the process (`server`) | standard input, connections | answers |

mod address;
mod controller;
mod error;
mod host;
mod judge;
mod launch;
mod probe;
pub mod server;
mod window;

use std::sync::Arc;

use wharf_api::{ComponentStatus, HealthState};
use wharf_core::{identity::Label, identity_allocator::RESERVED_SOURCE};

pub use self::{
    controller::run,
    error::HealthError,
    host::{Host, Responder, ThisHost},
    launch::Process,
    probe::{Outcome, Probed},
};
use crate::node::{health::Health, lifecycle::Lifecycle};

fn label() -> Label {
    Label { source: RESERVED_SOURCE.to_owned(), key: "health".to_owned(), value: String::new() }
}

/// Leases the addresses before the agent serves; the controller retries.
pub async fn reserve(life: &Arc<Lifecycle>, health: &Health) {
    let done = if life.config.health_interval.is_zero() {
        address::let_go(&life.addresses).await
    } else {
        address::lease(life, health).await.map(|kept| {
            health.update(|h| (h.ipv4, h.ipv6) = (kept.ipv4, kept.ipv6));
        })
    };
    if let Err(why) = done {
        tracing::warn!("health endpoint: {why}");
    }
}

/// Status component.
#[must_use]
pub fn component(health: &Health) -> ComponentStatus {
    use wharf_api::Health as Level;
    let view = health.view();
    let health = match view.state {
        HealthState::Ok | HealthState::Off => Level::Ok,
        HealthState::Starting => Level::Pending,
        // Containers may be well.
        HealthState::Degraded | HealthState::WrongAnswer | HealthState::Down => Level::Degraded,
    };
    let message = if view.state == HealthState::Ok {
        view.message
    } else {
        format!("{}: {}; see `wharf health status`", view.state.as_str(), view.message)
    };
    ComponentStatus::new("health", health, message)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wharf_core::{identity::Identity, identity_allocator::IdentityAllocator};

    use super::*;

    #[test]
    fn the_label_stands_for_the_reserved_identity() {
        let identity = IdentityAllocator::new().acquire(&BTreeSet::from([label()]));
        assert_eq!(identity, Ok(Identity::HEALTH));
    }
}
