//! The agent's checks of the containers' network.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health};

use super::Source;
use crate::{health, node::part::Fill, selfcheck};

pub(super) fn health_endpoint() -> Source {
    Source {
        name: "health",
        look: |node| Box::pin(async move { one(health::component(&node.health)) }),
        silent: |_| (Health::Degraded, "waits for the results of the last probes".into()),
    }
}

pub(super) fn programs() -> Source {
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
