//! Masquerading and forwarding.

use std::sync::Arc;

use wharf_api::{ComponentStatus, ConnectionStatus, Health};
use wharf_core::{
    finding::Problem,
    kernel::{ForeignChain, Kernel, NatView, Tracked},
    nat::{Masquerade, accepting},
};

use super::{Source, of};
use crate::node::{endpoint::Handle, lifecycle::Lifecycle, network::NodeNetwork, part::Fill, registry::Registry};

pub(super) fn source() -> Source {
    Source {
        name: "masquerade",
        look: |node| {
            Box::pin(async move {
                let Lifecycle { kernel, network, endpoints, .. } = &*node.life;
                look(&**kernel, network, &endpoints.registry).await
            })
        },
        silent: |_| (Health::Degraded, "waits for the kernel to tell of the node's nftables table".into()),
    }
}

async fn look(kernel: &dyn Kernel, network: &NodeNetwork, registry: &Registry) -> Fill {
    let spec = network.spec();
    let (amiss, (health, message), tracked) = match kernel.observe_nat(&spec).await {
        Ok(view) => {
            let has_ports = |handle: &Handle| handle.shared.read(|v| !v.record.ports.is_empty());
            let publishers = registry.list().iter().filter(|handle| has_ports(handle)).count();
            let words = in_words(&view, spec.masquerade.as_ref(), publishers);
            (!view.problems.is_empty(), words, view.tracked.filter(|_| spec.masquerade.is_some()))
        }
        Err(error) => (true, (Health::Degraded, error.to_string()), None),
    };
    let network = match &spec.masquerade {
        None => "off: what leaves the node keeps its address",
        Some(_) if amiss => "on, but not in force",
        Some(_) => "on: what leaves the pools takes an address of the node",
    };
    Arc::new(move |status| {
        network.clone_into(&mut status.network.masquerading);
        status.components.push(ComponentStatus::new("masquerade", health, message.clone()));
        if let Some(tracked) = tracked {
            status.network.connections = Some(ConnectionStatus { entries: tracked.entries, limit: tracked.limit });
            status.components.push(connections(tracked));
        }
    })
}

fn connections(tracked: Tracked) -> ComponentStatus {
    let Tracked { entries, limit } = tracked;
    let mut message = format!("{entries} of {limit} tracked");
    if tracked.is_nearly_full() {
        message += "; when all are taken, new connections of node and containers are dropped: raise \
                    net.netfilter.nf_conntrack_max (`sysctl -w`), or find who opens them (`conntrack -L`, \
                    /proc/net/nf_conntrack)";
    }
    ComponentStatus::new("connections", of(tracked.is_nearly_full(), Health::Degraded), message)
        .by_containers(Health::Ok)
}

fn in_words(view: &NatView, masquerade: Option<&Masquerade>, publishers: usize) -> (Health, String) {
    if let Some(problem) = view.problems.first() {
        let more = match view.problems.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let problem = Problem::Node(problem.clone());
        return (Health::Degraded, format!("{}: {problem}{more}; `wharf audit` says what to do", problem.subject()));
    }
    let mut parts = vec![if masquerade.is_some() { "on" } else { "off" }.to_owned()];
    if !view.changed.is_empty() {
        parts.push(format!("set by Wharf: {}", view.changed.join(", ")));
    }
    for chain in &view.foreign {
        let ForeignChain { name, refused, unclear } = chain;
        if !refused.is_empty() {
            let pools = refused.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let mend = accepting(name, refused).map(|command| format!(": `{command}`")).unwrap_or_default();
            parts.push(format!("chain {name} refuses packets of {pools}; accept them in it{mend}"));
        } else if *unclear {
            parts.push(format!("chain {name} may refuse packets of containers: not all of its rules can be judged"));
        }
    }
    let lost = masquerade.is_none() && publishers > 0;
    if lost {
        let whose = if publishers == 1 { "1 container".to_owned() } else { format!("{publishers} containers") };
        parts.push(format!(
            "nothing translates the published ports of {whose} (`wharf port list`): restart the agent with \
             --masquerade on, or recreate them without ports"
        ));
    }
    let refused = view.foreign.iter().any(|chain| !chain.refused.is_empty());
    (if lost || refused { Health::Degraded } else { Health::Ok }, parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_that_refuse_and_ports_that_are_lost_are_degraded_and_a_chain_that_cannot_be_judged_is_told() {
        let chain = |refused: &[&str], unclear| ForeignChain {
            name: "ip filter FORWARD".to_owned(),
            refused: refused.iter().map(|pool| pool.parse().unwrap()).collect(),
            unclear,
        };
        let words = |foreign| in_words(&NatView { foreign, ..NatView::default() }, Some(&Masquerade::default()), 1);
        let (health, said) = words(vec![chain(&["10.77.0.0/16"], true)]);
        assert_eq!(health, Health::Degraded);
        assert!(said.contains("in it: `nft 'insert rule ip filter FORWARD ip saddr 10.77.0.0/16 accept; "), "{said}");
        let (health, said) = in_words(&NatView::default(), None, 2);
        assert!(health == Health::Degraded && said.contains("ports of 2 containers"), "{said}");
        assert_eq!(in_words(&NatView::default(), None, 0), (Health::Ok, "off".to_owned()));
        let (health, said) = words(vec![chain(&[], true)]);
        assert!(health == Health::Ok && said.contains("FORWARD may refuse") && !said.contains('`'), "{said}");
    }

    #[test]
    fn a_table_that_fills_is_told_before_it_is_full() {
        let row = |entries, limit| connections(Tracked { entries, limit });
        assert_eq!((row(79, 100).health, row(79, 100).message.as_str()), (Health::Ok, "79 of 100 tracked"));
        for full in [row(80, 100), row(100, 100), row(u64::MAX, u64::MAX)] {
            assert_eq!((full.health, full.readiness()), (Health::Degraded, Health::Ok));
            assert!(full.message.contains("nf_conntrack_max"), "{}", full.message);
        }
        assert_eq!(row(7, 0).health, Health::Ok, "no limit");
    }
}
