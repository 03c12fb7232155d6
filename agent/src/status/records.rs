//! Pending work: the deletion queue, leaks, records out of service.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health, QuarantinedRecord};
use wharf_kit::sync::lock;

use super::{Source, of};
use crate::{
    findings::Left,
    node::{Node, part::Fill},
};

pub(super) fn source() -> Source {
    Source {
        name: "records",
        look: |node| Box::pin(async move { look(&node) }),
        silent: |_| (Health::Degraded, "waits for the deletion queue and the lists of what was put aside".into()),
    }
}

fn look(node: &Node) -> Fill {
    let (queue, queue_health, queue_message) = node.life.endpoints.deletions.status();
    let findings = *lock(&node.audit_findings);
    let leaks = match findings {
        None => "not looked for yet".to_owned(),
        Some(Left { amiss: 0, containers: 0, .. }) => "none".to_owned(),
        Some(Left { amiss: 0, containers, .. }) => {
            format!("none; {} of containers' own doing; see `wharf audit`", counted(containers))
        }
        Some(Left { amiss, .. }) => format!("{}; see `wharf audit`", counted(amiss)),
    };
    let is_ready = findings.is_none_or(|left| left.amiss == left.outside);
    let findings = findings.map(|left| left.amiss);
    let quarantined = quarantined(node);
    let lost = node.life.endpoints.leftovers.orphans.list().len();
    Arc::new(move |status| {
        status.components.push(ComponentStatus::new("deletion-queue", queue_health, queue_message.clone()));
        let health = of(findings.is_some_and(|n| n > 0), Health::Degraded);
        // Leases outside the pools must not stop a rolling update.
        let leaks = ComponentStatus::new("leaks", health, leaks.clone());
        status.components.push(leaks.by_containers(of(!is_ready, Health::Degraded)));
        if quarantined.len() + lost > 0 {
            let mut parts = Vec::new();
            match quarantined.len() {
                0 => {}
                1 => parts.push("1 out of service".to_owned()),
                n => parts.push(format!("{n} out of service")),
            }
            match lost {
                0 => {}
                1 => parts.push("1 endpoint lost its record with the previous store".to_owned()),
                n => parts.push(format!("{n} endpoints lost their records with the previous store")),
            }
            let message = format!("{}; see `wharf audit`", parts.join(", "));
            status.components.push(ComponentStatus::new("records", Health::Degraded, message));
        }
        status.deletion_queue = queue.clone();
        status.audit_findings = findings;
        status.quarantined.clone_from(&quarantined);
    })
}

fn counted(n: u64) -> String {
    if n == 1 { "1 finding".to_owned() } else { format!("{n} findings") }
}

fn quarantined(node: &Node) -> Vec<QuarantinedRecord> {
    let all = node.life.endpoints.leftovers.out_of_service.list();
    all.into_iter()
        .map(|q| QuarantinedRecord {
            endpoint: q.id.get(),
            addresses: q.addresses,
            why: q.why,
            since_unix_ms: q.since_unix_ms,
        })
        .collect()
}
