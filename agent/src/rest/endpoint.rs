//! `/v1/endpoint`.

use std::{collections::BTreeMap, convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{FromRequestParts, State},
    http::{StatusCode, request::Parts},
};
use tokio::sync::oneshot;
use wharf_api::{
    ApiError, COMMAND_HEADER, DeleteQuery, DeleteResult, Endpoint, EndpointConfigView, EndpointCreate, EndpointFilter,
    EndpointHealth, EndpointLabels, EndpointLogEntry, EndpointPatch, ErrorCode, Health, SelfCheck,
};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    finding::{Problem, Verdict, verdict},
    identity::Label,
    identity_allocator::security_relevant,
    ids::{ContainerId, NetworkName},
    kernel::ConfigSpec,
    plan::DeleteOptions,
};
use wharf_handover::command::Command as CniCommand;
use wharf_kit::serve::Peer;

use crate::{
    endpoint::{build, create, delete, look, unknown},
    explain, findings,
    node::{
        Node,
        aside::Wanted,
        endpoint::{Command, Done, Handle, View, api_endpoint},
        health,
        looks::Purpose,
        self_checks::Lane,
    },
    rest::{
        early::Restored,
        error::{Answer, Body, Failure, Query, Segment, invalid},
        id::{self, IdRef},
        parse::{create_spec, parse_edit},
    },
    selfcheck::Checker,
};

/// A build takes some ten milliseconds, longer behind others. CHECK waits at most 10 s.
const BUILD_PATIENCE: Duration = Duration::from_secs(5);

/// Endpoints that match every filter, by id.
#[utoipa::path(get, path = "/v1/endpoint", tag = "endpoint", params(EndpointFilter),
    responses((status = 200, body = [Endpoint]), (status = 400, body = ApiError), (status = 503, body = ApiError)))]
pub async fn list(Restored(node): Restored, Query(filter): Query<EndpointFilter>) -> Answer<Json<Vec<Endpoint>>> {
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
    let mut fitting = node.life.endpoints.registry.list();
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
    responses((status = 200, body = Endpoint), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 503, body = ApiError)))]
pub async fn get(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<Endpoint>> {
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

/// Changes or regenerates an endpoint. Answers when the change is realized.
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
                "change endpoint {}: labels, policy and source prefixes of the health endpoint are the agent's own",
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
        Ok(there) if node.life.endpoints.registry.is_leaving(&there) => {
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
    let all = node.life.endpoints.registry.list();
    let fits = |h: &Handle| {
        h.shared.read(|v| {
            let a = &v.record.attachment;
            a.container_id == container
                && !health::is_reserved(a)
                && query.network.as_ref().is_none_or(|n| a.network.as_str() == n)
        })
    };
    let handles: Vec<Handle> =
        all.into_iter().filter(|h| fits(h) && !node.life.endpoints.registry.is_leaving(h)).collect();
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
    responses((status = 200, body = [EndpointLogEntry]), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 503, body = ApiError)))]
pub async fn log(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<Vec<EndpointLogEntry>>> {
    Ok(Json(handle(&node, &text)?.shared.log_lines()))
}

/// Lane of test packets: CHECK does not wait for other clients.
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
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn health(
    Restored(node): Restored,
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

/// An endpoint's labels, and the labels of its identity.
#[utoipa::path(get, path = "/v1/endpoint/{id}/labels", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointLabels), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 503, body = ApiError)))]
pub async fn labels(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<EndpointLabels>> {
    Ok(Json(handle(&node, &text)?.shared.read(|v| EndpointLabels {
        labels: v.record.labels.iter().map(ToString::to_string).collect(),
        security_relevant: security_relevant(&v.record.labels).iter().map(ToString::to_string).collect(),
        identity: v.record.identity.0,
    })))
}

/// The desired configuration row and the kernel's.
#[utoipa::path(get, path = "/v1/endpoint/{id}/config", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointConfigView), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn config(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<EndpointConfigView>> {
    let view = handle(&node, &text)?.shared.view();
    let desired =
        desired(&build::desired_config(&node.life.config, &node.life.telemetry.trace_all, &view.record, view.trace));
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
        sources,
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
        ("sources", sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")),
    ];
    rows.map(|(name, value)| (name.to_owned(), value)).into()
}

fn handle(node: &Node, text: &str) -> Answer<Handle> {
    match id::find(&node.life.endpoints.registry, &id::parse(text)?, text) {
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
    Err(is_not_serving(node, what))
}

/// Error of a starting or stopping agent.
pub fn is_not_serving(node: &Node, what: &str) -> Failure {
    let state = if node.life.tasks.stop.is_cancelled() { "stopping" } else { "starting" };
    Failure::new(ErrorCode::Unavailable, format!("{what}: the agent is {state}")).retry(200)
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

/// Container runtime from a CNI command's header; an older plugin's body takes precedence.
pub struct Caller(pub Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let command =
            parts.headers.get(COMMAND_HEADER).and_then(|header| CniCommand::of_header(header.as_bytes()).ok());
        Ok(Self(command.map(|(command, _)| command.runtime).filter(|runtime| !runtime.is_empty())))
    }
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
}
