//! Endpoints by state, stuck steps, admission.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use wharf_api::{ComponentStatus, Health, PreparedStatus};
use wharf_core::{kernel::Kernel, state::State};

use super::{Source, of};
use crate::{
    endpoint::look,
    node::{endpoints::Endpoints, lifecycle::Lifecycle, part::Fill},
    stuck,
};

const NAMED: usize = 3;

pub(super) fn source() -> Source {
    Source {
        name: "endpoints",
        look: |node| {
            Box::pin(async move {
                let Lifecycle { endpoints, kernel, config, .. } = &*node.life;
                seen(endpoints, &**kernel, config.proxy_timeout).await
            })
        },
        silent: |_| (Health::Degraded, "waits for the table of endpoints, or for the kernel's of interfaces".into()),
    }
}

async fn seen(endpoints: &Endpoints, kernel: &dyn Kernel, proxy_timeout: Duration) -> Fill {
    let unlinked = look::unlinked(kernel, &endpoints.jobs, &endpoints.registry.list()).await;
    let mut states: BTreeMap<String, u64> = BTreeMap::new();
    let mut failing = Vec::new();
    for handle in endpoints.registry.list() {
        let (state, bad) = handle.shared.read(|v| {
            let state = v.fsm.state;
            let waits = state == State::Disconnecting && !v.status.waits_for.is_empty();
            (state, waits || v.status.last_error.is_some())
        });
        *states.entry(state.as_str().to_owned()).or_default() += 1;
        if unlinked.as_ref().is_ok_and(|ids| ids.contains(&handle.id)) || handle.is_abandoned() {
            failing.push(format!("endpoint {} (its link is gone)", handle.id));
        } else if bad {
            failing.push(format!("endpoint {}", handle.id));
        }
    }
    let message = match &unlinked {
        Err(why) => format!("their links could not be looked at: {why}"),
        Ok(_) if failing.is_empty() => "all as they should be".to_owned(),
        Ok(_) => format!("need attention: {}", named(&failing)),
    };
    let amiss = unlinked.is_err() || !failing.is_empty();
    let stuck = stuck::stuck(&endpoints.registry, &endpoints.jobs, proxy_timeout);
    let steps: Vec<String> =
        stuck.iter().map(|s| format!("endpoint {} in {} for {} s", s.endpoint, s.step, s.for_ms / 1_000)).collect();
    let admission = endpoints.admission.gate.status();
    let (ready, target) = endpoints.prepared.fill();
    Arc::new(move |status| {
        status.endpoints.clone_from(&states);
        let health = of(amiss, Health::Degraded);
        status.components.push(ComponentStatus::new("endpoints", health, message.clone()));
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
