//! Create: runs the plan's steps. They are undone in reverse order when one fails, the deadline passes, the caller
//! goes away or a delete arrives.

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;
use wharf_api::{ApiError, EndpointStatus, ErrorCode, LogStatus};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner, host_ifname},
    identity::Label,
    ids::{Attachment, IfIndex, IfName, MacAddr, PoolName},
    ipam::{IpamError, LeaseRequest, Wanted},
    kernel::{Kernel, KernelError, KernelErrorKind, LinkRef, LinkSpec},
    plan::{CreateStep, DeleteOptions, plan_create},
    state::{Event, Fsm, State},
    store::{Change, Intent, LeaseOwner},
    timeline::Operation,
};

use crate::{
    addresses::resting,
    clock,
    endpoint::{
        build,
        claim::Claim,
        deletions,
        record::{crash_point, leases, owner},
        refusal::{error, from_ipam, kernel_error, store_error},
        task::EndpointTask,
    },
    gate::Place,
    node::{
        Node,
        endpoint::{Handle, MAILBOX, Shared, View},
        health,
        prepared::{ProgramSet, random_macs},
        registry::Taken,
        timeline,
    },
    sync::lock,
    telemetry::operation::{self, Kind, OpId},
};

/// What a create asks for, parsed.
#[derive(Debug, Clone)]
pub struct CreateSpec {
    /// CNI key.
    pub attachment: Attachment,
    /// The container's network namespace.
    pub netns: PathBuf,
    /// Pool; the default one when absent.
    pub pool: Option<PoolName>,
    /// MTU, bytes.
    pub mtu: u32,
    /// MAC asked for.
    pub mac: Option<MacAddr>,
    /// Addresses asked for, at most one of each family.
    pub ips: Vec<IpAddr>,
    /// Labels.
    pub labels: std::collections::BTreeSet<Label>,
    /// Pod name.
    pub pod_name: Option<String>,
    /// Pod namespace.
    pub pod_namespace: Option<String>,
    /// When the caller gives up.
    pub deadline: Instant,
}

/// How long after its deadline a caller is answered at the latest: the endpoint's task answers first, because it
/// knows the step.
const ANSWER_GRACE: Duration = Duration::from_millis(100);

type Reply<K> = oneshot::Sender<Result<Claim<K>, ApiError>>;

/// Creates an endpoint and answers when traffic can flow.
///
/// A caller goes away by dropping the returned future. The endpoint is then undone or deleted.
///
/// # Errors
/// Why the create failed; its completed steps are undone.
pub async fn create<K: Kernel>(node: &Arc<Node<K>>, spec: CreateSpec) -> Result<wharf_api::Endpoint, ApiError> {
    admitted_by_memory(node, &spec)?;
    let patience = spec.deadline.saturating_duration_since(Instant::now());
    let place = node.gate.offer(patience).map_err(|refusal| ApiError {
        code: ErrorCode::Overloaded,
        message: format!(
            "create endpoint {}: {} creates wait, and this one would wait about {} ms",
            spec.attachment, refusal.waiting, refusal.predicted_wait_ms
        ),
        hint: None,
        retry_after_ms: Some(refusal.retry_after_ms),
        op: None,
    })?;
    node.creates.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let (reply, answer) = oneshot::channel();
    let (attachment, deadline) = (spec.attachment.clone(), spec.deadline);
    let op = OpId::current_or_next(Kind::Create);
    let span = op.span();
    operation::about(&span, None, &spec.attachment);
    node.endpoints.spawn(run(Arc::clone(node), spec, reply, place, span));
    match timeout_at(deadline + ANSWER_GRACE, answer).await {
        Ok(Ok(result)) => result.map(Claim::accept),
        Ok(Err(_)) => {
            Err(error(ErrorCode::Unavailable, format!("create endpoint {attachment}: the agent is stopping")))
        }
        Err(_) => Err(error(
            ErrorCode::DeadlineExceeded,
            format!("create endpoint {attachment}: its deadline passed; what was begun is being undone"),
        )),
    }
}

async fn run<K: Kernel>(node: Arc<Node<K>>, spec: CreateSpec, reply: Reply<K>, place: Place, span: tracing::Span) {
    let started = Instant::now();
    // `begin` may be dropped at any await: its reservations come after the last one.
    let begun = timeout_at(spec.deadline, begin(&node, &spec).instrument(span.clone())).await.unwrap_or_else(|_| {
        let what = format!("create endpoint {}: its namespace {}", spec.attachment, spec.netns.display());
        Err(error(ErrorCode::DeadlineExceeded, format!("{what} or the store did not answer before the deadline")))
    });
    let mut task = match begun {
        Ok(task) => task,
        Err(error) => {
            node.metrics.create(started.elapsed(), false);
            reply.send(Err(error)).ok(); // the caller may have gone; no step was begun
            return;
        }
    };
    let id = task.shared.read(|v| v.record.id);
    operation::about(&span, Some((id, task.handle().epoch)), &spec.attachment);
    let mut reply = Some(reply);
    let result = {
        let _guard = node.jobs.working_on(id);
        steps(&mut task, &spec, &mut reply, place).instrument(span.clone()).await
    };
    node.metrics.create(started.elapsed(), result.is_ok());
    match result {
        Ok(()) => {
            span.in_scope(|| {
                node.monitor.agent(
                    Some(id),
                    "endpoint-created",
                    format!("{} {:?}", spec.attachment, started.elapsed()),
                );
            });
            drop(span); // the create ends here; later work has its own spans
            let claim = Claim::new(&node, task.handle());
            if let Some(reply) = reply {
                reply.send(Ok(claim)).ok(); // a dropped claim deletes the endpoint
            }
            task.run().await;
        }
        Err(failed) => {
            if let Some(reply) = reply {
                reply.send(Err(failed)).ok(); // the caller may have gone; the undo is done
            }
            task.end_after_failed_create().await;
        }
    }
}

fn admitted_by_memory<K: Kernel>(node: &Node<K>, spec: &CreateSpec) -> Result<(), ApiError> {
    node.memory.admit().map_err(|why| ApiError {
        hint: Some("raise the memory limit of the agent's service (MemoryMax=), or delete endpoints".into()),
        ..error(ErrorCode::LimitReached, format!("create endpoint {}: {why}", spec.attachment))
    })
}

/// Checks that have no side effect, then the reservations: epoch, id, identity, registry entry.
async fn begin<K: Kernel>(node: &Arc<Node<K>>, spec: &CreateSpec) -> Result<EndpointTask<K>, ApiError> {
    let a = &spec.attachment;
    deletions::settle(node, a).await?;
    // A delete is answered before the name and the addresses of its endpoint are free.
    let same = |r: &Attachment| (&r.container_id, &r.ifname) == (&a.container_id, &a.ifname);
    node.registry.settled(|r| same(&r.attachment) || r.addresses().any(|ip| spec.ips.contains(&ip))).await;
    if let Some(there) = node.registry.by_interface(&a.container_id, &a.ifname) {
        return Err(taken_by(node, a, &there));
    }
    let netns = node.kernel.observe_netns(&spec.netns).await.map_err(|e| match e.kind {
        KernelErrorKind::NotFound | KernelErrorKind::NotANetns | KernelErrorKind::Permission => ApiError {
            code: ErrorCode::InvalidNetns,
            message: e.to_string(),
            hint: Some("give the path of the container's network namespace, for example /run/netns/NAME".into()),
            retry_after_ms: None,
            op: None,
        },
        _ => kernel_error(&e),
    })?;
    let (ip_owner, requested) = requested_addresses(node, spec)?;
    let epoch = node.store.next_epoch().await.map_err(|e| error(ErrorCode::Store, e.to_string()))?;
    let set = match spec.mac {
        None => node.prepared.take(),
        Some(_) => None,
    };
    let (set, prepared) = match set {
        Some(set) => (set, true),
        None => {
            let taken = match node.registry.take_id() {
                None if node.registry.settled(|_| true).await => node.registry.take_id(),
                taken => taken,
            };
            let Some(id) = taken else {
                return Err(error(
                    ErrorCode::LimitReached,
                    format!("create endpoint {a}: every endpoint id of this node is in use"),
                ));
            };
            let (container_mac, host_mac) = random_macs();
            (ProgramSet { id, container_mac: spec.mac.unwrap_or(container_mac), host_mac }, false)
        }
    };
    let give_back = || if prepared { node.prepared.give_back(set) } else { node.registry.free_id(set.id) };
    let host_ifname = match IfName::parse(&host_ifname(set.id, epoch)) {
        Ok(name) => name,
        Err(e) => {
            give_back();
            return Err(error(ErrorCode::Internal, e.to_string()));
        }
    };
    let identity = match lock(&node.identities).acquire(&spec.labels) {
        Ok(identity) => identity,
        Err(e) => {
            give_back();
            return Err(error(ErrorCode::LimitReached, format!("create endpoint {a}: {e}")));
        }
    };
    let (gateway4, gateway6) = {
        let ipam = lock(&node.addresses.ipam);
        // The families of caller-leased addresses are known here; those of other addresses after the lease step.
        let speaks = |known: bool| known || ip_owner == IpOwner::Endpoint;
        (
            ipam.router4().filter(|_| speaks(requested.0.is_some())),
            ipam.router6().filter(|_| speaks(requested.1.is_some())),
        )
    };
    let record = EndpointRecord {
        id: set.id,
        epoch,
        attachment: a.clone(),
        netns,
        pool: spec.pool.clone().unwrap_or_else(|| node.config.default_pool.clone()),
        ip_owner,
        ipv4: requested.0,
        ipv6: requested.1,
        gateway4,
        gateway6,
        host_ifname,
        host_ifindex: IfIndex(0),
        container_ifindex: IfIndex(0),
        container_mac: set.container_mac,
        host_mac: set.host_mac,
        mtu: spec.mtu,
        labels: spec.labels.clone(),
        identity,
        pod_name: spec.pod_name.clone(),
        pod_namespace: spec.pod_namespace.clone(),
        created_unix_ms: clock::unix_ms(),
    };
    let view = View {
        record,
        fsm: Fsm::new_created(clock::monotonic_ms()),
        status: EndpointStatus::default(),
        step_since: Instant::now(),
        trace: false,
        committed: false,
        delete_options: DeleteOptions::default(),
        taken_over: Vec::new(),
    };
    let (sender, mailbox) = mpsc::channel(MAILBOX);
    let handle =
        Handle { id: set.id, epoch, mailbox: sender, shared: Shared::new(view), cancel: CancellationToken::new() };
    if let Err(taken) = node.registry.insert(handle.clone()) {
        give_back();
        lock(&node.identities).release(identity);
        return Err(match taken {
            Taken::Interface(there) => taken_by(node, a, &there),
            Taken::Address(ip, there) => ApiError {
                code: ErrorCode::Exists,
                message: format!("create endpoint {a}: endpoint {} has the address {ip} already", there.id),
                hint: Some("delete that one first, or ask for another address".into()),
                retry_after_ms: None,
                op: None,
            },
        });
    }
    let task = EndpointTask::new(Arc::clone(node), &handle, mailbox, prepared);
    task.shared.log(LogStatus::Ok, "created", format!("{a}, identity {identity}"));
    Ok(task)
}

/// At most one address of each family.
type AddressPair = (Option<std::net::Ipv4Addr>, Option<std::net::Ipv6Addr>);

/// The owner of the requested addresses, and the addresses themselves when the caller leased them before.
fn requested_addresses<K: Kernel>(node: &Node<K>, spec: &CreateSpec) -> Result<(IpOwner, AddressPair), ApiError> {
    let ipam = lock(&node.addresses.ipam);
    // Leases of the health endpoint are reserved for it, also while it is relaunched.
    let fits = |owner: &LeaseOwner| !health::holds(owner) || health::is_reserved(&spec.attachment);
    // A lease that an earlier delete kept does not count as the caller's; the lease step may take it over.
    let lent = |owner: &LeaseOwner| matches!(owner, LeaseOwner::Caller { .. }) && owner.kept().is_none();
    let by_caller = |ip: &IpAddr| ipam.get(*ip).is_some_and(|l| lent(&l.owner) && fits(&l.owner));
    let leased = spec.ips.iter().filter(|ip| by_caller(ip)).count();
    if leased == 0 {
        return Ok((IpOwner::Endpoint, (None, None)));
    }
    if leased < spec.ips.len() {
        return Err(error(
            ErrorCode::InvalidRequest,
            format!(
                "create endpoint {}: of the addresses asked for some are leased by the caller and some are not",
                spec.attachment
            ),
        ));
    }
    let v4 = spec.ips.iter().find_map(|ip| if let IpAddr::V4(a) = ip { Some(*a) } else { None });
    let v6 = spec.ips.iter().find_map(|ip| if let IpAddr::V6(a) = ip { Some(*a) } else { None });
    Ok((IpOwner::Caller, (v4, v6)))
}

async fn steps<K: Kernel>(
    task: &mut EndpointTask<K>,
    spec: &CreateSpec,
    reply: &mut Option<Reply<K>>,
    place: Place,
) -> Result<(), ApiError> {
    let node = Arc::clone(&task.node);
    let ip_owner = task.shared.read(|v| v.record.ip_owner);
    task.transition(Event::IdentityResolved);
    let running = tokio::select! {
        running = place.start() => running,
        given_up = gives_up(task, spec, reply) => return Err(task.undo_create(&[], given_up).await),
    };
    // Creates admitted earlier may have used the remaining memory.
    if let Err(refused) = admitted_by_memory(&node, spec) {
        return Err(task.undo_create(&[], refused).await);
    }
    task.transition(Event::BuildStarted);
    let mut begun: Vec<CreateStep> = Vec::new();
    for step in plan_create(ip_owner) {
        if let Some(refused) = give_up(task, spec, reply) {
            return Err(task.undo_create(&begun, refused).await);
        }
        begun.push(step);
        crash_point("create", step.name());
        let before = Instant::now();
        let result = watch(task, spec, step, reply).await;
        let failed = result.as_ref().err().map(|e| e.message.as_str());
        timeline::phase(&node.metrics, &task.shared, Operation::Create, step.name(), before.elapsed(), failed);
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

/// Waits until the create has a reason to give up its place in the queue.
async fn gives_up<K: Kernel>(task: &EndpointTask<K>, spec: &CreateSpec, reply: &mut Option<Reply<K>>) -> ApiError {
    let caller_goes = async {
        match reply {
            Some(reply) => reply.closed().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = task.cancel.cancelled() => {}
        () = task.node.stop.cancelled() => {}
        () = caller_goes => {}
        () = tokio::time::sleep_until(spec.deadline) => {
            let what = format!("create endpoint {}: waited for its turn until the deadline", spec.attachment);
            return error(ErrorCode::DeadlineExceeded, what);
        }
    }
    let what = || format!("create endpoint {}: it was given up while it waited for its turn", spec.attachment);
    give_up(task, spec, reply).unwrap_or_else(|| error(ErrorCode::Busy, what()))
}

/// Whether to stop before the next step.
fn give_up<K: Kernel>(task: &EndpointTask<K>, spec: &CreateSpec, reply: &Option<Reply<K>>) -> Option<ApiError> {
    let what = format!("create endpoint {}", spec.attachment);
    if task.cancel.is_cancelled() {
        return Some(error(ErrorCode::Busy, format!("{what}: a delete came while it was being created")));
    }
    if task.node.stop.is_cancelled() {
        return Some(error(ErrorCode::Unavailable, format!("{what}: the agent is stopping")));
    }
    if reply.as_ref().is_none_or(oneshot::Sender::is_closed) {
        return Some(error(ErrorCode::DeadlineExceeded, format!("{what}: the caller went away")));
    }
    if Instant::now() >= spec.deadline {
        return Some(error(ErrorCode::DeadlineExceeded, format!("{what}: its deadline passed")));
    }
    None
}

/// Runs a step. When the step overruns its deadline, the caller is answered, but the step is awaited to its end: a
/// kernel call cannot be cancelled, and a concurrent undo would miss what the call makes afterwards.
async fn watch<K: Kernel>(
    task: &mut EndpointTask<K>,
    spec: &CreateSpec,
    step: CreateStep,
    reply: &mut Option<Reply<K>>,
) -> Result<(), ApiError> {
    let shared = Arc::clone(&task.shared);
    shared.update(|v| v.begin_step(step.name()));
    let bound = (Instant::now() + Duration::from_millis(step.deadline_ms())).min(spec.deadline);
    let work = one(task, spec, step);
    tokio::pin!(work);
    tokio::select! {
        result = &mut work => return result,
        () = tokio::time::sleep_until(bound) => {}
    }
    let late = error(
        ErrorCode::DeadlineExceeded,
        format!(
            "create endpoint {}: step {step} did not end in time; it is undone as soon as it ends",
            spec.attachment
        ),
    );
    shared.log(LogStatus::Failure, step.name(), late.message.clone());
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

async fn one<K: Kernel>(task: &EndpointTask<K>, spec: &CreateSpec, step: CreateStep) -> Result<(), ApiError> {
    let (node, shared) = (&task.node, &task.shared);
    let record = shared.read(|v| v.record.clone());
    let (id, name) = (record.id, step.name());
    let kernel = |e: KernelError| match (step, e.kind) {
        (CreateStep::EnsureLink, KernelErrorKind::Exists) => ApiError {
            code: ErrorCode::Exists,
            message: format!("create endpoint {}: {e}", spec.attachment),
            hint: Some("choose another CNI_IFNAME, or delete the interface that is there".into()),
            retry_after_ms: None,
            op: None,
        },
        (
            CreateStep::EnsureLink | CreateStep::EnsureConnected,
            KernelErrorKind::NotFound | KernelErrorKind::NotANetns,
        ) => ApiError {
            code: ErrorCode::InvalidNetns,
            message: format!("create endpoint {}: {e}", spec.attachment),
            hint: Some("the container's network namespace went away; recreate the container".into()),
            retry_after_ms: None,
            op: None,
        },
        _ => kernel_error(&e),
    };
    match step {
        CreateStep::WriteIntent => {
            let intent =
                Intent::Create { attachment: record.attachment.clone(), netns_path: record.netns.path.clone() };
            node.store
                .commit(vec![Change::PutIntent(record.id, record.epoch, intent)])
                .await
                .map_err(|e| store_error(&e))
        }
        CreateStep::Lease => {
            let request = lease_request(spec);
            let kept = resting::take_over(&node.addresses, &request, &spec.attachment, &owner(&record));
            shared.update(|v| v.taken_over.clone_from(&kept));
            let lease = async || resting::lease_besides(&node.addresses, &kept, &request, &owner(&record)).await;
            let leased = match lease().await {
                // Endpoints whose deletes are answered still have their addresses.
                Err(IpamError::Exhausted { .. }) if node.registry.settled(|_| true).await => lease().await,
                leased => leased,
            };
            let leased = leased.map_err(|e| from_ipam(&format!("create endpoint {}", spec.attachment), &e))?;
            shared.update(|v| {
                (v.record.ipv4, v.record.ipv6, v.record.pool) = (leased.ipv4, leased.ipv6, leased.pool);
                // A family without an address has no gateway.
                v.record.gateway4 = v.record.gateway4.filter(|_| leased.ipv4.is_some());
                v.record.gateway6 = v.record.gateway6.filter(|_| leased.ipv6.is_some());
            });
            Ok(())
        }
        CreateStep::EnsurePrograms if task.prepared => Ok(()),
        CreateStep::EnsurePrograms => {
            let spec = build::desired_programs(&node.config, &record);
            node.jobs.run(id, name, |k| async move { k.ensure_programs(&spec).await }).await.map(drop).map_err(kernel)
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
            let link = node.jobs.run(id, name, |k| async move { k.ensure_link(&link).await }).await.map_err(kernel)?;
            shared.update(|v| {
                v.record.host_ifindex = link.host_ifindex;
                v.record.container_ifindex = link.container_ifindex;
            });
            Ok(())
        }
        CreateStep::EnsureConfig => {
            let config = build::desired_config(node, &record, task.shared.read(|v| v.trace));
            let (spec, prepared) = (build::desired_programs(&node.config, &record), task.prepared);
            let call = move |k: Arc<K>| async move {
                match k.ensure_config(id, &config).await {
                    // The pins of the prepared set were removed externally: this create loads its own programs.
                    Err(e) if prepared && e.kind == KernelErrorKind::NotFound => {
                        k.ensure_programs(&spec).await?;
                        k.ensure_config(id, &config).await
                    }
                    result => result,
                }
            };
            node.jobs.run(id, name, call).await.map_err(kernel)
        }
        CreateStep::EnsureAttached => {
            let link = LinkRef::of(&record);
            node.jobs.run(id, name, |k| async move { k.ensure_attached(&link).await }).await.map(drop).map_err(kernel)
        }
        CreateStep::EnsureConnected => {
            node.jobs.run(id, name, |k| async move { k.ensure_connected(&record).await }).await.map_err(kernel)
        }
        CreateStep::EnsureReachable => {
            node.jobs.run(id, name, |k| async move { k.ensure_reachable(&record).await }).await.map_err(kernel)
        }
        CreateStep::Commit => {
            let mut changes = vec![Change::RemoveIntent(record.id, record.epoch)];
            if record.ip_owner == IpOwner::Endpoint {
                changes.extend(leases(&record).into_iter().map(Change::PutLease));
            }
            changes.push(Change::PutEndpoint(Box::new(record)));
            changes.push(Change::PutLife(Box::new(shared.life(None))));
            node.store.commit(changes).await.map_err(|e| store_error(&e))
        }
    }
}

/// Requested addresses are leased exactly; for other families, any address of the pool.
fn lease_request(spec: &CreateSpec) -> LeaseRequest {
    let v4 = spec.ips.iter().find_map(|ip| if let IpAddr::V4(a) = ip { Some(*a) } else { None });
    let v6 = spec.ips.iter().find_map(|ip| if let IpAddr::V6(a) = ip { Some(*a) } else { None });
    LeaseRequest {
        pool: spec.pool.clone(),
        ipv4: v4.map_or(Wanted::Any, Wanted::Exact),
        ipv6: v6.map_or(Wanted::Any, Wanted::Exact),
    }
}

/// The error for an interface that has an endpoint: `Busy` with a retry while that endpoint is being created or
/// deleted, else `Exists`.
fn taken_by<K: Kernel>(node: &Node<K>, attachment: &Attachment, there: &Handle) -> ApiError {
    let (id, state, committed) = there.shared.read(|v| (v.record.id, v.fsm.state, v.committed));
    let what = format!("create endpoint {attachment}: endpoint {id}");
    let goes = state == State::Disconnecting && node.jobs.is_in_flight(there.id);
    if !committed || goes {
        let doing = if goes { "is being deleted" } else { "is being created, or taken back" };
        let message = format!("{what} of this interface {doing}");
        return ApiError { retry_after_ms: Some(100), ..error(ErrorCode::Busy, message) };
    }
    ApiError {
        code: ErrorCode::Exists,
        message: format!("{what} has this interface already ({state})"),
        hint: Some("delete that one first".into()),
        retry_after_ms: None,
        op: None,
    }
}
