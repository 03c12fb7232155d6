//! The audit: kernel against store, and the executor of its repairs.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use wharf_api::{ApiError, AuditReport, ErrorCode, Finding};
use wharf_core::{
    audit::{AuditFinding, AuditView, Repair},
    kernel::Kernel,
    state::Level,
    store::{Change, LeaseOwner},
};

use crate::{
    endpoint::{
        create::{error, kernel_error},
        task::Command,
    },
    node::Node,
    sync::lock,
};

/// Compares, and mends when asked to.
///
/// # Errors
/// When the kernel or the store cannot be read.
pub async fn audit<K: Kernel>(node: &Arc<Node<K>>, repair: bool) -> Result<AuditReport, ApiError> {
    // What works now is not judged; taken before the dump, so that what starts after it is judged by neither side.
    let before = lock(&node.in_flight).clone();
    let prepared_before = node.prepared.ids();
    let snapshot = node.store.snapshot().await.map_err(|e| error(ErrorCode::Store, e.to_string()))?;
    let dump = node.kernel.dump().await.map_err(|e| kernel_error(&e))?;
    let after = lock(&node.in_flight).clone();
    let mut in_flight: std::collections::BTreeSet<_> = before.union(&after).copied().collect();
    // Records that changed while we looked are in flight too, even if their work has ended meanwhile.
    let later = node.store.snapshot().await.map_err(|e| error(ErrorCode::Store, e.to_string()))?;
    for record in snapshot.endpoints.iter().chain(&later.endpoints) {
        let in_both = snapshot.endpoints.iter().any(|r| r.id == record.id && r.epoch == record.epoch)
            && later.endpoints.iter().any(|r| r.id == record.id && r.epoch == record.epoch);
        if !in_both {
            in_flight.insert(record.id);
        }
    }
    let prepared: std::collections::BTreeSet<_> = prepared_before.union(&node.prepared.ids()).copied().collect();
    let (cidrs, router) = {
        let ipam = lock(&node.ipam);
        (ipam.cidrs(), [ipam.router4().map(IpAddr::V4), ipam.router6().map(IpAddr::V6)])
    };
    let view = AuditView {
        dump: &dump,
        snapshot: &later,
        prepared: &prepared,
        in_flight: &in_flight,
        pool_cidrs: &cidrs,
        router,
    };
    let mut findings = wharf_core::audit::audit(&view);
    findings.extend(memory_against_store(node, &later));
    let mut report = AuditReport {
        findings: Vec::with_capacity(findings.len()),
        examined: BTreeMap::from([
            ("links".to_owned(), dump.links.len() as u64),
            ("routes".to_owned(), dump.routes.len() as u64),
            ("endpoint-rows".to_owned(), dump.endpoint_rows.len() as u64),
            ("call-slots".to_owned(), dump.call_slots.len() as u64),
            ("pin-directories".to_owned(), dump.pins.len() as u64),
            ("endpoints".to_owned(), later.endpoints.len() as u64),
            ("leases".to_owned(), later.leases.len() as u64),
            ("intents".to_owned(), later.intents.len() as u64),
        ]),
    };
    for finding in findings {
        let outcome = match (&finding.repair, repair) {
            (Some(action), true) => Some(match mend(node, action).await {
                Ok(()) => "mended".to_owned(),
                Err(why) => format!("not mended: {why}"),
            }),
            _ => None,
        };
        report.findings.push(Finding {
            object: finding.object.to_owned(),
            subject: finding.subject,
            problem: finding.problem,
            owner: finding.owner,
            repairable: finding.repair.is_some(),
            repair: outcome,
        });
    }
    Ok(report)
}

/// Leases in memory and in the store tell the same, and every endpoint in memory has its record.
fn memory_against_store<K: Kernel>(node: &Node<K>, snapshot: &wharf_core::store::Snapshot) -> Vec<AuditFinding> {
    let mut findings = Vec::new();
    let busy = lock(&node.in_flight).clone();
    if !busy.is_empty() {
        // Leases move between memory and store in two steps while something works.
        return findings;
    }
    for lease in lock(&node.ipam).leases() {
        if lease.owner != LeaseOwner::Node
            && !snapshot.leases.iter().any(|l| l.ip == lease.ip && l.owner == lease.owner)
        {
            findings.push(AuditFinding {
                object: "lease",
                subject: lease.ip.to_string(),
                problem: "held in memory, not in the store".into(),
                owner: Some(wharf_core::ipam::describe_owner(&lease.owner)),
                repair: None,
            });
        }
    }
    for handle in node.registry.list() {
        let (committed, what) = handle.shared.read(|v| (v.committed, v.record.attachment.to_string()));
        if committed && !snapshot.endpoints.iter().any(|r| r.id == handle.id && r.epoch == handle.epoch) {
            findings.push(AuditFinding {
                object: "endpoint",
                subject: handle.id.to_string(),
                problem: "runs, but has no record in the store".into(),
                owner: Some(what),
                repair: None,
            });
        }
    }
    findings
}

async fn mend<K: Kernel>(node: &Arc<Node<K>>, repair: &Repair) -> Result<(), String> {
    let kernel = |e: wharf_core::kernel::KernelError| e.to_string();
    tracing::info!("audit repairs: {repair:?}");
    match repair {
        Repair::RemoveLink(link) => node.kernel.remove_link(link).await.map_err(kernel),
        Repair::RemovePins(id) => node.kernel.remove_programs(*id).await.map(drop).map_err(kernel),
        Repair::RemoveEndpointRow(ip, epoch) => node.kernel.remove_endpoint_row(*ip, *epoch).await.map_err(kernel),
        Repair::RemoveCallSlot(slot) => node.kernel.remove_call_slot(*slot).await.map_err(kernel),
        Repair::RemoveRoute(route) => node.kernel.remove_route(route).await.map_err(kernel),
        Repair::ReleaseLease(ip) => {
            node.store.commit(vec![Change::RemoveLease(*ip)]).await.map_err(|e| e.to_string())?;
            lock(&node.ipam).release(*ip);
            Ok(())
        }
        Repair::CloseIntent(id, epoch) => {
            node.store.commit(vec![Change::RemoveIntent(*id, *epoch)]).await.map_err(|e| e.to_string())
        }
        Repair::Regenerate(id) => {
            let handle = node.registry.get(*id).ok_or("the endpoint is gone")?;
            let (done, answer) = tokio::sync::oneshot::channel();
            handle
                .mailbox
                .send(Command::Regenerate(Level::Datapath, done))
                .await
                .map_err(|_| "the endpoint is gone")?;
            answer.await.map_err(|_| "the endpoint is gone")?
        }
    }
}
