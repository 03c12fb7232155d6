//! `/v1/endpoint`.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Json,
    extract::{FromRequestParts, State},
    http::{StatusCode, request::Parts},
};
use tokio::{sync::oneshot, time::Instant};
use wharf_api::{
    ApiError, COMMAND_HEADER, DeleteQuery, DeleteResult, Endpoint, EndpointConfigView, EndpointCreate, EndpointFilter,
    EndpointHealth, EndpointLabels, EndpointLogEntry, EndpointPatch, ErrorCode, Health, NamedPort, PublishedPort,
    SelfCheck,
};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    finding::{Problem, Verdict, verdict},
    identity::Label,
    identity_allocator::{RESERVED_SOURCE, security_relevant},
    ids::{Attachment, ContainerId, IfName, MacAddr, NetworkName, PoolName, PortName, RuntimeName},
    kernel::{ConfigSpec, MIN_MTU},
    mtu::MAX_MTU,
    plan::DeleteOptions,
};
use wharf_handover::command::Command as CniCommand;

use crate::{
    endpoint::{
        build,
        create::{self, CreateSpec},
        delete, look, unknown,
    },
    explain, findings,
    node::{
        Node,
        aside::Wanted,
        edit::Edit,
        endpoint::{Command, Done, Handle, View, api_endpoint},
        health,
        looks::Purpose,
        self_checks::Lane,
    },
    rest::{
        addressing,
        error::{Answer, Body, Failure, Query, Segment},
        id::{self, IdRef},
    },
    selfcheck::Checker,
    serve::Peer,
};

/// Runtimes allow a minute or more.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
/// A build takes some ten milliseconds, longer behind others. CHECK waits at most 10 s.
const BUILD_PATIENCE: Duration = Duration::from_secs(5);
const MAX_DEADLINE: Duration = Duration::from_secs(600);
/// Kubernetes objects have a few dozen.
const MAX_LABELS: usize = 256;
const MAX_PORTS: usize = 1_024;
/// Prefix of keys in selectors that match any source.
const ANY_SOURCE: &str = "any";

/// Endpoints that match every filter, by id.
#[utoipa::path(get, path = "/v1/endpoint", tag = "endpoint", params(EndpointFilter),
    responses((status = 200, body = [Endpoint]), (status = 400, body = ApiError)))]
pub async fn list(State(node): State<Arc<Node>>, Query(filter): Query<EndpointFilter>) -> Answer<Json<Vec<Endpoint>>> {
    let label = match &filter.label {
        Some(text) => Some(text.parse::<Label>().map_err(|e| invalid(format!("list endpoints: {e}")))?),
        None => None,
    };
    let fits = |v: &View| {
        let r = &v.record;
        filter.container_id.as_ref().is_none_or(|c| r.attachment.container_id.as_str() == c)
            && filter.network.as_ref().is_none_or(|n| r.attachment.network.as_str() == n)
            && filter.state.is_none_or(|s| s == v.fsm.state)
            && label.as_ref().is_none_or(|l| r.labels.contains(l))
            && filter.pod_name.as_ref().is_none_or(|p| r.pod_name.as_ref() == Some(p))
    };
    let mut fitting = node.life.registry.list();
    fitting.retain(|handle| handle.shared.read(fits));
    Ok(Json(explain::links::with_problems(&node, Purpose::List, &fitting).await))
}

/// Creates an endpoint, or rolls back. The id is `cni-attachment-id:ID:IFNAME`.
#[utoipa::path(put, path = "/v1/endpoint/{id}", tag = "endpoint", params(("id" = String, Path)), request_body = EndpointCreate,
    responses((status = 201, body = Endpoint), (status = 400, body = ApiError), (status = 409, body = ApiError),
        (status = 429, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn put(
    State(node): State<Arc<Node>>,
    Segment(text): Segment,
    Caller(runtime): Caller,
    Body(mut body): Body<EndpointCreate>,
) -> Answer<(StatusCode, Json<Endpoint>)> {
    body.runtime = body.runtime.or(runtime);
    let spec = create_spec(&text, body)?;
    accepts_work(&node, "create endpoint")?;
    Ok((StatusCode::CREATED, Json(create::create(&node.life, spec).await?)))
}

/// One endpoint.
#[utoipa::path(get, path = "/v1/endpoint/{id}", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = Endpoint), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn get(State(node): State<Arc<Node>>, Segment(text): Segment) -> Answer<Json<Endpoint>> {
    let handle = handle(&node, &text)?;
    let shown = explain::links::with_problems(&node, Purpose::Endpoint, std::slice::from_ref(&handle)).await;
    shown
        .into_iter()
        .next()
        .map(Json)
        .ok_or_else(|| Failure::new(ErrorCode::Internal, "show endpoint: nothing to show"))
}

fn shown(node: &Node, handle: &Handle) -> Endpoint {
    handle.shared.read(|view| api_endpoint(view, node.life.config.masquerade.is_some()))
}

/// Changes an endpoint or regenerates it. Answers when the change is realized.
#[utoipa::path(patch, path = "/v1/endpoint/{id}", tag = "endpoint", params(("id" = String, Path)), request_body = EndpointPatch,
    responses((status = 200, body = Endpoint), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 429, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn patch(
    State(node): State<Arc<Node>>,
    Segment(text): Segment,
    Body(body): Body<EndpointPatch>,
) -> Answer<Json<Endpoint>> {
    let handle = handle(&node, &text)?;
    accepts_work(&node, "change endpoint")?;
    let edit = parse_edit(&body)?;
    if !edit.is_empty() {
        if handle.shared.read(|v| health::is_reserved(&v.record.attachment)) {
            return Err(invalid(format!(
                "change endpoint {}: labels and policy of the health endpoint are the agent's own",
                handle.id
            )));
        }
        ask(&handle, |done| Command::Edit(Box::new(edit), done)).await?;
        node.life.policy.settle().await;
    }
    if let Some(trace) = body.trace {
        ask(&handle, |done| Command::Trace(trace, done)).await?;
    }
    if let Some(level) = body.regenerate {
        ask(&handle, |done| Command::Regenerate(level, done)).await?;
    }
    Ok(Json(shown(&node, &handle)))
}

/// Deletes one endpoint.
#[utoipa::path(delete, path = "/v1/endpoint/{id}", tag = "endpoint", params(("id" = String, Path), DeleteQuery),
    responses((status = 200, body = DeleteResult), (status = 206, body = DeleteResult), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 429, body = ApiError), (status = 503, body = ApiError)))]
pub async fn remove(
    State(node): State<Arc<Node>>,
    Segment(text): Segment,
    Query(query): Query<DeleteQuery>,
) -> Answer<(StatusCode, Json<DeleteResult>)> {
    if query.container_id.is_some() {
        return Err(invalid("delete endpoint: container-id belongs to DELETE /v1/endpoint".into()));
    }
    // During a restore, not-found could be false; the shim takes it for success.
    accepts_work(&node, "delete endpoint")?;
    let handle = match handle(&node, &text) {
        Err(Failure(unknown)) if unknown.code == ErrorCode::NotFound => {
            let left = leftovers(&node, &text, query.network.as_deref()).await?;
            return left.map(deleted).ok_or(Failure(unknown));
        }
        Ok(there) if node.life.registry.is_leaving(&there) => {
            let message = format!("delete endpoint {text}: it is deleted; the kernel is about to release its link");
            return Err(Failure::new(ErrorCode::NotFound, message));
        }
        found => found?,
    };
    if let Some(epoch) = query.epoch
        && handle.epoch.0 != epoch
    {
        return Err(Failure::new(
            ErrorCode::NotFound,
            format!("delete endpoint {text}: it is of epoch {}, not {epoch}", handle.epoch),
        ));
    }
    let network = handle.shared.read(|v| v.record.attachment.network.to_string());
    if query.network.is_some() && handle.shared.read(|v| health::is_reserved(&v.record.attachment)) {
        // Only a runtime names a network; the health endpoint is no container of one.
        let message = format!("delete endpoint {text}: no container has it, it is the node's own");
        return Err(Failure::new(ErrorCode::NotFound, message));
    }
    if let Some(wanted) = &query.network
        && *wanted != network
    {
        let shown: String = wanted.chars().take(80).collect();
        let message = format!("delete endpoint {text}: it is of network {network}, not {shown}");
        return Err(Failure::new(ErrorCode::NotFound, message));
    }
    let options = DeleteOptions { no_ip_release: query.no_ip_release.unwrap_or(false) };
    let attachment = handle.shared.read(|v| v.record.attachment.clone());
    let mut result = delete::delete(&node.life, vec![handle], options, delete::Answer::Unlisted).await;
    // No other delete removes its record out of service.
    unknown::join(&mut result, unknown::remove(&node.life, &Wanted::of(&attachment)).await);
    Ok(deleted(result))
}

/// Deletes all endpoints of one container.
#[utoipa::path(delete, path = "/v1/endpoint", tag = "endpoint", params(DeleteQuery),
    responses((status = 200, body = DeleteResult), (status = 206, body = DeleteResult), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 429, body = ApiError), (status = 503, body = ApiError)))]
pub async fn remove_container(
    State(node): State<Arc<Node>>,
    Query(query): Query<DeleteQuery>,
) -> Answer<(StatusCode, Json<DeleteResult>)> {
    let Some(container) = &query.container_id else {
        return Err(invalid("delete endpoints: container-id=ID is required".into()));
    };
    if query.epoch.is_some() {
        return Err(invalid("delete endpoints: epoch names one endpoint; use DELETE /v1/endpoint/{id}".into()));
    }
    let container = ContainerId::parse(container).map_err(|e| invalid(format!("delete endpoints: {e}")))?;
    accepts_work(&node, "delete endpoints")?;
    let all = node.life.registry.list();
    let fits = |h: &Handle| {
        h.shared.read(|v| {
            let a = &v.record.attachment;
            // Deleted by its id only.
            a.container_id == container
                && !health::is_reserved(a)
                && query.network.as_ref().is_none_or(|n| a.network.as_str() == n)
        })
    };
    let handles: Vec<Handle> = all.into_iter().filter(|h| fits(h) && !node.life.registry.is_leaving(h)).collect();
    let network = query.network.as_deref().map(network).transpose()?;
    let wanted = Wanted { network, container_id: container.clone(), ifname: None };
    let left = unknown::remove(&node.life, &wanted).await;
    if handles.is_empty() && left == DeleteResult::default() {
        return Err(Failure::new(
            ErrorCode::NotFound,
            format!("delete endpoints of container {container}: it has none"),
        ));
    }
    let options = DeleteOptions { no_ip_release: query.no_ip_release.unwrap_or(false) };
    let mut result = delete::delete(&node.life, handles, options, delete::Answer::Unlisted).await;
    unknown::join(&mut result, left);
    Ok(deleted(result))
}

async fn leftovers(node: &Arc<Node>, text: &str, of: Option<&str>) -> Answer<Option<DeleteResult>> {
    let IdRef::Attachment(container_id, ifname) = id::parse(text)? else { return Ok(None) };
    let wanted = Wanted { network: of.map(network).transpose()?, container_id, ifname: Some(ifname) };
    let result = unknown::remove(&node.life, &wanted).await;
    Ok((result != DeleteResult::default()).then_some(result))
}

fn network(name: &str) -> Answer<NetworkName> {
    NetworkName::parse(name).map_err(|e| invalid(format!("delete endpoint: {e}")))
}

/// The endpoint's status log, oldest first.
#[utoipa::path(get, path = "/v1/endpoint/{id}/log", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = [EndpointLogEntry]), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn log(State(node): State<Arc<Node>>, Segment(text): Segment) -> Answer<Json<Vec<EndpointLogEntry>>> {
    Ok(Json(handle(&node, &text)?.shared.log_lines()))
}

/// Of test packets: CHECK does not wait for other clients.
pub struct CheckLane(Lane);

impl<S: Send + Sync> FromRequestParts<S> for CheckLane {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        // Any user can send the header.
        let is_root = parts.extensions.get::<Peer>().is_some_and(|peer| peer.is_root);
        let is_command = parts.headers.contains_key(COMMAND_HEADER);
        Ok(Self(if is_root && is_command { Lane::Check } else { Lane::Client }))
    }
}

/// Compares kernel and desired state now, and tests the programs with packets.
#[utoipa::path(get, path = "/v1/endpoint/{id}/healthz", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointHealth), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError)))]
pub async fn health(
    State(node): State<Arc<Node>>,
    CheckLane(lane): CheckLane,
    Segment(text): Segment,
) -> Answer<Json<EndpointHealth>> {
    let handle = handle(&node, &text)?;
    let look = look::settled(&*node.life.kernel, &handle, BUILD_PATIENCE).await?;
    let status = &look.view.status;
    let (desired_revision, realized_revision) = (status.desired_revision, status.realized_revision);
    if !look.settled && verdict(&look.problems) > Verdict::Well {
        let pending = Health::Pending;
        return Ok(Json(EndpointHealth {
            overall: pending,
            bpf: pending,
            policy: pending,
            connected: pending,
            findings: Vec::new(),
            desired_revision,
            realized_revision,
            self_check: SelfCheck::default(),
        }));
    }
    let health_of = |bpf: bool| {
        let of_part = |p: &&Problem| matches!(p, Problem::Endpoint(_, problem) if problem.is_of_bpf() == bpf);
        findings::endpoint_health(verdict(look.problems.iter().filter(of_part)))
    };
    let (bpf, connected) = (health_of(true), health_of(false));
    let policy = match (realized_revision >= desired_revision, &status.last_error) {
        (true, None) => Health::Ok,
        (_, Some(_)) => Health::Degraded,
        (false, None) => Health::Pending,
    };
    let owner = look.view.record.attachment.to_string();
    let findings = look.problems.iter().map(|p| findings::finding(p, Some(owner.clone()))).collect();
    let self_check = Checker::new(&node.life, &node.self_checks).ask(&handle, lane).await;
    let overall = bpf.max(connected).max(policy).max(self_check.state);
    Ok(Json(EndpointHealth {
        overall,
        bpf,
        policy,
        connected,
        findings,
        desired_revision,
        realized_revision,
        self_check,
    }))
}

/// The endpoint's labels, and those that make its identity.
#[utoipa::path(get, path = "/v1/endpoint/{id}/labels", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointLabels), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
pub async fn labels(State(node): State<Arc<Node>>, Segment(text): Segment) -> Answer<Json<EndpointLabels>> {
    Ok(Json(handle(&node, &text)?.shared.read(|v| EndpointLabels {
        labels: v.record.labels.iter().map(ToString::to_string).collect(),
        security_relevant: security_relevant(&v.record.labels).iter().map(ToString::to_string).collect(),
        identity: v.record.identity.0,
    })))
}

/// The desired configuration row, and the row in the kernel.
#[utoipa::path(get, path = "/v1/endpoint/{id}/config", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointConfigView), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError)))]
pub async fn config(State(node): State<Arc<Node>>, Segment(text): Segment) -> Answer<Json<EndpointConfigView>> {
    let view = handle(&node, &text)?.shared.view();
    let desired = desired(&build::desired_config(&node.life.config, &node.life.trace_all, &view.record, view.trace));
    let rows = node.life.kernel.dump_map(&format!("{}/CONFIG", view.record.id)).await?;
    Ok(Json(EndpointConfigView { desired, realized: rows.into_iter().next().unwrap_or_default() }))
}

/// Without `..`: a new setting does not compile until it is shown.
fn desired(config: &ConfigSpec) -> BTreeMap<String, String> {
    let ConfigSpec {
        epoch,
        host_ifindex,
        identity,
        ipv4,
        ipv6,
        gateway4,
        gateway6,
        live,
        trace,
        local_by_stack,
        chained,
        bandwidth: Bandwidth { ingress, egress },
    } = config;
    let address = |a: Option<IpAddr>| a.map(|a| a.to_string()).unwrap_or_default();
    let limit = |limit: &Option<Limit>| limit.map(|l| format!("{} bit/s, burst {} bit", l.rate, l.burst));
    let rows = [
        ("epoch", epoch.to_string()),
        ("ifindex", host_ifindex.to_string()),
        ("identity", identity.to_string()),
        ("ipv4", address(ipv4.map(Into::into))),
        ("ipv6", address(ipv6.map(Into::into))),
        ("gateway4", address(gateway4.map(Into::into))),
        ("gateway6", address(gateway6.map(Into::into))),
        ("live", live.to_string()),
        ("trace", trace.to_string()),
        ("local_by_stack", local_by_stack.to_string()),
        ("chained", chained.to_string()),
        ("limit_ingress", limit(ingress).unwrap_or_default()),
        ("limit_egress", limit(egress).unwrap_or_default()),
    ];
    rows.map(|(name, value)| (name.to_owned(), value)).into()
}

fn handle(node: &Node, text: &str) -> Answer<Handle> {
    match id::find(&node.life.registry, &id::parse(text)?, text) {
        // The endpoint may await its restore; a CHECK must not take it for gone.
        Err(Failure(unknown)) if unknown.code == ErrorCode::NotFound => {
            accepts_work(node, "find endpoint")?;
            Err(Failure(unknown))
        }
        found => found,
    }
}

/// Refuses work during restore and at a stop.
pub fn accepts_work(node: &Node, what: &str) -> Answer<()> {
    let (serving, stopping) =
        (node.serving.load(std::sync::atomic::Ordering::Acquire), node.life.tasks.stop.is_cancelled());
    if serving && !stopping {
        return Ok(());
    }
    let state = if stopping { "stopping" } else { "starting" };
    Err(Failure::new(ErrorCode::Unavailable, format!("{what}: the agent is {state}")).retry(200))
}

fn deleted(result: DeleteResult) -> (StatusCode, Json<DeleteResult>) {
    let status = if result.errors.is_empty() { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT };
    (status, Json(result))
}

async fn ask(handle: &Handle, command: impl FnOnce(Done) -> Command) -> Answer<()> {
    let (done, answer) = oneshot::channel();
    let id = handle.id;
    handle.mailbox.try_send(command(done)).map_err(|e| match e {
        tokio::sync::mpsc::error::TrySendError::Full(_) => {
            Failure::new(ErrorCode::Busy, format!("change endpoint {id}: it has too much to do already")).retry(200)
        }
        tokio::sync::mpsc::error::TrySendError::Closed(_) => gone(handle),
    })?;
    match answer.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(Failure::from(why).of(format_args!("change endpoint {id}"))),
        Err(_) => Err(gone(handle)),
    }
}

fn gone(handle: &Handle) -> Failure {
    Failure::new(ErrorCode::NotFound, format!("change endpoint {}: it is gone", handle.id))
}

fn invalid(message: String) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, message)
}

fn parse_labels(labels: &[String]) -> Answer<std::collections::BTreeSet<Label>> {
    if labels.len() > MAX_LABELS {
        return Err(invalid(format!("read labels: {} of them, at most {MAX_LABELS} are taken", labels.len())));
    }
    let parse = |text: &String| {
        let label: Label = text.parse().map_err(|e| invalid(format!("read labels: {e}")))?;
        if label.source == RESERVED_SOURCE {
            return Err(invalid(format!("read labels: {label}: only the agent gives {RESERVED_SOURCE} labels")));
        }
        if label.source == ANY_SOURCE {
            let why = "stands for every source in a policy; give the label's own source";
            return Err(invalid(format!("read labels: {label}: {ANY_SOURCE} {why}")));
        }
        Ok(label)
    };
    let labels = labels.iter().map(parse).collect::<Answer<std::collections::BTreeSet<Label>>>()?;
    // Labels of one key are adjacent in the set. A selector would match only one value.
    let same_key = |(a, b): &(&Label, &Label)| (&a.source, &a.key) == (&b.source, &b.key);
    match labels.iter().zip(labels.iter().skip(1)).find(same_key) {
        Some((a, b)) => Err(invalid(format!("read labels: {a} and {b} are two values of one label; leave one out"))),
        None => Ok(labels),
    }
}

fn parse_edit(body: &EndpointPatch) -> Answer<Edit> {
    let named = |(name, port): (&String, &Option<NamedPort>)| {
        let name = PortName::parse(name).map_err(|e| invalid(format!("read named_ports: {e}")))?;
        Ok((name, *port))
    };
    Ok(Edit {
        labels: body.labels.as_deref().map(parse_labels).transpose()?,
        enforcement: body.policy_enforcement,
        named_ports: body.named_ports.iter().map(named).collect::<Answer<_>>()?,
    })
}

fn parse_ports(attachment: &Attachment, ports: &[PublishedPort]) -> Answer<Vec<PublishedPort>> {
    if ports.len() > MAX_PORTS {
        let count = ports.len();
        return Err(invalid(format!("create endpoint {attachment}: {count} ports, at most {MAX_PORTS} are taken")));
    }
    let mut read: Vec<PublishedPort> = Vec::with_capacity(ports.len());
    for port in ports {
        if port.host_ip.is_some_and(|ip| ip.is_multicast() || ip == Ipv4Addr::BROADCAST) {
            let rule = "a port is published on an address of one node";
            return Err(invalid(format!("create endpoint {attachment}: port {port}: {rule}")));
        }
        if let Some(other) = read.iter().find(|other| other.overlaps(port)) {
            return Err(invalid(format!("create endpoint {attachment}: port {port} is asked for beside {other}")));
        }
        read.push(*port);
    }
    Ok(read)
}

fn parse_bandwidth(attachment: &Attachment, asked: wharf_api::Bandwidth) -> Answer<Bandwidth> {
    let limit = |direction: &str, asked: Option<wharf_api::BandwidthLimit>| {
        let Some(asked) = asked else { return Ok(None) };
        Limit::of(asked.rate, asked.burst)
            .map_err(|e| invalid(format!("create endpoint {attachment}: limit of {direction}: {e}")))
    };
    Ok(Bandwidth { ingress: limit("ingress", asked.ingress)?, egress: limit("egress", asked.egress)? })
}

/// The container runtime that a CNI command names in its header; an older plugin names it in the body, which goes
/// first.
pub struct Caller(pub Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let command =
            parts.headers.get(COMMAND_HEADER).and_then(|header| CniCommand::of_header(header.as_bytes()).ok());
        Ok(Self(command.map(|(command, _)| command.runtime).filter(|runtime| !runtime.is_empty())))
    }
}

/// `text` is the path's id.
///
/// # Errors
/// 400 with the rule.
pub fn create_spec(text: &str, body: EndpointCreate) -> Answer<CreateSpec> {
    let bad = |e: wharf_core::ids::IdError| invalid(format!("create endpoint: {e}"));
    let attachment = Attachment {
        network: NetworkName::parse(&body.network).map_err(bad)?,
        container_id: ContainerId::parse(&body.container_id).map_err(bad)?,
        ifname: IfName::parse(&body.ifname).map_err(bad)?,
    };
    if health::is_reserved(&attachment) {
        let message =
            format!("create endpoint {attachment}: network and container id {} are the agent's own", health::NAME);
        return Err(invalid(message));
    }
    match id::parse(text)? {
        IdRef::Attachment(c, i) if c == attachment.container_id && i == attachment.ifname => {}
        IdRef::Attachment(..) => {
            return Err(invalid(format!("create endpoint {attachment}: the id in the path names another attachment")));
        }
        _ => return Err(invalid(format!("create endpoint {attachment}: the id must be cni-attachment-id:ID:IFNAME"))),
    }
    if !body.netns.starts_with('/') || body.netns.len() > 4096 || body.netns.contains('\0') {
        return Err(Failure::new(
            ErrorCode::InvalidNetns,
            format!("create endpoint {attachment}: netns must be an absolute path of at most 4096 bytes"),
        ));
    }
    if let Some(mtu) = body.mtu.filter(|mtu| !(MIN_MTU..=MAX_MTU).contains(mtu)) {
        return Err(invalid(format!("create endpoint {attachment}: mtu {mtu} is not within {MIN_MTU} to {MAX_MTU}")));
    }
    let of_family = |v6: bool| body.ips.iter().filter(|ip| ip.is_ipv6() == v6).count();
    if of_family(false) > 1 || of_family(true) > 1 {
        return Err(invalid(format!(
            "create endpoint {attachment}: at most one address of each family can be asked for"
        )));
    }
    let external = addressing::external(&attachment, &body)?;
    for (name, value) in [("pod_name", &body.pod_name), ("pod_namespace", &body.pod_namespace)] {
        if value.as_ref().is_some_and(|v| v.len() > 253 || v.chars().any(char::is_control)) {
            return Err(invalid(format!(
                "create endpoint {attachment}: {name} must be at most 253 bytes without control characters"
            )));
        }
    }
    let deadline = body.deadline_ms.map_or(DEFAULT_DEADLINE, Duration::from_millis).min(MAX_DEADLINE);
    Ok(CreateSpec {
        pool: body.pool.as_deref().map(PoolName::parse).transpose().map_err(bad)?,
        mac: body.mac.as_deref().map(str::parse::<MacAddr>).transpose().map_err(bad)?,
        labels: parse_labels(&body.labels)?,
        netns: body.netns.into(),
        mtu: body.mtu,
        ips: body.ips,
        pod_name: body.pod_name,
        pod_namespace: body.pod_namespace,
        runtime: body.runtime.as_deref().map(RuntimeName::parse).transpose().map_err(bad)?,
        ports: parse_ports(&attachment, &body.ports)?,
        masquerade: body.masquerade,
        bandwidth: parse_bandwidth(&attachment, body.bandwidth)?,
        external,
        routes: addressing::routes(&attachment, body.routes)?,
        deadline: Instant::now() + deadline,
        attachment,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_plugin_of_root_has_the_lane_of_check() {
        for (is_root, is_command, expected) in [
            (Some(true), true, Lane::Check),
            (Some(true), false, Lane::Client),
            (Some(false), true, Lane::Client),
            (None, true, Lane::Client),
        ] {
            let (mut parts, ()) = axum::http::Request::new(()).into_parts();
            if let Some(is_root) = is_root {
                parts.extensions.insert(Peer { is_root });
            }
            if is_command {
                parts.headers.insert(COMMAND_HEADER, axum::http::HeaderValue::from_static("CHECK"));
            }
            let CheckLane(lane) = CheckLane::from_request_parts(&mut parts, &()).await.expect("a lane");
            assert_eq!(lane, expected, "{is_root:?} {is_command}");
        }
    }

    #[tokio::test]
    async fn the_runtime_of_a_command_is_in_its_header() {
        for (header, expected) in [
            (r#"{"command":{"id":1,"verb":"ADD","runtime":"crio"},"age_us":1}"#, Some("crio")),
            (r#"{"command":{"id":1,"verb":"ADD"},"age_us":1}"#, None),
            (r#"{"command":{"id":1,"verb":"ADD","runtime":"cri/o"},"age_us":1}"#, None),
            ("ADD", None),
        ] {
            let (mut parts, ()) = axum::http::Request::new(()).into_parts();
            parts.headers.insert(COMMAND_HEADER, axum::http::HeaderValue::from_static(header));
            let Caller(runtime) = Caller::from_request_parts(&mut parts, &()).await.expect("a caller");
            assert_eq!(runtime.as_deref(), expected, "{header}");
        }
    }

    #[test]
    fn a_label_has_one_value() {
        let parse = |labels: &[&str]| parse_labels(&labels.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>());
        assert_eq!(parse(&["k8s:a=1", "cni:a=2", "k8s:b=1", "k8s:a=1"]).expect("labels").len(), 3);
        for source in ["any", "reserved"] {
            assert!(parse(&[&format!("{source}:a=1")]).is_err(), "{source}");
        }
        for labels in [&["k8s:a=1", "k8s:a=2"], &["k8s:a", "k8s:a=2"]] {
            let why = format!("{:?}", parse(labels).expect_err("two values"));
            assert!(why.contains("two values of one label"), "{why}");
        }
    }
}
