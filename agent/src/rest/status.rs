//! `/v1/healthz`, `/metrics`, `/v1/metrics`: what `wharf status` shows.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
};
use wharf_api::{
    AgentStatus, ApiError, BpfMap, ComponentStatus, Health, KernelStatus, MetricRow, PreparedStatus, ProxyStatus,
    QuarantinedRecord,
};
use wharf_common::DropReason;
use wharf_core::{
    kernel::{CounterRow, Kernel as _, MapInfo},
    state::State as EndpointState,
};

use crate::{
    endpoint::create::kernel_error,
    rest::{LinuxNode, error::Answer, ipam::pools},
    stuck,
    sync::lock,
};

/// The agent's status: 200 while it serves, 503 otherwise, the same body either way.
#[utoipa::path(get, path = "/v1/healthz", tag = "agent",
    responses((status = 200, body = AgentStatus), (status = 503, body = AgentStatus)))]
pub async fn healthz(State(node): State<Arc<LinuxNode>>) -> (StatusCode, Json<AgentStatus>) {
    let status = status(&node).await;
    let code = if status.serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(status))
}

/// Every counter of every endpoint that is not zero, and the totals of those that are gone.
#[utoipa::path(get, path = "/v1/metrics", tag = "bpf",
    responses((status = 200, body = [MetricRow]), (status = 500, body = ApiError)))]
pub async fn rows(State(node): State<Arc<LinuxNode>>) -> Answer<Json<Vec<MetricRow>>> {
    Ok(Json(verdicts(&node).await?))
}

/// Prometheus metrics.
#[utoipa::path(get, path = "/metrics", tag = "agent",
    responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub async fn prometheus(State(node): State<Arc<LinuxNode>>) -> Answer<impl IntoResponse> {
    let (status, verdicts) = (status(&node).await, verdicts(&node).await?);
    let text = node.metrics.encode(&status, &verdicts);
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text))
}

async fn verdicts(node: &LinuxNode) -> Answer<Vec<MetricRow>> {
    let past = lock(&node.past_counters).clone();
    let mut rows: Vec<MetricRow> = past
        .into_iter()
        .map(|((direction, reason), (packets, bytes))| row(None, CounterRow { direction, reason, packets, bytes }))
        .collect();
    for handle in node.registry.list() {
        match node.kernel.observe_counters(handle.id).await {
            Ok(counters) => rows.extend(counters.into_iter().map(|c| row(Some(handle.id.get()), c))),
            // It went away between the list and the look.
            Err(e) if e.kind == wharf_core::kernel::KernelErrorKind::NotFound => {}
            Err(e) => return Err(kernel_error(&e).into()),
        }
    }
    Ok(rows)
}

fn row(endpoint: Option<u16>, c: CounterRow) -> MetricRow {
    let dropped = DropReason::ALL.iter().any(|r| r.as_str() == c.reason && r.is_drop());
    MetricRow { endpoint, direction: c.direction, reason: c.reason, dropped, packets: c.packets, bytes: c.bytes }
}

/// A map in the API's words.
#[must_use]
pub fn api_map(m: MapInfo) -> BpfMap {
    BpfMap {
        name: m.name,
        kind: m.kind,
        entries: m.entries,
        max_entries: m.max_entries,
        memlock_bytes: m.memlock_bytes,
    }
}

/// The shared maps as they are, and one row for all endpoints' maps of a name (`*/CONFIG`): a screen stays a screen
/// with a thousand endpoints. `GET /v1/map` has them one by one.
fn summary(maps: Vec<MapInfo>) -> Vec<BpfMap> {
    let (mut rows, mut sums) = (Vec::new(), BTreeMap::<String, BpfMap>::new());
    for map in maps {
        let Some((_, name)) = map.name.split_once('/') else {
            rows.push(api_map(map));
            continue;
        };
        let name = format!("*/{name}");
        let sum = sums.entry(name.clone()).or_insert_with(|| BpfMap {
            name,
            kind: map.kind,
            entries: Some(0),
            max_entries: u64::from(wharf_common::MAX_ENDPOINT_ID),
            memlock_bytes: 0,
        });
        sum.entries = sum.entries.map(|n| n + 1);
        sum.memlock_bytes += map.memlock_bytes;
    }
    rows.extend(sums.into_values());
    rows
}

async fn status(node: &LinuxNode) -> AgentStatus {
    let serving = node.serving.load(Ordering::Acquire) && !node.stop.is_cancelled();
    let mut endpoints: BTreeMap<String, u64> = BTreeMap::new();
    let mut failing = Vec::new();
    for handle in node.registry.list() {
        let (state, error) = handle.shared.read(|v| (v.fsm.state, v.status.last_error.is_some()));
        *endpoints.entry(state.as_str().to_owned()).or_default() += 1;
        let stuck = handle.shared.read(|v| state == EndpointState::Disconnecting && !v.status.waits_for.is_empty());
        if error || stuck {
            failing.push(handle.id.to_string());
        }
    }
    let (bpf_maps, datapath) = match node.kernel.observe_maps().await {
        Ok(maps) => (summary(maps), component("datapath", Health::Ok, node.kernel.features().attach_mode.to_string())),
        Err(e) => (Vec::new(), component("datapath", Health::Failing, e.to_string())),
    };
    let controllers = node.controllers.list();
    let ipam = pools(node);
    let full: Vec<String> =
        ipam.iter().filter(|p| p.used >= p.total).map(|p| format!("{} {}", p.name, family(p.family))).collect();
    let stats = node.store.stats();
    let (commits, failures) = (stats.commits.load(Ordering::Relaxed), stats.failures.load(Ordering::Relaxed));
    let of = |bad: bool, worse: Health| if bad { worse } else { Health::Ok };
    let failed_controllers: Vec<&str> =
        controllers.iter().filter(|c| c.consecutive_failures > 0).map(|c| c.name.as_str()).collect();
    let (deletion_queue, queue_health, queue_message) = node.deletions.status();
    let stuck = stuck::stuck(node);
    let quarantined = quarantined(node);
    let lost = lock(&node.orphans).len();
    let admission = node.gate.status();
    let audit_findings = *lock(&node.audit_findings);
    let mut components = vec![
        component(
            "agent",
            of(!serving, Health::Pending),
            if serving {
                "serving"
            } else if node.stop.is_cancelled() {
                "stopping"
            } else {
                "starting"
            }
            .to_owned(),
        ),
        component(
            "store",
            of(
                !stats.healthy.load(Ordering::Relaxed)
                    || stats.writing_for().is_some()
                    || stats.failed_recently().is_some(),
                Health::Failing,
            ),
            match (stats.writing_for(), stats.failed_recently()) {
                (Some(busy), _) => {
                    format!("{commits} commits, {failures} failed; one has been under way for {} s", busy.as_secs())
                }
                (None, Some(ago)) => {
                    format!("{commits} commits, {failures} failed, the last {} s ago; is the disk full?", ago.as_secs())
                }
                (None, None) => format!("{commits} commits, {failures} failed"),
            },
        ),
        datapath,
        component(
            "ipam",
            of(!full.is_empty(), Health::Degraded),
            if full.is_empty() {
                "addresses free in every pool".into()
            } else {
                format!("exhausted: {}", full.join(", "))
            },
        ),
        component(
            "endpoints",
            of(!failing.is_empty(), Health::Degraded),
            if failing.is_empty() {
                "all as they should be".into()
            } else {
                format!("need attention: {}", failing.join(", "))
            },
        ),
        component(
            "controllers",
            of(!failed_controllers.is_empty(), Health::Degraded),
            if failed_controllers.is_empty() {
                "all succeed".into()
            } else {
                format!("failing: {}", failed_controllers.join(", "))
            },
        ),
        component("deletion-queue", queue_health, queue_message),
        component(
            "leaks",
            of(audit_findings.is_some_and(|n| n > 0), Health::Degraded),
            match audit_findings {
                None => "not looked for yet".into(),
                Some(0) => "none".into(),
                Some(n) => format!("{n} findings; see `wharf audit`"),
            },
        ),
    ];
    // Only while there is something to tell.
    if !stuck.is_empty() {
        let first = stuck.iter().map(|s| format!("endpoint {} in {} for {} s", s.endpoint, s.step, s.for_ms / 1_000));
        let shown: Vec<String> = first.take(3).collect();
        let message = format!("{} of them: {}", stuck.len(), shown.join(", "));
        components.push(component("stuck-steps", Health::Degraded, message));
    }
    if admission.waiting > 0 {
        let message = format!(
            "{} creates wait, {} run beside {} deletes, one ends every {} ms",
            admission.waiting, admission.running, admission.deletes, admission.cost_ms
        );
        components.push(component("admission", Health::Ok, message));
    }
    let kept = quarantined.len() + lost;
    if kept > 0 {
        let message = format!("{} out of service, {lost} endpoints without one; see `wharf audit`", quarantined.len());
        components.push(component("records", Health::Degraded, message));
    }
    let features = node.kernel.features();
    let (ready, target) = node.prepared.fill();
    AgentStatus {
        overall: components.iter().map(|c| c.health).max().unwrap_or(Health::Ok),
        serving,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        abi_version: wharf_common::ABI_VERSION,
        node_name: node.config.node_name.clone(),
        pid: std::process::id(),
        uptime_ms: u64::try_from(node.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        router: node.routers(),
        kernel: KernelStatus {
            release: features.release.clone(),
            attach_mode: features.attach_mode.to_string(),
            features: BTreeMap::from([
                ("tcx".to_owned(), features.tcx),
                ("netkit".to_owned(), features.netkit),
                ("redirect-peer".to_owned(), features.redirect_peer),
                ("btf".to_owned(), features.btf),
                ("netns-cookie".to_owned(), features.netns_cookie),
                ("conntrack".to_owned(), features.conntrack),
            ]),
        },
        components,
        controllers,
        ipam,
        endpoints,
        stuck,
        quarantined,
        deletion_queue,
        admission,
        audit_findings,
        refused_transitions: node.refused_transitions.load(Ordering::Relaxed),
        bpf_maps,
        prepared: PreparedStatus { ready: ready as u64, target: target as u64 },
        proxy: ProxyStatus {
            enabled: node.redirects.enabled(),
            redirects: node.redirects.count(),
            pending_completions: node.completions.pending.load(Ordering::Relaxed),
            timed_out_completions: node.completions.timed_out.load(Ordering::Relaxed),
        },
        resident_bytes: resident_bytes(),
    }
}

fn family(family: wharf_api::IpFamily) -> &'static str {
    match family {
        wharf_api::IpFamily::Ipv4 => "IPv4",
        wharf_api::IpFamily::Ipv6 => "IPv6",
    }
}

fn quarantined(node: &LinuxNode) -> Vec<QuarantinedRecord> {
    let all = lock(&node.quarantined);
    all.iter()
        .map(|q| QuarantinedRecord {
            endpoint: q.id.get(),
            addresses: q.addresses.clone(),
            why: q.why.clone(),
            since_unix_ms: q.since_unix_ms,
        })
        .collect()
}

fn component(name: &str, health: Health, message: String) -> ComponentStatus {
    ComponentStatus { name: name.to_owned(), health, message }
}

/// Resident memory of this process (proc(5), /proc/self/statm, second field, in pages); 0 when it cannot be read.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()))
        .unwrap_or(0);
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    pages.saturating_mul(u64::try_from(page).unwrap_or(4096))
}
