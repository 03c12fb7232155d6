//! Client of the agent's REST API: HTTP/1 over the unix socket, one connection for each request.
//!
//! Without a pool, a client survives a restart of the agent. Without background tasks, dropping a call's future closes
//! its connection, and the agent sees that the caller gave up.
mod absent;
mod error;
mod exchange;
mod monitor;
mod policy;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
mod tests;

use std::{
    fmt::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use hyper::{Method, StatusCode, header::HeaderValue};
use serde::{Serialize, de::DeserializeOwned};

pub use self::{absent::why_agent_is_away, error::ClientError, exchange::MAX_RESPONSE_BYTES, monitor::Monitor};
use crate::{
    AgentConfigPatch, AgentConfigView, AgentStatus, ApiError, AuditReport, BpfMap, BpfMapDump, ClusterPods,
    ClusterPodsQuery, ClusterView, DeleteQuery, DeleteResult, Endpoint, EndpointConfigView, EndpointCreate,
    EndpointFilter, EndpointHealth, EndpointLabels, EndpointLogEntry, EndpointPatch, FlowList, FlowQuery, FlowState,
    FlowsRemoved, GcRequest, HealthReport, IpamAllocate, IpamAllocation, IpamView, MetricRow,
};

/// Default time limit of a call, including the connection.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// A client of the agent behind one socket. Cheap to clone.
///
/// Each method documents the API errors of its operation; [`ClientError`] lists the others. Endpoint ids are numbers,
/// or names prefixed with `container-id:`, `cni-attachment-id:`, `pod-name:`, `ipv4:` or `ipv6:`; the client escapes
/// them.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
    command: Option<HeaderValue>,
}

impl Client {
    /// A client for `socket`. Does not connect.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: DEFAULT_TIMEOUT, command: None }
    }

    /// Sets the time limit of each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sends [`crate::COMMAND_HEADER`] with each request, unless `command` is invalid in a header.
    #[must_use]
    pub fn with_command(mut self, command: &str) -> Self {
        self.command = HeaderValue::from_str(command).ok();
        self
    }

    /// The agent's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET /v1/healthz`. A 503 with a status is a success: see [`AgentStatus::serving`].
    pub async fn status(&self) -> Result<AgentStatus, ClientError> {
        self.status_of(false).await
    }

    /// [`Self::status`], optionally with all endpoint controllers.
    pub async fn status_of(&self, all_controllers: bool) -> Result<AgentStatus, ClientError> {
        let mut query = Query::default();
        query.add("all-controllers", all_controllers.then_some("true"));
        let call = Call::new(Method::GET, query.after("/v1/healthz".into()));
        let (status, body) = self.exchange(&call, None).await?;
        if status == StatusCode::SERVICE_UNAVAILABLE
            && let Ok(parsed) = serde_json::from_slice(&body)
        {
            return Ok(parsed);
        }
        call.parse(status, &body)
    }

    /// `GET /v1/config`.
    pub async fn config(&self) -> Result<AgentConfigView, ClientError> {
        self.get("/v1/config".into()).await
    }

    /// `PATCH /v1/config`. Errors: 400: invalid value.
    pub async fn patch_config(&self, patch: &AgentConfigPatch) -> Result<AgentConfigView, ClientError> {
        self.send(Method::PATCH, "/v1/config".into(), patch).await
    }

    /// `GET /v1/endpoint`: the endpoints that match every filter.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn endpoints(&self, filter: &EndpointFilter) -> Result<Vec<Endpoint>, ClientError> {
        // Destructured: a new filter fails to compile here.
        let EndpointFilter { container_id, network, state, label, pod_name } = filter;
        let mut query = Query::default();
        query.add("container-id", container_id.as_deref());
        query.add("network", network.as_deref());
        let state = state.map(|s| serde_json::to_value(s).unwrap_or_default());
        query.add("state", state.as_ref().and_then(|s| s.as_str()));
        query.add("label", label.as_deref());
        query.add("pod-name", pod_name.as_deref());
        self.get(query.after("/v1/endpoint".into())).await
    }

    /// `GET /v1/endpoint/{id}`. An id, here and below, is a number, or a name prefixed with `container-id:`,
    /// `cni-attachment-id:`, `pod-name:`, `ipv4:` or `ipv6:`. The client escapes it, so any text is allowed.
    ///
    /// # Errors
    /// See [`ClientError`]; 404: no such endpoint.
    pub async fn endpoint(&self, id: &str) -> Result<Endpoint, ClientError> {
        self.get(endpoint_path(id, "")).await
    }

    /// `PUT /v1/endpoint/{id}`; answers when ready. Errors: 400: invalid; 409: exists; 429: overload.
    pub async fn put_endpoint(&self, id: &str, create: &EndpointCreate) -> Result<Endpoint, ClientError> {
        self.send(Method::PUT, endpoint_path(id, ""), create).await
    }

    /// `PATCH /v1/endpoint/{id}`; answers when done.
    pub async fn patch_endpoint(&self, id: &str, patch: &EndpointPatch) -> Result<Endpoint, ClientError> {
        self.send(Method::PATCH, endpoint_path(id, ""), patch).await
    }

    /// `DELETE /v1/endpoint/{id}`. Both 200 and 206 are success; after a 206 [`DeleteResult::errors`] lists the
    /// failed steps.
    ///
    /// # Errors
    /// See [`ClientError`]; 404: no such endpoint.
    pub async fn delete_endpoint(&self, id: &str, query: &DeleteQuery) -> Result<DeleteResult, ClientError> {
        self.delete(delete_query(query).after(endpoint_path(id, ""))).await
    }

    /// `DELETE /v1/endpoint?container-id=…`; ignores `query.container_id`.
    pub async fn delete_container(&self, container_id: &str, query: &DeleteQuery) -> Result<DeleteResult, ClientError> {
        let query = DeleteQuery { container_id: Some(container_id.to_owned()), ..query.clone() };
        self.delete(delete_query(&query).after("/v1/endpoint".into())).await
    }

    /// `GET /v1/endpoint/{id}/log`.
    pub async fn endpoint_log(&self, id: &str) -> Result<Vec<EndpointLogEntry>, ClientError> {
        self.get(endpoint_path(id, "/log")).await
    }

    /// `GET /v1/endpoint/{id}/healthz`: inspects the kernel.
    pub async fn endpoint_health(&self, id: &str) -> Result<EndpointHealth, ClientError> {
        self.get(endpoint_path(id, "/healthz")).await
    }

    /// `GET /v1/endpoint/{id}/labels`.
    pub async fn endpoint_labels(&self, id: &str) -> Result<EndpointLabels, ClientError> {
        self.get(endpoint_path(id, "/labels")).await
    }

    /// `GET /v1/endpoint/{id}/config`: desired and realized settings.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn endpoint_config(&self, id: &str) -> Result<EndpointConfigView, ClientError> {
        self.get(endpoint_path(id, "/config")).await
    }

    /// `GET /v1/explain/{subject}`. Errors: 400: invalid text.
    pub async fn explain(&self, subject: &str) -> Result<crate::Explanation, ClientError> {
        self.get(format!("/v1/explain/{}", escaped(subject))).await
    }

    /// `GET /v1/log`: the last lines of the agent's log.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn log(&self) -> Result<crate::AgentLog, ClientError> {
        self.get("/v1/log".into()).await
    }

    /// `GET /v1/ipam`: pools and leases.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn ipam(&self) -> Result<IpamView, ClientError> {
        self.get("/v1/ipam".into()).await
    }

    /// `GET /v1/cluster`: the cluster's nodes, and this node's routes to their containers.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cluster(&self) -> Result<ClusterView, ClientError> {
        self.get("/v1/cluster".into()).await
    }

    /// `GET /v1/cluster/pods`: the pods of the cluster feed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cluster_pods(&self, query: &ClusterPodsQuery) -> Result<ClusterPods, ClientError> {
        let ClusterPodsQuery { namespace, node, limit } = query;
        let mut out = Query::default();
        out.add("namespace", namespace.as_deref());
        out.add("node", node.as_deref());
        out.add("limit", limit.map(|n| n.to_string()).as_deref());
        self.get(out.after("/v1/cluster/pods".into())).await
    }

    /// `POST /v1/ipam`: leases an address of each requested family, all or none. Errors: exhausted or unknown pool.
    pub async fn allocate_ip(&self, allocate: &IpamAllocate) -> Result<IpamAllocation, ClientError> {
        self.send(Method::POST, "/v1/ipam".into(), allocate).await
    }

    /// `POST /v1/ipam/{ip}?owner=…`: leases an address of the default pool. Errors: 400: in no pool; 409: leased.
    pub async fn allocate_exact(&self, ip: IpAddr, owner: &str) -> Result<IpamAllocation, ClientError> {
        let mut query = Query::default();
        query.add("owner", Some(owner));
        let call = Call::new(Method::POST, query.after(format!("/v1/ipam/{ip}")));
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    /// `DELETE /v1/ipam/{ip}`: releases a lease, if any. Errors: 409: lease of a live endpoint.
    pub async fn release_ip(&self, ip: IpAddr) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, format!("/v1/ipam/{ip}"));
        let (status, body) = self.exchange(&call, None).await?;
        if status.is_success() { Ok(()) } else { Err(call.failed(status, &body)) }
    }

    /// `GET /v1/health`: the last probes.
    pub async fn health(&self) -> Result<HealthReport, ClientError> {
        self.get("/v1/health".into()).await
    }

    /// `POST /v1/health/probe`: probes now. Errors: 429: too many requests; 503: turned off, or launching.
    pub async fn probe_health(&self) -> Result<HealthReport, ClientError> {
        let call = Call::new(Method::POST, "/v1/health/probe".into());
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    /// `GET /v1/map`: every BPF map with its fill.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn maps(&self) -> Result<Vec<BpfMap>, ClientError> {
        self.get("/v1/map".into()).await
    }

    /// `GET /v1/map/{name}`. Errors: 404.
    pub async fn map(&self, name: &str) -> Result<BpfMapDump, ClientError> {
        self.get(format!("/v1/map/{}", escaped(name))).await
    }

    /// `GET /v1/bpf/ct`. Errors: 404: no such endpoint.
    pub async fn flows(&self, query: &FlowQuery) -> Result<FlowList, ClientError> {
        self.get(flow_query(query).after("/v1/bpf/ct".into())).await
    }

    /// `DELETE /v1/bpf/ct`; live flows restart as new. Errors: 400: neither a filter nor `all`.
    pub async fn remove_flows(&self, query: &FlowQuery) -> Result<FlowsRemoved, ClientError> {
        let call = Call::new(Method::DELETE, flow_query(query).after("/v1/bpf/ct".into()));
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    /// `GET /v1/metrics`: packet counters.
    pub async fn metrics_rows(&self) -> Result<Vec<MetricRow>, ClientError> {
        self.get("/v1/metrics".into()).await
    }

    /// `GET /v1/audit`, or `POST` for `repair`.
    pub async fn audit(&self, repair: bool) -> Result<AuditReport, ClientError> {
        let method = if repair { Method::POST } else { Method::GET };
        let call = Call::new(method, "/v1/audit".into());
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    /// `POST /v1/gc`: deletes the attachments that the runtime no longer lists.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn gc(&self, request: &GcRequest) -> Result<DeleteResult, ClientError> {
        self.send(Method::POST, "/v1/gc".into(), request).await
    }

    /// `GET /v1/monitor`: events from now on. The time limit covers only the start.
    pub async fn monitor(&self) -> Result<Monitor, ClientError> {
        Monitor::open(self, Call::new(Method::GET, "/v1/monitor".into())).await
    }

    async fn get<T: DeserializeOwned>(&self, path: String) -> Result<T, ClientError> {
        let call = Call::new(Method::GET, path);
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    async fn delete(&self, path: String) -> Result<DeleteResult, ClientError> {
        let call = Call::new(Method::DELETE, path);
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    async fn send<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: String,
        body: &B,
    ) -> Result<T, ClientError> {
        let call = Call::new(method, path);
        let body =
            serde_json::to_vec(body).map_err(|e| call.protocol(format!("the request cannot be written: {e}")))?;
        let (status, body) = self.exchange(&call, Some(body)).await?;
        call.parse(status, &body)
    }
}

/// Method and path of a request.
#[derive(Debug, Clone)]
struct Call {
    method: Method,
    path: String,
}

impl Call {
    fn new(method: Method, path: String) -> Self {
        Self { method, path }
    }

    fn operation(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    fn protocol(&self, reason: String) -> ClientError {
        ClientError::Protocol { operation: self.operation(), reason }
    }

    fn parse<T: DeserializeOwned>(&self, status: StatusCode, body: &[u8]) -> Result<T, ClientError> {
        if !status.is_success() {
            return Err(self.failed(status, body));
        }
        serde_json::from_slice(body).map_err(|e| self.protocol(format!("the answer is not what was asked for: {e}")))
    }

    fn failed(&self, status: StatusCode, body: &[u8]) -> ClientError {
        match serde_json::from_slice::<ApiError>(body) {
            Ok(error) => ClientError::Api { operation: self.operation(), status: status.as_u16(), error },
            Err(_) => self.protocol(format!("answered {status}, not as the agent does: {:?}", excerpt(body))),
        }
    }
}

/// The first 120 characters.
fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(body.get(..480).unwrap_or(body)).chars().take(120).collect()
}

fn endpoint_path(id: &str, part: &str) -> String {
    format!("/v1/endpoint/{}{part}", escaped(id))
}

fn delete_query(query: &DeleteQuery) -> Query {
    let DeleteQuery { container_id, no_ip_release, network, epoch } = query;
    let mut out = Query::default();
    out.add("container-id", container_id.as_deref());
    out.add("no-ip-release", no_ip_release.map(|keep| keep.to_string()).as_deref());
    out.add("network", network.as_deref());
    out.add("epoch", epoch.map(|e| e.to_string()).as_deref());
    out
}

fn flow_query(query: &FlowQuery) -> Query {
    let FlowQuery { endpoint, address, port, protocol, state, limit, all } = query;
    let mut out = Query::default();
    out.add("endpoint", endpoint.as_deref());
    out.add("address", address.map(String::from).as_deref());
    out.add("port", port.map(|p| p.to_string()).as_deref());
    out.add("protocol", protocol.map(String::from).as_deref());
    out.add("state", state.map(FlowState::as_str));
    out.add("limit", limit.map(|n| n.to_string()).as_deref());
    out.add("all", all.map(|a| a.to_string()).as_deref());
    out
}

#[derive(Debug, Default)]
struct Query(String);

impl Query {
    fn add(&mut self, key: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.0.push(if self.0.is_empty() { '?' } else { '&' });
            self.0.push_str(key);
            self.0.push('=');
            self.0.push_str(&escaped(value));
        }
    }

    fn after(self, path: String) -> String {
        path + &self.0
    }
}

/// Percent-encodes text as one path segment or query value (RFC 3986); keeps `:`.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b':') {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}
