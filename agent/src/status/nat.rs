//! What the node does for packets that leave it.

use std::sync::Arc;

use wharf_api::{ComponentStatus, ConnectionStatus, Health};
use wharf_core::{
    finding::Problem,
    kernel::{Kernel, NatView, Tracked},
    nat::Masquerade,
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
    let (amiss, message, tracked) = match life.kernel.observe_nat(&spec).await {
        Ok(view) => {
            let (amiss, message) = in_words(&view, spec.masquerade.as_ref());
            (amiss, message, view.tracked.filter(|_| spec.masquerade.is_some()))
        }
        Err(error) => (true, error.to_string(), None),
    };
    let network = match &spec.masquerade {
        None => "off: what leaves the node keeps its address",
        Some(_) if amiss => "on, but not in force",
        Some(_) => "on: what leaves the pools takes an address of the node",
    };
    Arc::new(move |status| {
        network.clone_into(&mut status.network.masquerading);
        status.components.push(ComponentStatus::new("masquerade", of(amiss, Health::Degraded), message.clone()));
        if let Some(tracked) = tracked {
            status.network.connections = Some(ConnectionStatus { entries: tracked.entries, limit: tracked.limit });
            status.components.push(connections(tracked));
        }
    })
}

/// The row of the connection tracking.
fn connections(tracked: Tracked) -> ComponentStatus {
    let Tracked { entries, limit } = tracked;
    let mut message = format!("{entries} of {limit} tracked");
    if tracked.is_nearly_full() {
        message += "; when all are taken, new connections of node and containers are dropped: raise \
                    net.netfilter.nf_conntrack_max (`sysctl -w`), or find who opens them (`conntrack -L`, \
                    /proc/net/nf_conntrack)";
    }
    ComponentStatus::new("connections", of(tracked.is_nearly_full(), Health::Degraded), message)
}

/// Whether something is amiss, and what is told.
fn in_words(view: &NatView, masquerade: Option<&Masquerade>) -> (bool, String) {
    if let Some(problem) = view.problems.first() {
        let more = match view.problems.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let problem = Problem::Node(problem.clone());
        return (true, format!("{}: {problem}{more}; `wharf audit` says what to do", problem.subject()));
    }
    let mut parts = vec![if masquerade.is_some() { "on" } else { "off" }.to_owned()];
    if !view.changed.is_empty() {
        parts.push(format!("set by Wharf: {}", view.changed.join(", ")));
    }
    for chain in &view.dropping {
        let mend = match masquerade.map(|m| m.accepting(chain)) {
            Some(Some(command)) => format!(": `{command}`"),
            // No container of that family is masqueraded.
            Some(None) => continue,
            None => String::new(),
        };
        parts.push(format!("chain {chain} drops what its rules do not accept, so accept the containers in it{mend}"));
    }
    (false, parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_fills_is_told_before_it_is_full() {
        let row = |entries, limit| connections(Tracked { entries, limit });
        assert_eq!((row(79, 100).health, row(79, 100).message.as_str()), (Health::Ok, "79 of 100 tracked"));
        for full in [row(80, 100), row(100, 100), row(u64::MAX, u64::MAX)] {
            assert_eq!(full.health, Health::Degraded);
            assert!(full.message.contains("nf_conntrack_max"), "{}", full.message);
        }
        assert_eq!(row(7, 0).health, Health::Ok, "no limit");
    }
}
