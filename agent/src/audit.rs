//! The audit: kernel against store, and the executor of its repairs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use tokio::time::{Instant, timeout, timeout_at};
use wharf_api::{ApiError, AuditReport, ErrorCode, Finding, LogStatus};
use wharf_core::{
    audit::{AuditFinding, AuditView, QueueFile, Repair},
    ids::EndpointId,
    kernel::Kernel,
    plan::{CreateStep, DeleteStep},
    state::{Level, State},
    store::{Change, LeaseOwner, Snapshot},
};

use crate::{
    clock, deletions,
    endpoint::{
        create::{error, kernel_error},
        task::Command,
    },
    node::Node,
    orphan, quarantine, resting,
    sync::lock,
    unfinished,
};

/// Compares, and mends when asked to.
///
/// # Errors
/// When the kernel or the store cannot be read.
pub async fn audit<K: Kernel>(node: &Arc<Node<K>>, repair: bool) -> Result<AuditReport, ApiError> {
    let report = audit_and(node, &if repair { Mend::All } else { Mend::Nothing }).await?;
    // What is gone by now is not told of any more, nor waits for the leak audit's next round. What is new is for the leak
    // audit to tell, which leaves out what only an operator can decide.
    let left = report.findings.iter().filter(|f| f.repair.as_deref() != Some("mended")).count() as u64;
    lock(&node.audit_findings).iter_mut().for_each(|told| *told = left.min(*told));
    if repair && let Err(why) = orphan::forget_gone(node).await {
        tracing::warn!("audit: forget endpoints without a record whose link is gone: {why}");
    }
    Ok(report)
}

/// A finding as one audit and the next both name it.
pub type Key = (String, String, String);

/// Between the close looks at two endpoints in the leak audit: a thousand endpoints take it five seconds and more of the
/// minute, and nobody notices.
const PAUSE: Duration = Duration::from_millis(5);

/// How long an audit waits for the regenerations it asked for: a full node's take seconds. One that waits longer goes on
/// without the audit.
const RENEWAL: Duration = Duration::from_secs(10);

/// What is to be mended.
#[derive(Debug, Clone)]
pub enum Mend {
    /// Only look.
    Nothing,
    /// Everything that can be.
    All,
    /// These.
    Only(BTreeSet<Key>),
}

impl Mend {
    fn wants(&self, finding: &AuditFinding) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Only(keys) => keys.contains(&key_of(finding)),
        }
    }
}

fn key_of(finding: &AuditFinding) -> Key {
    (finding.object.to_owned(), finding.subject.clone(), finding.problem.clone())
}

/// Compares, and mends what is asked for.
///
/// # Errors
/// When the kernel or the store cannot be read.
pub async fn audit_and<K: Kernel>(node: &Arc<Node<K>>, repair: &Mend) -> Result<AuditReport, ApiError> {
    if matches!(repair, Mend::All) {
        // The node's own part first: endpoints' routes speak from its addresses.
        node.kernel.ensure_node(&node.spec()).await.map_err(|e| kernel_error(&e))?;
    }
    // What works now is not judged; taken before the dump, so that what starts after it is judged by neither side.
    let before = node.in_flight();
    let prepared_before = node.prepared.ids();
    let snapshot = node.store.snapshot().await.map_err(|e| error(ErrorCode::Store, e.to_string()))?;
    let dump = node.kernel.dump().await.map_err(|e| kernel_error(&e))?;
    let after = node.in_flight();
    let mut in_flight: BTreeSet<_> = before.union(&after).copied().collect();
    // Records that changed while we looked are in flight too, even if their work has ended meanwhile.
    let later = node.store.snapshot().await.map_err(|e| error(ErrorCode::Store, e.to_string()))?;
    for record in snapshot.endpoints.iter().chain(&later.endpoints) {
        let in_both = snapshot.endpoints.iter().any(|r| r.id == record.id && r.epoch == record.epoch)
            && later.endpoints.iter().any(|r| r.id == record.id && r.epoch == record.epoch);
        if !in_both {
            in_flight.insert(record.id);
        }
    }
    let prepared: BTreeSet<_> = prepared_before.union(&node.prepared.ids()).copied().collect();
    let node_part = node.kernel.observe_node(&node.spec()).await.map_err(|e| kernel_error(&e))?;
    let (queue, no_queue) = match queue_files(node).await {
        Ok(queue) => (queue, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let (cidrs, resting, router) = {
        let ipam = lock(&node.ipam);
        (ipam.cidrs(), ipam.resting().len(), [ipam.router4().map(IpAddr::V4), ipam.router6().map(IpAddr::V6)])
    };
    let view = AuditView {
        dump: &dump,
        snapshot: &later,
        prepared: &prepared,
        in_flight: &in_flight,
        pool_cidrs: &cidrs,
        router,
        node: &node_part,
        queue: &queue,
    };
    let mut findings = wharf_core::audit::audit(&view);
    findings.extend(no_queue.map(|problem| AuditFinding {
        object: "queue-file",
        subject: node.deletions.queue.path().display().to_string(),
        problem,
        owner: None,
        repair: None,
    }));
    findings.extend(memory_against_store(node, &later));
    let seen: BTreeSet<EndpointId> = findings.iter().filter_map(|f| repaired_endpoint(f.repair.as_ref()?)).collect();
    let pause = if matches!(repair, Mend::Only(_)) { PAUSE } else { Duration::ZERO };
    findings.extend(endpoints_against_kernel(node, &in_flight, &seen, pause).await?);
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
            ("resting-addresses".to_owned(), resting as u64),
            ("deletion-records".to_owned(), queue.len() as u64),
        ]),
    };
    let mut all_mended = true;
    let wanted = findings.iter().filter(|f| repair.wants(f));
    let amiss: BTreeSet<EndpointId> = wanted.filter_map(|f| repaired_endpoint(f.repair.as_ref()?)).collect();
    let mut renewed = BTreeMap::new();
    for finding in findings {
        let outcome = match (&finding.repair, repair.wants(&finding)) {
            // One regeneration mends all that is amiss with an endpoint.
            (Some(Repair::Regenerate(id)), true) => {
                if renewed.is_empty() {
                    renewed = renew(node, &amiss).await;
                }
                Some(match renewed.get(id) {
                    Some(Err(why)) => format!("not mended: {why}"),
                    Some(Ok(left)) if left.contains(&finding.problem) => {
                        "not mended: a regeneration does not change it; create the container anew".to_owned()
                    }
                    _ => {
                        // Whoever asks later finds it in the endpoint's timeline.
                        if let Some(handle) = node.registry.get(*id) {
                            let what = format!("{} {}: {}; mended", finding.object, finding.subject, finding.problem);
                            handle.shared.log(LogStatus::Warning, "audit", what);
                        }
                        "mended".to_owned()
                    }
                })
            }
            (Some(Repair::CloseIntent(..)), true) if !all_mended => {
                Some("not mended: what it tells of may still be there".to_owned())
            }
            (Some(action), true) => Some(match mend(node, action, &later).await {
                Ok(()) => "mended".to_owned(),
                Err(why) => {
                    all_mended = false;
                    format!("not mended: {why}")
                }
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

/// Regenerates endpoints and looks at each again: what is still amiss with it, or why its build did not succeed. The
/// builds wait for their permits side by side, so none holds up another; all of them together hold up the audit for
/// [`RENEWAL`] at most.
async fn renew<K: Kernel>(
    node: &Arc<Node<K>>,
    ids: &BTreeSet<EndpointId>,
) -> BTreeMap<EndpointId, Result<BTreeSet<String>, String>> {
    let until = Instant::now() + RENEWAL;
    let each = ids.iter().map(|id| async move {
        let work = async {
            regenerate(node, *id).await?;
            still_amiss(node, *id).await
        };
        (*id, timeout_at(until, work).await.unwrap_or_else(|_| Err(still_waits(node, *id))))
    });
    futures::future::join_all(each).await.into_iter().collect()
}

async fn regenerate<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<(), String> {
    let handle = node.registry.get(id).ok_or("the endpoint is gone")?;
    let (done, answer) = tokio::sync::oneshot::channel();
    let asked = handle.mailbox.send(Command::Regenerate(Level::Datapath, done)).await;
    asked.map_err(|_| "the endpoint is gone")?;
    answer.await.map_err(|_| "the endpoint is gone")?
}

/// What a build waits for that did not end within [`RENEWAL`].
fn still_waits<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> String {
    let Some(handle) = node.registry.get(id) else { return "the endpoint is gone".to_owned() };
    let waits_for = handle.shared.read(|v| v.fsm.waits_for(clock::monotonic_ms()).map(|(what, _)| what));
    format!("the build is still waiting for {} after {RENEWAL:?}", waits_for.unwrap_or("its turn"))
}

/// What a second look at a regenerated endpoint finds.
async fn still_amiss<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<BTreeSet<String>, String> {
    let handle = node.registry.get(id).ok_or("the endpoint is gone")?;
    let record = handle.shared.read(|v| v.record.clone());
    let mismatches = node.kernel.observe_endpoint(&record).await.map_err(|e| e.to_string())?;
    Ok(mismatches.into_iter().map(|m| m.problem).collect())
}

/// Whose object a repair would renew.
fn repaired_endpoint(repair: &Repair) -> Option<EndpointId> {
    match repair {
        Repair::Regenerate(id) => Some(*id),
        _ => None,
    }
}

/// What only a close look at each endpoint shows: programs on its hooks, rows of its maps, addresses, MTU. Endpoints in
/// `seen` have a finding already, which the same regeneration mends.
async fn endpoints_against_kernel<K: Kernel>(
    node: &Arc<Node<K>>,
    in_flight: &BTreeSet<EndpointId>,
    seen: &BTreeSet<EndpointId>,
    pause: Duration,
) -> Result<Vec<AuditFinding>, ApiError> {
    let mut findings = Vec::new();
    for handle in node.registry.list() {
        let view = handle.shared.view();
        let settled = view.committed && view.fsm.state == State::Ready;
        if !settled || in_flight.contains(&handle.id) || seen.contains(&handle.id) {
            continue;
        }
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let mismatches = node.kernel.observe_endpoint(&view.record).await.map_err(|e| kernel_error(&e))?;
        // A change that began meanwhile explains what was seen.
        let unchanged = handle.shared.read(|v| v.fsm == view.fsm) && !node.in_flight().contains(&handle.id);
        if unchanged {
            findings.extend(mismatches.into_iter().map(|m| AuditFinding {
                object: object_word(&m.object),
                subject: m.subject,
                problem: m.problem,
                owner: Some(format!("endpoint {} ({})", handle.id, view.record.attachment)),
                repair: Some(Repair::Regenerate(handle.id)),
            }));
        }
    }
    Ok(findings)
}

/// The audit's words for what the datapath looks at.
fn object_word(object: &str) -> &'static str {
    ["link", "address", "route", "rule", "mtu", "program", "map", "endpoint-row", "call-slot", "pin"]
        .into_iter()
        .find(|word| *word == object)
        .unwrap_or("datapath")
}

/// Leases in memory and in the store tell the same, and every endpoint in memory has its record.
fn memory_against_store<K: Kernel>(node: &Node<K>, snapshot: &Snapshot) -> Vec<AuditFinding> {
    let mut findings = Vec::new();
    if !node.in_flight().is_empty() {
        // Leases move between memory and store in two steps while something works.
        return findings;
    }
    // A lease is given out first and made durable then: a young one may be on its way.
    let now = clock::unix_ms();
    // One from the future is old: the clock was set back since.
    let is_young = |since_ms| now.checked_sub(since_ms).is_some_and(|age| age < CreateStep::Commit.deadline_ms());
    for lease in lock(&node.ipam).leases() {
        if lease.owner != LeaseOwner::Node
            && !is_young(lease.since_unix_ms)
            && !snapshot.leases.iter().any(|l| l.ip == lease.ip && l.owner == lease.owner)
        {
            findings.push(AuditFinding {
                object: "lease",
                subject: lease.ip.to_string(),
                problem: "held in memory, not in the store".into(),
                owner: Some(wharf_core::ipam::describe_owner(&lease.owner)),
                // Of a create whose undo failed: no endpoint will ever give it back.
                repair: is_nobodys(node, &lease.owner).then_some(Repair::ReleaseLease(lease.ip)),
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

/// No endpoint of that attachment and epoch is there.
fn is_nobodys<K: Kernel>(node: &Node<K>, owner: &LeaseOwner) -> bool {
    match owner {
        LeaseOwner::Attachment { attachment, epoch } => node
            .registry
            .by_interface(&attachment.container_id, &attachment.ifname)
            .is_none_or(|handle| handle.epoch != *epoch),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    }
}

async fn mend<K: Kernel>(node: &Arc<Node<K>>, repair: &Repair, snapshot: &Snapshot) -> Result<(), String> {
    let kernel = |e: wharf_core::kernel::KernelError| e.to_string();
    tracing::info!("audit repairs: {repair:?}");
    match repair {
        Repair::RemoveLink(link) => {
            // It names the epoch, so that it may end late and beside whoever has the id next.
            let bound = Duration::from_millis(DeleteStep::RemoveLink.deadline_ms());
            let removed = timeout(bound, node.kernel.remove_link(link)).await;
            removed.map_err(|_| format!("no answer within {bound:?}"))?.map_err(kernel)
        }
        Repair::RemovePins(id) => {
            let _held = Held::take(node, *id)?;
            unfinished::remove_programs(node, *id).await
        }
        Repair::RemoveEndpointRow(ip, epoch) => node.kernel.remove_endpoint_row(*ip, *epoch).await.map_err(kernel),
        Repair::RemoveCallSlot(slot) => {
            let id = u16::try_from(*slot).ok().and_then(|n| EndpointId::try_from(n).ok());
            let _held = id.map(|id| Held::take(node, id)).transpose()?;
            node.kernel.remove_call_slot(*slot).await.map_err(kernel)
        }
        Repair::RemoveRoute(route) => node.kernel.remove_route(route).await.map_err(kernel),
        Repair::ReleaseLease(ip) => match snapshot.leases.iter().find(|l| l.ip == *ip) {
            Some(lease) => {
                resting::release(node, std::slice::from_ref(lease), Vec::new()).await.map_err(|e| e.to_string())
            }
            None => {
                let lease = lock(&node.ipam).get(*ip).filter(|l| is_nobodys(node, &l.owner)).cloned();
                resting::in_memory(node, lease.as_slice());
                Ok(())
            }
        },
        Repair::EnsureNode => node.kernel.ensure_node(&node.spec()).await.map_err(kernel),
        Repair::DrainQueue => match deletions::drain(node, deletions::Cause::Tick).await? {
            0 => Ok(()),
            left => Err(format!("{left} deletes could not be finished yet")),
        },
        Repair::ForgetRest(ip) => node.store.commit(vec![Change::RemoveRest(*ip)]).await.map_err(|e| e.to_string()),
        Repair::RemoveQueueFile(name) => deletions::discard(node, name).await,
        Repair::ReleaseQuarantined(id) => quarantine::release(node, *id).await.map(drop),
        Repair::CloseIntent(id, epoch) => {
            node.store.commit(vec![Change::RemoveIntent(*id, *epoch)]).await.map_err(|e| e.to_string())?;
            if lock(&node.unfinished).remove(*id).is_some() {
                node.registry.free_id(*id);
            }
            Ok(())
        }
        Repair::Regenerate(id) => regenerate(node, *id).await,
    }
}

/// The deletion queue in the audit's words.
async fn queue_files<K: Kernel>(node: &Node<K>) -> Result<Vec<QueueFile>, String> {
    let files = deletions::entries(node)
        .await?
        .into_iter()
        .filter(|e| e.content.as_ref().is_ok_and(|d| d.canary.is_none()) || e.content.is_err());
    Ok(files
        .map(|entry| {
            let age_ms = node.deletions.age_ms(&entry);
            let (owner, problem) = match entry.content {
                Ok(d) => (Some(format!("{}/{} on network {}", d.container_id, d.ifname, d.network)), None),
                Err(why) => (None, Some(why)),
            };
            QueueFile { name: entry.name, age_ms, owner, problem }
        })
        .collect())
}

/// An id whose leftovers are being removed: nobody gets it meanwhile.
struct Held<K: Kernel> {
    node: Arc<Node<K>>,
    id: EndpointId,
    was_free: bool,
}

impl<K: Kernel> Held<K> {
    /// Pins and call slots carry no epoch, so what was found under an id may be a new user's by now.
    fn take(node: &Arc<Node<K>>, id: EndpointId) -> Result<Self, String> {
        let was_free = node.registry.claim_id(id);
        let in_use =
            node.registry.get(id).is_some() || node.in_flight().contains(&id) || node.prepared.ids().contains(&id);
        // Neither free nor in use: reserved, because the undo of a create left something.
        if !was_free && in_use {
            return Err(format!("id {id} is in use again"));
        }
        Ok(Self { node: Arc::clone(node), id, was_free })
    }
}

impl<K: Kernel> Drop for Held<K> {
    fn drop(&mut self) {
        if self.was_free {
            self.node.registry.free_id(self.id);
        }
    }
}
