//! Create: runs the plan's steps; a failure, deadline, disconnect or delete undoes them in reverse order.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tracing::Instrument as _;
use wharf_api::LogStatus;
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    ipam::{IpamError, LeaseRequest, Wanted},
    kernel::{Kernel, KernelError, KernelErrorKind, LinkRef, LinkSpec},
    plan::{CreateStep, plan_create},
    state::Event,
    store::{Change, Intent},
    timeline::Operation,
};
use wharf_kit::{
    clock,
    gate::Place,
    telemetry::operation::{self, Kind, OpId},
};

use crate::{
    addresses::resting,
    endpoint::{
        build,
        claim::Claim,
        error::{CreateCause, CreateError},
        identity,
        record::{crash_point, leases, owner},
        reserve::{reserve, routes_have_gateways},
        task::{EndpointTask, POD_ROW},
    },
    node::{lifecycle::Lifecycle, timeline},
};

pub use crate::endpoint::reserve::{CreateSpec, External};

/// The endpoint's task answers a deadline first, with the step.
const ANSWER_GRACE: Duration = Duration::from_millis(100);
/// A producer sends a pod's row milliseconds after the kubelet knows the pod.
const ROW_PATIENCE: Duration = Duration::from_secs(3);
/// Steps after the wait for a row.
const STEPS: Duration = Duration::from_secs(5);

type Reply = oneshot::Sender<Result<Claim, CreateCause>>;

/// Creates an endpoint and answers when traffic can flow. Dropping the future undoes the create, as does an error.
pub async fn create(life: &Arc<Lifecycle>, spec: CreateSpec) -> Result<wharf_api::Endpoint, CreateError> {
    let attachment = spec.attachment.clone();
    begin(life, spec).await.map_err(|cause| CreateError { attachment, cause })
}

async fn begin(life: &Arc<Lifecycle>, spec: CreateSpec) -> Result<wharf_api::Endpoint, CreateCause> {
    life.endpoints.admission.memory.admit()?;
    if let Some(why) = life.network.cluster.without_pools() {
        return Err(CreateCause::NoPools(why));
    }
    let patience = spec.deadline.saturating_duration_since(Instant::now());
    let place = life.endpoints.admission.gate.offer(patience).map_err(CreateCause::Overloaded)?;
    let (reply, answer) = oneshot::channel();
    let deadline = spec.deadline;
    let op = OpId::current_or_next(Kind::Create);
    let span = op.span();
    operation::about(&span, None, &spec.attachment);
    life.tasks.endpoints.spawn(run(Arc::clone(life), spec, reply, place, span));
    match timeout_at(deadline + ANSWER_GRACE, answer).await {
        Ok(Ok(result)) => result.map(Claim::accept),
        Ok(Err(_)) => Err(CreateCause::Stopping),
        Err(_) => Err(CreateCause::Deadline("its deadline passed; what was begun is being undone")),
    }
}

/// Spawns the endpoint's task after success, because this future has 16 KiB and the task's has 1 KiB.
async fn run(life: Arc<Lifecycle>, spec: CreateSpec, reply: Reply, place: Place, span: tracing::Span) {
    let started = Instant::now();
    // May be dropped at any await: `reserve` reserves after its last one.
    let begun = timeout_at(spec.deadline, reserve(&life, &spec).instrument(span.clone())).await;
    let begun = begun.unwrap_or_else(|_| Err(CreateCause::NotBegun(spec.netns.clone())));
    let mut task = match begun {
        Ok(task) => task,
        Err(error) => {
            life.telemetry.metrics.operation(Operation::Create.name(), started.elapsed(), false);
            reply.send(Err(error)).ok(); // the caller may have gone; no step was begun
            return;
        }
    };
    let id = task.shared.read(|v| v.record.id);
    operation::about(&span, Some((id, task.handle().epoch)), &spec.attachment);
    let mut reply = Some(reply);
    let result = {
        let _guard = life.endpoints.jobs.working_on(id);
        steps(&mut task, &spec, &mut reply, place).instrument(span.clone()).await
    };
    life.telemetry.metrics.operation(Operation::Create.name(), started.elapsed(), result.is_ok());
    match result {
        Ok(()) => {
            let what = format!("{} {:?}", spec.attachment, started.elapsed());
            span.in_scope(|| life.telemetry.monitor.agent(Some(id), "endpoint-created", what));
            let claim = Claim::new(&life, task.handle());
            if let Some(reply) = reply {
                reply.send(Ok(claim)).ok(); // a dropped claim deletes the endpoint
            }
            life.tasks.endpoints.spawn(task.run());
        }
        Err(failed) => {
            if let Some(reply) = reply {
                reply.send(Err(failed)).ok(); // the caller may have gone; the undo is done
            }
            task.end_after_failed_create().await;
        }
    }
}

async fn steps(
    task: &mut EndpointTask,
    spec: &CreateSpec,
    reply: &mut Option<Reply>,
    place: Place,
) -> Result<(), CreateCause> {
    let life = Arc::clone(&task.life);
    let ip_owner = task.shared.read(|v| v.record.ip_owner);
    if let Err(failed) = identify(task, spec, reply).await {
        return Err(task.undo_create(&[], failed).await);
    }
    let running = tokio::select! {
        running = place.start() => running,
        given_up = gives_up(task, spec, reply, "waited for its turn until the deadline") => {
            return Err(task.undo_create(&[], given_up).await);
        }
    };
    if let Err(refused) = life.endpoints.admission.memory.admit() {
        return Err(task.undo_create(&[], refused.into()).await);
    }
    task.transition(Event::BuildStarted);
    // After the transition: the consumer of the feed now waits for this endpoint before it reports a row as in force.
    let changed = task.shared.read(|v| task.life.endpoints.pods.with_row(&v.record));
    if let Some(record) = changed
        && let Err(failed) = resolve(task, spec, reply, record).await
    {
        return Err(task.undo_create(&[], failed).await);
    }
    let mut begun: Vec<CreateStep> = Vec::new();
    for step in plan_create(ip_owner) {
        if let Some(refused) = give_up(task, spec, reply) {
            return Err(task.undo_create(&begun, refused).await);
        }
        begun.push(step);
        crash_point("create", step.name());
        let before = Instant::now();
        let result = watch(task, spec, step, reply).await;
        let metrics = &life.telemetry.metrics;
        timeline::phase(metrics, &task.shared, Operation::Create, step.name(), before.elapsed(), &result);
        if let Err(failed) = result {
            return Err(task.undo_create(&begun, failed).await);
        }
    }
    crash_point("create", "answer");
    drop(running);
    task.transition(Event::BuildSucceeded);
    task.shared.update(|v| {
        v.committed = true;
        v.status.phase = String::new();
        v.status.regenerations += 1;
        v.status.realized_revision = v.status.desired_revision;
    });
    Ok(())
}

/// Late: no earlier step needs the identity.
async fn identify(task: &mut EndpointTask, spec: &CreateSpec, reply: &mut Option<Reply>) -> Result<(), CreateCause> {
    await_row(task, spec, reply).await?;
    let record = task.shared.read(|v| v.record.clone());
    let record = task.life.endpoints.pods.with_row(&record).unwrap_or(record);
    if !record.awaits_labels {
        resolve(task, spec, reply, record).await?;
    }
    task.transition(Event::IdentityResolved);
    Ok(())
}

/// Without a row, the endpoint has the identity of unknown labels.
async fn await_row(task: &EndpointTask, spec: &CreateSpec, reply: &mut Option<Reply>) -> Result<(), CreateCause> {
    let (life, shared) = (&task.life, &task.shared);
    let record = shared.read(|v| v.record.clone());
    if !record.awaits_labels || !life.endpoints.pods.expects_row(&record) {
        return Ok(());
    }
    tokio::select! {
        biased;
        given_up = gives_up(task, spec, reply, "waited for the start of policy until the deadline") => return Err(given_up),
        () = life.policy.started() => {}
    }
    let now = Instant::now();
    let until = spec.deadline.checked_sub(STEPS).map_or(now, |latest| latest.min(now + ROW_PATIENCE));
    shared.update(|v| {
        v.status.since_unix_ms = clock::unix_ms();
        v.status.waits_for = POD_ROW.0.into();
        v.status.ends_when = format!("a producer sends the row, or {ROW_PATIENCE:?} have passed");
    });
    tokio::select! {
        biased;
        given_up = gives_up(task, spec, reply, "waited for the row of its pod until the deadline") => Err(given_up),
        () = life.endpoints.pods.arrives(&record) => Ok(()),
        () = tokio::time::sleep_until(until) => {
            let text = "the cluster feed has no row of its pod; until the row arrives, it has the identity reserved:init";
            shared.log(LogStatus::Warning, "pod-row", text);
            Ok(())
        }
    }
}

async fn resolve(
    task: &EndpointTask,
    spec: &CreateSpec,
    reply: &mut Option<Reply>,
    record: EndpointRecord,
) -> Result<(), CreateCause> {
    let identities = Arc::clone(&task.life.endpoints.identities);
    let identity = tokio::select! {
        biased;
        given_up = gives_up(task, spec, reply, "waited for an identity of its labels until the deadline") => {
            return Err(given_up);
        }
        identity = identities.acquire(&record.labels) => identity?,
    };
    let before = record.identity;
    task.shared.update(|v| v.record = EndpointRecord { identity, ..record });
    task.shared.log(LogStatus::Ok, "identity", identity.to_string());
    identity::release(&*task.life.endpoints.identities, before).await;
    Ok(())
}

/// `late` describes a deadline.
async fn gives_up(
    task: &EndpointTask,
    spec: &CreateSpec,
    reply: &mut Option<Reply>,
    late: &'static str,
) -> CreateCause {
    let caller_goes = async {
        match reply {
            Some(reply) => reply.closed().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = task.cancel.cancelled() => {}
        () = task.life.tasks.stop.cancelled() => {}
        () = caller_goes => {}
        () = tokio::time::sleep_until(spec.deadline) => {
            return CreateCause::Deadline(late);
        }
    }
    give_up(task, spec, reply).unwrap_or(CreateCause::Deleted("it was given up while it waited"))
}

fn give_up(task: &EndpointTask, spec: &CreateSpec, reply: &Option<Reply>) -> Option<CreateCause> {
    if task.cancel.is_cancelled() {
        return Some(CreateCause::Deleted("a delete came while it was being created"));
    }
    if task.life.tasks.stop.is_cancelled() {
        return Some(CreateCause::Stopping);
    }
    if reply.as_ref().is_none_or(oneshot::Sender::is_closed) {
        return Some(CreateCause::Deadline("the caller went away"));
    }
    (Instant::now() >= spec.deadline).then_some(CreateCause::Deadline("its deadline passed"))
}

/// Runs a step. At the deadline the caller is answered, but the step is awaited: a kernel call cannot be cancelled, and
/// an undo would miss its effects.
async fn watch(
    task: &mut EndpointTask,
    spec: &CreateSpec,
    step: CreateStep,
    reply: &mut Option<Reply>,
) -> Result<(), CreateCause> {
    let shared = Arc::clone(&task.shared);
    shared.update(|v| v.begin_step(step.name()));
    let bound = (Instant::now() + Duration::from_millis(step.deadline_ms())).min(spec.deadline);
    let work = one(task, spec, step);
    tokio::pin!(work);
    tokio::select! {
        result = &mut work => return result,
        () = tokio::time::sleep_until(bound) => {}
    }
    let late = CreateCause::Overrun(step);
    shared.log(LogStatus::Failure, step.name(), late.to_string());
    shared.update(|v| {
        v.status.waits_for = format!("step {step}");
        v.status.ends_when = "the kernel or the store answers".into();
    });
    if let Some(reply) = reply.take() {
        reply.send(Err(late.clone())).ok(); // the caller may have gone; the undo is the same
    }
    match work.await {
        Ok(()) => Err(late),
        Err(failed) => Err(failed),
    }
}

async fn one(task: &EndpointTask, spec: &CreateSpec, step: CreateStep) -> Result<(), CreateCause> {
    let (life, shared) = (&task.life, &task.shared);
    let record = shared.read(|v| v.record.clone());
    let (addresses, registry, jobs) = (&life.network.addresses, &life.endpoints.registry, &life.endpoints.jobs);
    let (id, name) = (record.id, step.name());
    let kernel = |e: KernelError| CreateCause::Kernel(step, e);
    match step {
        CreateStep::WriteIntent => {
            let intent = Intent::Create {
                attachment: record.attachment.clone(),
                netns_path: record.netns.path.clone(),
                link: (!record.link_owner.is_wharf()).then(|| Box::new(LinkRef::of(&record))),
            };
            Ok(life.store.commit(vec![Change::PutIntent(record.id, record.epoch, intent)]).await?)
        }
        CreateStep::Lease => {
            if let Some(why) = life.network.cluster.without_pools() {
                return Err(CreateCause::NoPools(why));
            }
            let request = lease_request(spec);
            let kept = resting::take_over(addresses, &request, &spec.attachment, &owner(&record));
            shared.update(|v| v.taken_over.clone_from(&kept));
            let lease = async || resting::lease_besides(addresses, &kept, &request, &owner(&record)).await;
            let some_leave = registry.someone_leaves();
            let leased = match lease().await {
                // Endpoints under deletion may release addresses.
                Err(IpamError::Exhausted { .. }) if registry.settled(|_| true).await || some_leave => lease().await,
                leased => leased,
            }?;
            shared.update(|v| {
                (v.record.ipv4, v.record.ipv6, v.record.pool) = (leased.ipv4, leased.ipv6, leased.pool);
                v.record.gateway4 = v.record.gateway4.filter(|_| leased.ipv4.is_some());
                v.record.gateway6 = v.record.gateway6.filter(|_| leased.ipv6.is_some());
            });
            shared.read(|v| routes_have_gateways(&v.record))
        }
        CreateStep::EnsurePrograms if task.prepared => Ok(()),
        CreateStep::EnsurePrograms => {
            let spec = build::desired_programs(&life.config, &record);
            jobs.run(id, name, |k| async move { k.ensure_programs(&spec).await }).await.map(drop).map_err(kernel)
        }
        CreateStep::EnsureLink if !record.link_owner.is_wharf() => {
            jobs.run(id, name, |k| async move { k.ensure_connected(&record).await }).await.map_err(kernel)
        }
        CreateStep::EnsureLink => {
            let link = LinkSpec {
                id: record.id,
                epoch: record.epoch,
                attachment: record.attachment.clone(),
                host_ifname: record.host_ifname.clone(),
                netns: record.netns.clone(),
                ifname: record.attachment.ifname.clone(),
                container_mac: record.container_mac,
                host_mac: record.host_mac,
                mtu: record.mtu,
            };
            let link = jobs.run(id, name, |k| async move { k.ensure_link(&link).await }).await.map_err(kernel)?;
            shared.update(|v| {
                v.record.host_ifindex = link.host_ifindex;
                v.record.container_ifindex = link.container_ifindex;
            });
            Ok(())
        }
        CreateStep::EnsureConfig => {
            life.policy.put_endpoint(&record).await?;
            let config =
                build::desired_config(&life.config, &life.telemetry.trace_all, &record, task.shared.read(|v| v.trace));
            let (spec, prepared) = (build::desired_programs(&life.config, &record), task.prepared);
            let call = move |k: Arc<dyn Kernel>| async move {
                match k.ensure_config(id, &config).await {
                    // The set's pins were removed.
                    Err(e) if prepared && e.kind == KernelErrorKind::NotFound => {
                        k.ensure_programs(&spec).await?;
                        k.ensure_config(id, &config).await
                    }
                    result => result,
                }
            };
            jobs.run(id, name, call).await.map_err(kernel)
        }
        CreateStep::EnsureAttached => {
            let link = LinkRef::of(&record);
            jobs.run(id, name, |k| async move { k.ensure_attached(&link).await }).await.map(drop).map_err(kernel)
        }
        CreateStep::EnsureConnected => {
            jobs.run(id, name, |k| async move { k.ensure_connected(&record).await }).await.map_err(kernel)
        }
        CreateStep::EnsureReachable => {
            jobs.run(id, name, |k| async move { k.ensure_reachable(&record).await }).await.map_err(kernel)
        }
        CreateStep::Commit => {
            let mut changes = vec![Change::RemoveIntent(record.id, record.epoch)];
            if record.ip_owner == IpOwner::Endpoint {
                changes.extend(leases(&record).into_iter().map(Change::PutLease));
            }
            changes.push(Change::PutEndpoint(Box::new(record)));
            changes.push(Change::PutLife(Box::new(shared.life(None))));
            Ok(life.store.commit(changes).await?)
        }
    }
}

fn lease_request(spec: &CreateSpec) -> LeaseRequest {
    let v4 = spec.ips.iter().find_map(|ip| if let IpAddr::V4(a) = ip { Some(*a) } else { None });
    let v6 = spec.ips.iter().find_map(|ip| if let IpAddr::V6(a) = ip { Some(*a) } else { None });
    LeaseRequest {
        pool: spec.pool.clone(),
        ipv4: v4.map_or(Wanted::Any, Wanted::Exact),
        ipv6: v6.map_or(Wanted::Any, Wanted::Exact),
    }
}
