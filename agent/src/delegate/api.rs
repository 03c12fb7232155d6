//! The API in delegated mode.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc};

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use wharf_api::{
    AgentConfigView, DeleteQuery, DeleteResult, Endpoint, EndpointCreate, EndpointHealth, EndpointState, ErrorCode,
    Finding, GcRequest, Health, SelfCheck, SettingOrigin, StatusQuery,
};
use wharf_core::ids::{Attachment, NetworkName, RuntimeName};
use wharf_delegate::v1;

use crate::{
    config::effective,
    delegate::{
        Delegation,
        answer::{Failed, Made, UNKNOWN_CONTAINER},
        service::CallError,
        work::{Deleted, WorkError},
    },
    endpoint::create::External,
    metrics::Format,
    rest::{
        body,
        command::{self, Deferred},
        endpoint::Caller,
        error::{Answer, Body, Failure, Query, Segment},
        id::{self, IdRef},
        late, operation,
        parse::create_spec,
        status,
    },
};

/// Bytes.
const MAX_BODY: usize = 2 * 1024 * 1024;

/// All routes.
pub fn router(this: &Arc<Delegation>) -> Router {
    use axum::routing::{get, post, put};
    Router::new()
        .route("/v1/healthz", get(healthz))
        .route("/metrics", get(prometheus))
        .route("/v1/config", get(config))
        .route("/v1/endpoint/{id}", put(add).get(look).delete(remove))
        .route("/v1/endpoint/{id}/healthz", get(health))
        .route("/v1/gc", post(gc))
        .fallback(unsupported_route)
        .method_not_allowed_fallback(unsupported_route)
        .layer(axum::middleware::from_fn_with_state((Arc::clone(&this.commands), None), command::measure))
        .layer(axum::middleware::from_fn(late::refuse))
        .layer(axum::middleware::from_fn(operation::follow_delegated))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(axum::middleware::from_fn_with_state(Arc::<body::Bodies>::default(), body::hold))
        .with_state(Arc::clone(this))
}

/// For the TCP listener.
pub fn metrics_router(this: &Arc<Delegation>) -> Router {
    Router::new().route("/metrics", axum::routing::get(prometheus)).with_state(Arc::clone(this))
}

/// Routes about the agent's own network.
async fn unsupported_route(State(this): State<Arc<Delegation>>, request: Request) -> Failure {
    let path: String = request.uri().path().chars().take(200).collect();
    let message = format!(
        "{} {path}: this agent has none of it: the network of this node's containers is made by the service at {}",
        request.method(),
        this.service.socket().display()
    );
    Failure::new(ErrorCode::Unsupported, message)
        .hint("ask that service; the page \"Delegated mode\" of the documentation (/usr/share/doc/wharf) lists what a delegated agent answers")
}

async fn healthz(State(this): State<Arc<Delegation>>, Query(query): Query<StatusQuery>) -> Response {
    this.look().await.ok();
    status::answer(this.status(), query)
}

async fn prometheus(State(this): State<Arc<Delegation>>, headers: HeaderMap) -> impl IntoResponse {
    let format = Format::accepted(headers.get(header::ACCEPT).and_then(|types| types.to_str().ok()));
    let text = this.metrics.encode(format, &this.status(), &[], &this.tasks.controllers.runs(), 0, None);
    ([(header::CONTENT_TYPE, format.content_type())], text)
}

async fn config(State(this): State<Arc<Delegation>>) -> Json<AgentConfigView> {
    let effective = effective(&this.config);
    let origin_of = |name: &String| this.config.origins.get(name).copied().unwrap_or(SettingOrigin::Default);
    let origin: BTreeMap<String, SettingOrigin> = effective.keys().map(|n| (n.clone(), origin_of(n))).collect();
    Json(AgentConfigView { effective, mutable: Vec::new(), origin })
}

async fn add(
    State(this): State<Arc<Delegation>>,
    Segment(text): Segment,
    Caller(runtime): Caller,
    Body(mut body): Body<EndpointCreate>,
) -> Answer<(StatusCode, Json<Endpoint>)> {
    body.runtime = body.runtime.or(runtime);
    let spec = create_spec(&text, body)?;
    accepts_work(&this, "create endpoint")?;
    let what = format!("create endpoint {}", spec.attachment);
    if spec.external == Some(External::Chain) {
        let message =
            format!("{what}: another plugin made the interface (prevResult), and the service makes it itself");
        return Err(Failure::new(ErrorCode::InvalidRequest, message)
            .hint("put wharf-cni first in the list of plugins, or run the agent without --delegate"));
    }
    let made = this.add(spec).await.map_err(|e| failure(&what, &e))?;
    Ok((StatusCode::CREATED, Json(endpoint(&made))))
}

async fn look(State(this): State<Arc<Delegation>>, Segment(text): Segment) -> Answer<Json<Endpoint>> {
    let seen = this.check(named(&text)?).await.map_err(|e| failure(&format!("look at endpoint {text}"), &e))?;
    Ok(Json(endpoint(&seen.made)))
}

async fn health(State(this): State<Arc<Delegation>>, Segment(text): Segment) -> Answer<Json<EndpointHealth>> {
    let seen = this.check(named(&text)?).await.map_err(|e| failure(&format!("look at endpoint {text}"), &e))?;
    let owner = seen.made.attachment.to_string();
    let findings: Vec<Finding> = seen
        .findings
        .into_iter()
        .map(|problem| Finding {
            object: "attachment".to_owned(),
            subject: owner.clone(),
            problem,
            owner: Some(owner.clone()),
            ..Finding::default()
        })
        .collect();
    let connected = if findings.is_empty() { Health::Ok } else { Health::Failing };
    Ok(Json(EndpointHealth {
        overall: connected,
        bpf: Health::Pending,
        policy: Health::Pending,
        connected,
        findings,
        desired_revision: 0,
        realized_revision: 0,
        self_check: SelfCheck::default(),
    }))
}

async fn remove(
    State(this): State<Arc<Delegation>>,
    Segment(text): Segment,
    Query(query): Query<DeleteQuery>,
) -> Answer<Response> {
    let DeleteQuery { container_id, no_ip_release, network, epoch } = query;
    let what = format!("delete endpoint {text}");
    if container_id.is_some() || epoch.is_some() || no_ip_release == Some(true) {
        let rule = "container-id, epoch and no-ip-release are about endpoints that the agent made";
        return Err(invalid(format!("{what}: {rule}")));
    }
    let Some(network) = network else {
        return Err(invalid(format!("{what}: network=NAME is required, because the service is told the network too")));
    };
    let v1::AttachmentKey { container_id, interface, .. } = named(&text)?;
    let bad = |e| invalid(format!("{what}: {e}"));
    let attachment = Attachment {
        network: NetworkName::parse(&network).map_err(bad)?,
        container_id: container_id.parse().map_err(bad)?,
        ifname: interface.parse().map_err(bad)?,
    };
    accepts_work(&this, "delete endpoint")?;
    match this.del(attachment).await {
        Ok(Deleted::Done) => Ok(Json(DeleteResult::default()).into_response()),
        Ok(Deleted::Deferred) => {
            let result = DeleteResult { deferred: true, ..DeleteResult::default() };
            Ok((Extension(Deferred), Json(result)).into_response())
        }
        Ok(Deleted::Unknown) => {
            Err(Failure::new(ErrorCode::NotFound, format!("{what}: the service knows no such attachment")))
        }
        Err(error) => Err(failure(&what, &error)),
    }
}

async fn gc(State(this): State<Arc<Delegation>>, Body(body): Body<GcRequest>) -> Answer<Json<DeleteResult>> {
    let what = "collect garbage";
    let bad = |e| invalid(format!("{what}: {e}"));
    let network = NetworkName::parse(&body.network).map_err(bad)?;
    let runtime = body.runtime.as_deref().map(RuntimeName::parse).transpose().map_err(bad)?;
    let valid = body.valid.into_iter().map(|a| {
        Ok(Attachment {
            network: network.clone(),
            container_id: a.container_id.parse().map_err(bad)?,
            ifname: a.ifname.parse().map_err(bad)?,
        })
    });
    let valid = valid.collect::<Answer<Vec<_>>>()?;
    accepts_work(&this, what)?;
    let removed = this.collect(&network, &valid, runtime.as_ref()).await.map_err(|e| failure(what, &e))?;
    tracing::info!(network = network.as_str(), removed, "the service collected garbage");
    Ok(Json(DeleteResult::default()))
}

/// The path lacks the network.
fn named(text: &str) -> Answer<v1::AttachmentKey> {
    match id::parse(text)? {
        IdRef::Attachment(container_id, ifname) => Ok(v1::AttachmentKey {
            network: String::new(),
            container_id: container_id.to_string(),
            interface: ifname.to_string(),
        }),
        _ => {
            let text: String = text.chars().take(80).collect();
            let rule =
                "a delegated agent keeps no table of endpoints; name the attachment: cni-attachment-id:ID:IFNAME";
            Err(invalid(format!("find endpoint {text}: {rule}")))
        }
    }
}

fn invalid(message: String) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, message)
}

/// Refuses work before the previous agent's records are read, and at a stop.
fn accepts_work(this: &Delegation, what: &str) -> Answer<()> {
    if this.serves() {
        return Ok(());
    }
    let state = if this.tasks.stop.is_cancelled() { "stopping" } else { "starting" };
    Err(Failure::new(ErrorCode::Unavailable, format!("{what}: the agent is {state}")).retry(200))
}

const SEE_STATUS: &str = "see why the service of the agent's setting `delegate` does not answer: `wharf status`";

fn failure(what: &str, error: &WorkError) -> Failure {
    let says = |code| Failure::new(code, format!("{error} ({what})"));
    match error {
        WorkError::Call(call) => of_call(what, call),
        WorkError::DeletePending(why) => match &**why {
            WorkError::Call(call) if call.is_away() => says(ErrorCode::Unavailable).hint(SEE_STATUS),
            _ => says(ErrorCode::Busy).retry(1_000),
        },
        WorkError::CollectPending(_) => says(ErrorCode::Busy).retry(1_000),
        WorkError::Overloaded(refusal) => says(ErrorCode::Overloaded).retry(refusal.retry_after_ms),
        WorkError::Records(_) => says(ErrorCode::Store),
        WorkError::Deadline(_) => says(ErrorCode::DeadlineExceeded),
        WorkError::Stopping => says(ErrorCode::Unavailable).retry(200),
        WorkError::Busy(_) => says(ErrorCode::Overloaded).retry(1_000),
    }
}

fn of_call(what: &str, error: &CallError) -> Failure {
    let says = |code| Failure::new(code, format!("{error} ({what})"));
    match error {
        CallError::Unreachable { .. } | CallError::Broken { .. } => says(ErrorCode::Unavailable).hint(SEE_STATUS),
        CallError::Stopping { .. } => says(ErrorCode::Unavailable),
        CallError::TimedOut { .. } => says(ErrorCode::DeadlineExceeded).hint(SEE_STATUS),
        CallError::Unimplemented { .. } => {
            says(ErrorCode::Unsupported).hint("name the service's socket in the agent's setting `delegate`")
        }
        CallError::Status { .. } | CallError::Unusable { .. } => {
            says(ErrorCode::Delegate).hint("this is a fault of the service; its log may tell more")
        }
        CallError::Failed(Failed { code, message: _, details, retry_after_ms }) => {
            let mut answer = says(match (*code, retry_after_ms) {
                (_, Some(_)) => ErrorCode::Busy,
                (UNKNOWN_CONTAINER, None) => ErrorCode::NotFound,
                _ => ErrorCode::Delegate,
            });
            answer.0.cni_code = NonZeroU32::new(*code);
            answer.0.hint = (!details.is_empty()).then(|| details.clone());
            answer.0.retry_after_ms = retry_after_ms.map(u64::from);
            answer
        }
    }
}

fn endpoint(made: &Made) -> Endpoint {
    let Made { attachment, netns, container, host, v4, v6, routes, dns } = made;
    let mac = |link: crate::delegate::answer::Link| link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    let v4_of = |ip| if let std::net::IpAddr::V4(ip) = ip { Some(ip) } else { None };
    let v6_of = |ip| if let std::net::IpAddr::V6(ip) = ip { Some(ip) } else { None };
    Endpoint {
        mode: wharf_api::EndpointMode::Own,
        id: 0,
        epoch: 0,
        state: EndpointState::Ready,
        container_id: attachment.container_id.to_string(),
        ifname: attachment.ifname.to_string(),
        network: attachment.network.to_string(),
        identity: 0,
        labels: Vec::new(),
        ipv4: v4.and_then(|a| v4_of(a.net.addr())),
        ipv6: v6.and_then(|a| v6_of(a.net.addr())),
        ifindex: 0,
        host_ifname: host.as_ref().map(|(name, _)| name.to_string()).unwrap_or_default(),
        container_mac: mac(*container),
        host_mac: host.as_ref().map(|(_, link)| mac(*link)).unwrap_or_default(),
        gateway4: v4.and_then(|a| v4_of(a.gateway?)),
        gateway6: v6.and_then(|a| v6_of(a.gateway?)),
        mtu: container.mtu,
        pool: String::new(),
        ipam: None,
        routes: Some(routes.clone()),
        netns: netns.display().to_string(),
        pod_name: None,
        pod_namespace: None,
        runtime: None,
        created_unix_ms: 0,
        ports: Vec::new(),
        ports_off: false,
        masquerade: None,
        bandwidth: wharf_api::Bandwidth::default(),
        source_prefixes: Vec::new(),
        policy_enforcement: wharf_api::Enforcement::Default,
        named_ports: BTreeMap::new(),
        delegated: Some(Box::new(wharf_api::DelegatedEndpoint {
            prefix4: v4.map(|a| a.net.prefix_len()),
            prefix6: v6.map(|a| a.net.prefix_len()),
            dns: dns.clone(),
        })),
        status: wharf_api::EndpointStatus::default(),
    }
}
