//! Endpoints by state, steps that do not end, admission.

use std::{collections::BTreeMap, sync::Arc};

use wharf_api::{ComponentStatus, Health, PreparedStatus};
use wharf_core::{kernel::Kernel, state::State};

use super::{Fill, Source, of};
use crate::{node::Node, stuck};

/// Endpoints and steps that are named one by one; the rest is counted.
const NAMED: usize = 3;

pub(super) fn source<K: Kernel>() -> Source<K> {
    Source {
        name: "endpoints",
        look: |node| Box::pin(async move { look(&node) }),
        silent: |_| (Health::Degraded, "waits for the table of endpoints".into()),
    }
}

fn look<K: Kernel>(node: &Node<K>) -> Fill {
    let mut states: BTreeMap<String, u64> = BTreeMap::new();
    let mut failing = Vec::new();
    for handle in node.registry.list() {
        let (state, bad) = handle.shared.read(|v| {
            let state = v.fsm.state;
            let waits = state == State::Disconnecting && !v.status.waits_for.is_empty();
            (state, waits || v.status.last_error.is_some())
        });
        *states.entry(state.as_str().to_owned()).or_default() += 1;
        if bad {
            failing.push(handle.id.to_string());
        }
    }
    let endpoints = if failing.is_empty() {
        "all as they should be".to_owned()
    } else {
        format!("need attention: {}", named(&failing.iter().map(|id| format!("endpoint {id}")).collect::<Vec<_>>()))
    };
    let stuck = stuck::stuck(node);
    let steps: Vec<String> =
        stuck.iter().map(|s| format!("endpoint {} in {} for {} s", s.endpoint, s.step, s.for_ms / 1_000)).collect();
    let admission = node.gate.status();
    let (ready, target) = node.prepared.fill();
    Arc::new(move |status| {
        status.endpoints.clone_from(&states);
        let health = of(!failing.is_empty(), Health::Degraded);
        status.components.push(ComponentStatus::new("endpoints", health, endpoints.clone()));
        // Only while there is something to tell.
        if !stuck.is_empty() {
            let message = format!("{} of them: {}", stuck.len(), named(&steps));
            status.components.push(ComponentStatus::new("stuck-steps", Health::Degraded, message));
        }
        if admission.waiting > 0 {
            let message = format!(
                "{} creates wait, {} run beside {} deletes, one ends every {} ms",
                admission.waiting, admission.running, admission.deletes, admission.cost_ms
            );
            status.components.push(ComponentStatus::new("admission", Health::Ok, message));
        }
        status.stuck.clone_from(&stuck);
        status.admission = admission.clone();
        status.prepared = PreparedStatus { ready: ready as u64, target: target as u64 };
    })
}

fn named(all: &[String]) -> String {
    let more = all.len().saturating_sub(NAMED);
    let shown = all.get(..NAMED).unwrap_or(all).join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
