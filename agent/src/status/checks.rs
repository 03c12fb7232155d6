//! The agent's own checks of what containers see.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health};
use wharf_core::kernel::Kernel;

use super::Source;
use crate::{health, node::part::Fill, selfcheck};

/// The node's own endpoint, as containers see it.
pub(super) fn health_endpoint<K: Kernel>() -> Source<K> {
    Source {
        name: "health",
        look: |node| Box::pin(async move { one(health::component(&node.health)) }),
        silent: |_| (Health::Degraded, "waits for the results of the last probes".into()),
    }
}

/// Test packets through each endpoint's programs.
pub(super) fn programs<K: Kernel>() -> Source<K> {
    Source {
        name: "self-check",
        look: |node| {
            Box::pin(async move { one(selfcheck::component(&node.self_checks, node.life.config.selfcheck_interval)) })
        },
        silent: |_| (Health::Degraded, "waits for the results of the endpoints' checks".into()),
    }
}

fn one(component: ComponentStatus) -> Fill {
    Arc::new(move |status| status.components.push(component.clone()))
}
