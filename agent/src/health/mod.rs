//! The health endpoint: a process in a separate network namespace, attached and probed like a container; and the probes
//! of the other nodes.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | controller ([`run`]) | time, process end, requests | endpoint, [`crate::node::health::Health`], monitor |
//! | mesh ([`mesh::run`]) | time, cluster nodes | the same view, monitor, log |
//! | direct paths ([`paths::look`]), a controller | paths without a verdict | verdicts ([`crate::cluster`]) |
//! | `wharf-health` (`launch`), a thread per process | the process | its start, first word, end |
//! | process (`server`) | standard input, connections | answers |

mod address;
mod controller;
mod error;
mod host;
mod judge;
mod launch;
pub mod mesh;
pub mod paths;
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

/// Leases the addresses before the agent serves.
pub async fn reserve(life: &Arc<Lifecycle>, health: &Health) {
    let done = if life.config.health_interval.is_zero() {
        address::let_go(&life.network.addresses).await
    } else {
        address::lease(life, health).await.map(|kept| {
            health.update(|h| (h.ipv4, h.ipv6) = (kept.ipv4, kept.ipv6));
        })
    };
    if let Err(why) = done {
        tracing::warn!("health endpoint: {why}");
    }
}

/// Status component. Other nodes never make this node unready.
#[must_use]
pub fn component(health: &Health) -> ComponentStatus {
    use wharf_api::Health as Level;
    let level = |state: HealthState| match state {
        HealthState::Ok | HealthState::Off => Level::Ok,
        HealthState::Starting => Level::Pending,
        HealthState::Degraded | HealthState::WrongAnswer | HealthState::Down => Level::Degraded,
    };
    let (view, peers) = (health.view(), health.peer_counts());
    let own = level(view.state);
    let [_, _, failing] = peers;
    let all = own.max(if failing > 0 { Level::Degraded } else { Level::Ok });
    let mut message =
        if view.state == HealthState::Ok { view.message } else { format!("{}: {}", view.state.as_str(), view.message) };
    message.push_str(&of_peers(peers));
    if view.state != HealthState::Ok || all == Level::Degraded {
        message.push_str("; see `wharf health status`");
    }
    ComponentStatus::new("health", all, message).by_containers(own)
}

fn of_peers([all, starting, failing]: [u64; 3]) -> String {
    let answering = all - starting - failing;
    match (all, starting) {
        (0, _) => String::new(),
        (_, 0) => format!("; {answering} of {all} other nodes answer"),
        _ => format!("; {answering} of {all} other nodes answer, {starting} are not probed yet"),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use wharf_api::NodeHealth;
    use wharf_core::{identity::Identity, identity_allocator::IdentityAllocator};

    use super::*;

    #[test]
    fn the_label_stands_for_the_reserved_identity() {
        let identity = IdentityAllocator::new().acquire(&BTreeSet::from([label()]));
        assert_eq!(identity, Ok(Identity::HEALTH));
    }

    #[test]
    fn other_nodes_degrade_the_component_and_do_not_make_the_node_unready() {
        use wharf_api::Health as Level;
        let health = Health::of("a", Duration::from_secs(10));
        health.update(|h| (h.state, h.message) = (HealthState::Ok, "6 of 6 probes answered".to_owned()));
        let with = |states: &[HealthState]| {
            health.update_peers(|peers| {
                let peer = |state| Arc::new(NodeHealth { state, ..NodeHealth::default() });
                *peers = states.iter().enumerate().map(|(i, state)| (i.to_string(), peer(*state))).collect();
            });
            let shown = component(&health);
            (shown.health, shown.readiness(), shown.message)
        };
        let (ok, starting, down) = (HealthState::Ok, HealthState::Starting, HealthState::Down);
        assert_eq!(with(&[]), (Level::Ok, Level::Ok, "6 of 6 probes answered".to_owned()));
        let message = "6 of 6 probes answered; 1 of 2 other nodes answer, 1 are not probed yet";
        assert_eq!(with(&[ok, starting]), (Level::Ok, Level::Ok, message.to_owned()));
        let message = "6 of 6 probes answered; 1 of 2 other nodes answer; see `wharf health status`";
        assert_eq!(with(&[ok, down]), (Level::Degraded, Level::Ok, message.to_owned()));
    }
}
