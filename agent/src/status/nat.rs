//! What the node does for packets that leave it.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health};
use wharf_core::{
    finding::Problem,
    kernel::{Kernel, NatView},
};

use super::{Source, of};
use crate::node::{lifecycle::Lifecycle, part::Fill};

pub(super) fn source<K: Kernel>() -> Source<K> {
    Source {
        name: "masquerade",
        look: |node| Box::pin(async move { look(&node.life).await }),
        silent: |_| (Health::Degraded, "waits for the kernel to tell of the node's nftables table".into()),
    }
}

async fn look<K: Kernel>(life: &Lifecycle<K>) -> Fill {
    let spec = life.spec();
    let (amiss, message) = match life.kernel.observe_nat(&spec).await {
        Ok(view) => in_words(&view, spec.masquerade.is_some()),
        Err(error) => (true, error.to_string()),
    };
    let network = match &spec.masquerade {
        None => "off: what leaves the node keeps its address",
        Some(_) if amiss => "on, but not in force",
        Some(_) => "on: what leaves the pools takes an address of the node",
    };
    Arc::new(move |status| {
        network.clone_into(&mut status.network.masquerading);
        status.components.push(ComponentStatus::new("masquerade", of(amiss, Health::Degraded), message.clone()));
    })
}

/// Whether something is amiss, and what is told.
fn in_words(view: &NatView, on: bool) -> (bool, String) {
    if let Some(problem) = view.problems.first() {
        let more = match view.problems.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let problem = Problem::Node(problem.clone());
        return (true, format!("{}: {problem}{more}; `wharf audit` says what to do", problem.subject()));
    }
    let mut parts = vec![if on { "on" } else { "off" }.to_owned()];
    if !view.changed.is_empty() {
        parts.push(format!("set by Wharf: {}", view.changed.join(", ")));
    }
    if !view.dropping.is_empty() {
        let chains = view.dropping.join(", ");
        parts.push(format!("drops by default, unless its rules accept the containers: chain {chains}"));
    }
    (false, parts.join("; "))
}
