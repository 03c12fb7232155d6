//! Audit: compares kernel and store, and repairs.

mod error;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use ipnet::IpNet;
use tokio::time::{Instant, timeout, timeout_at};
use wharf_api::{AuditReport, Finding, LogStatus};
use wharf_core::{
    audit::{AuditFinding, AuditView, QueueFile, Repair},
    finding::{EndpointProblem, Kept, NodeProblem, Problem, Stray, Verdict},
    ids::{EndpointId, Epoch},
    kernel::Kernel,
    plan::{CreateStep, DeleteStep},
    state::Level,
    store::{Change, LeaseOwner, Snapshot},
};
use wharf_handover::queue::Queue;
use wharf_kit::{clock, sync::lock};

use crate::{
    addresses::{Addresses, pools, resting},
    endpoint::{deletions, look, orphan, out_of_service, unfinished},
    findings::{self, Left},
    node::{
        endpoint::{Command, Handle, View},
        endpoints::Endpoints,
        lifecycle::Lifecycle,
        queue::{Cause, Deletions, QueueFailure},
        registry::Registry,
    },
};

pub use self::error::{AuditError, RepairError};

/// Runs an audit; `repair`: with all repairs; `told`: findings of the status.
pub async fn audit(life: &Arc<Lifecycle>, told: &Mutex<Option<Left>>, repair: bool) -> Result<AuditReport, AuditError> {
    let audited = audit_and(life, &if repair { Mend::All } else { Mend::Nothing }).await?;
    // Repaired findings leave at once. Only the leak audit adds new ones, except for those that need an operator.
    let left = audited.left();
    if let Some(told) = lock(told).as_mut() {
        *told = Left {
            amiss: told.amiss.min(left.amiss),
            outside: told.outside.min(left.outside),
            containers: told.containers.min(left.containers),
        };
    }
    if repair && let Err(why) = orphan::forget_gone(life).await {
        tracing::warn!("audit: forget endpoints without a record whose link is gone: {why}");
    }
    Ok(audited.report())
}

/// Endpoints per kernel call, which wakes four threads.
const IN_A_ROW: usize = 16;
const PAUSE: Duration = Duration::from_millis(80);

/// Regenerations take seconds on a full node; slower ones continue.
const RENEWAL: Duration = Duration::from_secs(10);

/// Object and subject; identifies a finding across audits.
pub type Key = (&'static str, String);

/// Findings to repair.
#[derive(Debug, Clone)]
pub enum Mend {
    /// None.
    Nothing,
    /// All repairable ones.
    All,
    /// Those with these keys.
    Only(BTreeSet<Key>),
}

impl Mend {
    fn wants(&self, problem: &Problem) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Only(keys) => keys.contains(&key_of(problem)),
        }
    }
}

/// Key of a finding.
#[must_use]
pub fn key_of(problem: &Problem) -> Key {
    (problem.object(), problem.subject())
}

/// A finding and its repair.
#[derive(Debug)]
pub struct Audited {
    pub finding: AuditFinding,
    /// `None` if not requested.
    pub outcome: Option<Result<(), RepairError>>,
}

/// Result of an audit.
#[derive(Debug)]
pub struct Outcome {
    pub findings: Vec<Audited>,
    /// Examined objects by kind.
    pub examined: BTreeMap<String, u64>,
}

impl Outcome {
    /// Unrepaired findings.
    #[must_use]
    pub fn left(&self) -> Left {
        let mut left = Left::default();
        for audited in self.findings.iter().filter(|a| !matches!(a.outcome, Some(Ok(())))) {
            let problem = &audited.finding.problem;
            left.outside += u64::from(matches!(problem, Problem::Kept(Kept::LeaseOutside { .. })));
            match problem.verdict() {
                Verdict::Well => {}
                Verdict::ContainersOwn => left.containers += 1,
                Verdict::Amiss => left.amiss += 1,
            }
        }
        left
    }

    fn report(self) -> AuditReport {
        let finding = |Audited { finding, outcome }: Audited| Finding {
            repairable: finding.repair.is_some(),
            repair: outcome.map(|outcome| match outcome {
                Ok(()) => "mended".to_owned(),
                Err(why) => format!("not mended: {why}"),
            }),
            ..findings::finding(&finding.problem, finding.owner)
        };
        AuditReport { findings: self.findings.into_iter().map(finding).collect(), examined: self.examined }
    }
}

/// Runs an audit with the requested repairs.
pub async fn audit_and(life: &Arc<Lifecycle>, repair: &Mend) -> Result<Outcome, AuditError> {
    let (endpoints, addresses) = (&life.endpoints, &life.network.addresses);
    let before = endpoints.jobs.in_flight();
    let prepared_before = endpoints.prepared.ids();
    let snapshot = life.store.snapshot().await?;
    let (dump, call_slots) = (life.kernel.dump().await?, life.kernel.call_slots().await?);
    let after = endpoints.jobs.in_flight();
    let mut in_flight: BTreeSet<_> = before.union(&after).copied().collect();
    // Before the second read of the store, so that each has a record there.
    let lived: HashSet<_> =
        endpoints.registry.list().iter().filter(|h| h.shared.read(|v| v.committed)).map(key).collect();
    let later = life.store.snapshot().await?;
    let recorded = |s: &Snapshot| s.endpoints.iter().map(|r| (r.id, r.epoch)).collect::<HashSet<_>>();
    in_flight.extend(recorded(&snapshot).symmetric_difference(&recorded(&later)).map(|(id, _)| *id));
    // The agent deletes abandoned endpoints after their grace time.
    in_flight.extend(endpoints.registry.list().iter().filter(|h| h.is_abandoned()).map(|h| h.id));
    let prepared: BTreeSet<_> = prepared_before.union(&endpoints.prepared.ids()).copied().collect();
    let mut node_part = life.kernel.observe_node(&life.network.spec()).await?;
    pools::look(addresses).await?;
    node_part.extend(pools::problems(addresses));
    let (queue, no_queue) = match queue_files(&endpoints.deletions).await {
        Ok(queue) => (queue, None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    let (cidrs, resting, router) = {
        let ipam = lock(&addresses.ipam);
        (ipam.cidrs(), ipam.resting().len(), [ipam.router4().map(IpAddr::V4), ipam.router6().map(IpAddr::V6)])
    };
    let view = AuditView {
        dump: &dump,
        call_slots: &call_slots,
        snapshot: &later,
        prepared: &prepared,
        in_flight: &in_flight,
        pool_cidrs: &cidrs,
        router,
        node: &node_part,
        queue: &queue,
    };
    let mut findings = wharf_core::audit::audit(&view);
    findings.extend(no_queue.map(|why| {
        let path = endpoints.deletions.queue.path().display().to_string();
        AuditFinding { problem: Problem::Kept(Kept::Queue { path, why }), owner: None, repair: None }
    }));
    findings.extend(endpoints.deletions.blocking(Queue::aside).await.unwrap_or_default().into_iter().map(|path| {
        let path = path.display().to_string();
        AuditFinding { problem: Problem::Kept(Kept::QueueAside { path }), owner: None, repair: None }
    }));
    findings.extend(memory_against_store(endpoints, addresses, &later, &lived));
    let pause = if matches!(repair, Mend::Only(_)) { PAUSE } else { Duration::ZERO };
    let close = close_looks(&*life.kernel, endpoints, &in_flight, pause).await?;
    findings.retain(|f| !matches!(f.problem, Problem::Endpoint(id, _) if close.looked_at.contains(&id)));
    findings.extend(close.findings);
    leave_out_told_overlaps(&mut findings);
    let examined = BTreeMap::from([
        ("links".to_owned(), dump.links.len() as u64),
        ("routes".to_owned(), dump.routes.len() as u64),
        ("endpoint-rows".to_owned(), dump.endpoint_rows.len() as u64),
        ("call-slots".to_owned(), call_slots.len() as u64),
        ("pin-directories".to_owned(), dump.pins.len() as u64),
        ("endpoints".to_owned(), later.endpoints.len() as u64),
        ("leases".to_owned(), later.leases.len() as u64),
        ("intents".to_owned(), later.intents.len() as u64),
        ("resting-addresses".to_owned(), resting as u64),
        ("deletion-records".to_owned(), queue.len() as u64),
    ]);
    Ok(Outcome { findings: mend_all(life, findings, repair, &later).await, examined })
}

fn leave_out_told_overlaps(findings: &mut Vec<AuditFinding>) {
    let route = |f: &AuditFinding| match f.problem {
        Problem::Endpoint(_, EndpointProblem::NodeRoute { to, .. } | EndpointProblem::NodeRouteShadowed { to, .. }) => {
            Some(to)
        }
        _ => None,
    };
    let told: HashSet<IpNet> = findings.iter().filter_map(route).collect();
    findings.retain(|f| match &f.problem {
        Problem::Node(NodeProblem::PoolOverlap(overlap)) => !told.contains(&overlap.network.net),
        _ => true,
    });
}

async fn mend_all(
    life: &Arc<Lifecycle>,
    findings: Vec<AuditFinding>,
    repair: &Mend,
    snapshot: &Snapshot,
) -> Vec<Audited> {
    let mut levels: BTreeMap<EndpointId, Level> = BTreeMap::new();
    for finding in findings.iter().filter(|f| repair.wants(&f.problem)) {
        if let Some(Repair::Regenerate(id, level)) = finding.repair {
            let most = levels.entry(id).or_insert(level);
            *most = level.max(*most);
        }
    }
    let mut regenerated = BTreeMap::new();
    let mut done: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut all_mended = true;
    let mut audited = Vec::with_capacity(findings.len());
    for finding in findings {
        let wanted = finding.repair.as_ref().filter(|_| repair.wants(&finding.problem));
        let outcome = match wanted {
            None => None,
            Some(Repair::Regenerate(id, _)) => {
                if regenerated.is_empty() {
                    regenerated = renew(&*life.kernel, &life.endpoints.registry, &levels).await;
                }
                Some(match regenerated.get(id) {
                    Some(Err(why)) => Err(why.clone()),
                    Some(Ok(left)) if left.iter().any(|p: &Problem| p.is_about_the_same(&finding.problem)) => {
                        Err(RepairError::Unchanged)
                    }
                    _ => Ok(()),
                })
            }
            Some(Repair::CloseIntent(..)) if !all_mended => Some(Err(RepairError::Explains)),
            Some(action) => {
                let outcome = mend(life, action, snapshot).await;
                all_mended &= outcome.is_ok();
                Some(outcome)
            }
        };
        if let (Some(Ok(())), Some(action)) = (&outcome, wanted) {
            *done.entry(action.in_words()).or_default() += 1;
            if let Problem::Endpoint(id, _) = finding.problem
                && let Some(handle) = life.endpoints.registry.get(id)
            {
                let what = format!("{}; mended", findings::in_words(&finding.problem));
                handle.shared.log(LogStatus::Warning, "audit", what);
            }
        }
        audited.push(Audited { finding, outcome });
    }
    if !done.is_empty() {
        let done: Vec<String> = done.into_iter().map(|(what, n)| format!("{what} ({n})")).collect();
        tracing::info!("audit repaired: {}", done.join(", "));
    }
    audited
}

async fn renew(
    kernel: &dyn Kernel,
    registry: &Registry,
    levels: &BTreeMap<EndpointId, Level>,
) -> BTreeMap<EndpointId, Result<Vec<Problem>, RepairError>> {
    let until = Instant::now() + RENEWAL;
    let each = levels.iter().map(|(id, level)| async move {
        let work = timeout_at(until, regenerate(kernel, registry, *id, *level)).await;
        (*id, work.unwrap_or_else(|_| Err(still_waits(registry, *id))))
    });
    futures::future::join_all(each).await.into_iter().collect()
}

fn still_waits(registry: &Registry, id: EndpointId) -> RepairError {
    let Some(handle) = registry.get(id) else { return RepairError::Gone };
    let waits_for = handle.shared.read(|v| v.fsm.waits_for(clock::monotonic_ms()).map(|(what, _)| what));
    RepairError::Waits(waits_for.unwrap_or("its turn"), RENEWAL)
}

async fn regenerate(
    kernel: &dyn Kernel,
    registry: &Registry,
    id: EndpointId,
    level: Level,
) -> Result<Vec<Problem>, RepairError> {
    let handle = registry.get(id).ok_or(RepairError::Gone)?;
    let (done, answer) = tokio::sync::oneshot::channel();
    handle.mailbox.send(Command::Regenerate(level, done)).await.map_err(|_| RepairError::Gone)?;
    answer.await.map_err(|_| RepairError::Gone)??;
    Ok(look::once(kernel, &handle).await?.problems)
}

#[derive(Default)]
struct CloseLooks {
    findings: Vec<AuditFinding>,
    looked_at: BTreeSet<EndpointId>,
}

/// Compares what the dump lacks: hooks' programs, endpoint maps, addresses, MTU. Skips notices.
async fn close_looks(
    kernel: &dyn Kernel,
    endpoints: &Endpoints,
    in_flight: &BTreeSet<EndpointId>,
    pause: Duration,
) -> Result<CloseLooks, AuditError> {
    let mut found = CloseLooks::default();
    let idle = |h: &Handle| !in_flight.contains(&h.id) && h.shared.read(View::is_settled);
    let handles: Vec<Handle> = endpoints.registry.list().into_iter().filter(idle).collect();
    for (n, handles) in handles.chunks(IN_A_ROW).enumerate() {
        if n > 0 && !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        for look in look::each(kernel, handles).await? {
            let id = look.view.record.id;
            if !look.settled || endpoints.jobs.is_in_flight(id) {
                continue;
            }
            found.looked_at.insert(id);
            for problem in look.problems.into_iter().filter(|p| p.verdict() > Verdict::Well) {
                if let Problem::Endpoint(_, problem) = problem {
                    found.findings.push(AuditFinding::of_endpoint(&look.view.record, problem));
                }
            }
        }
    }
    Ok(found)
}

fn memory_against_store(
    endpoints: &Endpoints,
    addresses: &Addresses,
    snapshot: &Snapshot,
    lived: &HashSet<(EndpointId, Epoch)>,
) -> Vec<AuditFinding> {
    let mut findings = Vec::new();
    if !endpoints.jobs.in_flight().is_empty() {
        // Operations change memory and store in two steps.
        return findings;
    }
    let now = clock::unix_ms();
    // Leases reach the store later than memory. A future lease is not young: the clock was set back.
    let is_young = |since_ms| now.checked_sub(since_ms).is_some_and(|age| age < CreateStep::Commit.deadline_ms());
    let stored: HashMap<IpAddr, &LeaseOwner> = snapshot.leases.iter().map(|l| (l.ip, &l.owner)).collect();
    let records: HashSet<_> = snapshot.endpoints.iter().map(|r| (r.id, r.epoch)).collect();
    let leases = lock(&addresses.ipam).leases();
    for lease in leases {
        if lease.owner != LeaseOwner::Node
            && !is_young(lease.since_unix_ms)
            && stored.get(&lease.ip) != Some(&&lease.owner)
        {
            let nobodys = is_nobodys(&endpoints.registry, &lease.owner);
            findings.push(AuditFinding {
                problem: Problem::Stray(Stray::UnstoredLease { ip: lease.ip, nobodys }),
                owner: Some(wharf_core::ipam::describe_owner(&lease.owner)),
                repair: nobodys.then_some(Repair::ReleaseLease(lease.ip)),
            });
        }
    }
    for handle in endpoints.registry.list().iter().filter(|h| lived.contains(&key(h)) && !records.contains(&key(h))) {
        findings.push(AuditFinding {
            problem: Problem::Kept(Kept::RecordMissing { id: handle.id }),
            owner: Some(handle.shared.read(|v| v.record.attachment.to_string())),
            repair: None,
        });
    }
    findings
}

fn key(handle: &Handle) -> (EndpointId, Epoch) {
    (handle.id, handle.epoch)
}

fn is_nobodys(registry: &Registry, owner: &LeaseOwner) -> bool {
    match owner {
        LeaseOwner::Attachment { attachment, epoch } => registry
            .by_interface(&attachment.container_id, &attachment.ifname)
            .is_none_or(|handle| handle.epoch != *epoch),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    }
}

async fn mend(life: &Arc<Lifecycle>, repair: &Repair, snapshot: &Snapshot) -> Result<(), RepairError> {
    let (endpoints, addresses) = (&life.endpoints, &life.network.addresses);
    match repair {
        Repair::RemoveLink(link) => {
            // The epoch protects the id's next owner.
            let bound = Duration::from_millis(DeleteStep::RemoveLink.deadline_ms());
            let removed = timeout(bound, life.kernel.remove_link(link)).await;
            removed.map_err(|_| RepairError::NoAnswer(bound))??;
        }
        Repair::RemovePins(id) => {
            let _held = Held::take(endpoints, *id)?;
            endpoints.jobs.remove_programs(*id).await?;
        }
        Repair::RemoveEndpointRow(ip, epoch) => life.kernel.remove_endpoint_row(*ip, *epoch).await?,
        Repair::RemoveCallSlot(slot) => {
            let id = u16::try_from(*slot).ok().and_then(|n| EndpointId::try_from(n).ok());
            let _held = id.map(|id| Held::take(endpoints, id)).transpose()?;
            life.kernel.remove_call_slot(*slot).await?;
        }
        Repair::RemoveNat(entry) => life.kernel.remove_nat_entry(entry).await?,
        Repair::RemoveRoute(route) => life.kernel.remove_route(route).await?,
        Repair::ReleaseLease(ip) => match snapshot.leases.iter().find(|l| l.ip == *ip) {
            Some(lease) => resting::release(addresses, std::slice::from_ref(lease), Vec::new()).await?,
            None => {
                let lease =
                    lock(&addresses.ipam).get(*ip).filter(|l| is_nobodys(&endpoints.registry, &l.owner)).cloned();
                resting::in_memory(addresses, lease.as_slice());
            }
        },
        Repair::EnsureNode => {
            life.network.ensure_node().await?;
            life.network.ensure_nat().await?;
        }
        Repair::DrainQueue => match deletions::drain(life, Cause::Tick).await? {
            0 => {}
            left => return Err(RepairError::Unserved(left)),
        },
        Repair::ForgetRest(ip) => life.store.commit(vec![Change::RemoveRest(*ip)]).await?,
        Repair::RemoveQueueFile(name) => endpoints.deletions.discard(name).await?,
        Repair::ReleaseOutOfService(id) => drop(out_of_service::release(life, *id).await?),
        Repair::CloseIntent(id, epoch, link) => {
            if let Some(link) = link {
                life.kernel.remove_from_plugin_link(link).await?;
            }
            unfinished::finish(life, *id).await?;
            life.store.commit(vec![Change::RemoveIntent(*id, *epoch)]).await?;
        }
        Repair::Regenerate(id, level) => drop(regenerate(&*life.kernel, &endpoints.registry, *id, *level).await?),
    }
    Ok(())
}

async fn queue_files(deletions: &Deletions) -> Result<Vec<QueueFile>, QueueFailure> {
    let files = deletions.blocking(Queue::list).await?.into_iter().filter(|entry| !entry.is_canary());
    Ok(files
        .map(|entry| {
            let age_ms = deletions.age_ms(&entry);
            let (owner, problem) = match entry.content {
                Ok(d) => (Some(format!("{}/{} on network {}", d.container_id, d.ifname, d.network)), None),
                Err(why) => (None, Some(why.to_string())),
            };
            QueueFile { name: entry.name, age_ms, owner, problem }
        })
        .collect())
}

struct Held<'a> {
    registry: &'a Registry,
    id: EndpointId,
    was_free: bool,
}

impl<'a> Held<'a> {
    /// Takes an unused id: pins and call slots have no epoch.
    fn take(endpoints: &'a Endpoints, id: EndpointId) -> Result<Self, RepairError> {
        let was_free = endpoints.registry.claim_id(id);
        let in_use = endpoints.registry.get(id).is_some()
            || endpoints.jobs.is_in_flight(id)
            || endpoints.prepared.ids().contains(&id);
        // An unfinished undo reserves an unused id.
        if !was_free && in_use {
            return Err(RepairError::InUse(id));
        }
        Ok(Self { registry: &endpoints.registry, id, was_free })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.was_free {
            self.registry.free_id(self.id);
        }
    }
}
