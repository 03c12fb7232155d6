//! Addresses: pools and their fill, the router's own.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health, IpFamily};
use wharf_core::kernel::Kernel;

use super::{Fill, Source, of};
use crate::{node::Node, rest::ipam::pools};

pub(super) fn source<K: Kernel>() -> Source<K> {
    Source {
        name: "ipam",
        look: |node| Box::pin(async move { look(&node) }),
        silent: |_| (Health::Degraded, "waits for the table of addresses".into()),
    }
}

fn look<K: Kernel>(node: &Node<K>) -> Fill {
    let (pools, router) = (pools(node), node.routers());
    let family = |family| if family == IpFamily::Ipv4 { "IPv4" } else { "IPv6" };
    let full: Vec<String> =
        pools.iter().filter(|p| p.used >= p.total).map(|p| format!("{} {}", p.name, family(p.family))).collect();
    let message = if full.is_empty() {
        "addresses free in every pool".to_owned()
    } else {
        format!("exhausted: {}", full.join(", "))
    };
    Arc::new(move |status| {
        status.ipam.clone_from(&pools);
        status.router.clone_from(&router);
        let health = of(!full.is_empty(), Health::Degraded);
        status.components.push(ComponentStatus::new("ipam", health, message.clone()));
    })
}
