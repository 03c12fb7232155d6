//! `/v1/healthz`, `/metrics`, `/v1/metrics`: the data of `wharf status`.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use wharf_api::{AgentStatus, ApiError, ErrorCode, MetricRow, StatusQuery, Verdict};

pub use crate::status::api_map;
use crate::{
    metrics::Format,
    node::Node,
    rest::error::{Answer, Failure, Query},
    status,
};

/// The agent's status: 200 while it serves, otherwise 503. With `brief` one word: `ok`, `degraded` or `down`.
#[utoipa::path(get, path = "/v1/healthz", tag = "agent", params(StatusQuery),
    responses(
        (status = 200, content((AgentStatus = "application/json"), (String = "text/plain"))),
        (status = 400, body = ApiError),
        (status = 503, content((AgentStatus = "application/json"), (String = "text/plain"))),
    ))]
pub async fn healthz(State(node): State<Arc<Node>>, Query(query): Query<StatusQuery>) -> Response {
    answer(status::status(&node).await, query)
}

/// The HTTP response.
pub fn answer(mut status: AgentStatus, query: StatusQuery) -> Response {
    let code = if status.serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if query.brief == Some(true) {
        return (code, word(status.verdict())).into_response();
    }
    if query.all_controllers != Some(true) {
        status.controllers.retain(|c| c.endpoint.is_none() || c.is_unwell());
    }
    (code, Json(status)).into_response()
}

fn word(verdict: Verdict) -> String {
    format!("{}\n", verdict.as_str())
}

/// Endpoints' nonzero counters, and totals of deleted endpoints.
#[utoipa::path(get, path = "/v1/metrics", tag = "bpf",
    responses((status = 200, body = [MetricRow]), (status = 500, body = ApiError)))]
pub async fn rows(State(node): State<Arc<Node>>) -> Answer<Json<Vec<MetricRow>>> {
    let life = &node.life;
    Ok(Json(status::verdicts(&*life.kernel, &life.endpoints.registry, &life.telemetry.metrics).await?))
}

/// Prometheus metrics: OpenMetrics if `Accept` names it, otherwise the Prometheus text format. A stale part gives its
/// last values.
#[utoipa::path(get, path = "/metrics", tag = "agent",
    responses((status = 200, content((String = "text/plain"), (String = "application/openmetrics-text"))),
        (status = 500, body = ApiError)))]
pub async fn prometheus(State(node): State<Arc<Node>>, headers: HeaderMap) -> Answer<impl IntoResponse> {
    let (status, verdicts) = tokio::join!(status::status(&node), status::counters(&node));
    let verdicts = verdicts.map_err(|why| Failure::new(ErrorCode::Kernel, why.to_string()))?;
    let format = Format::accepted(headers.get(header::ACCEPT).and_then(|types| types.to_str().ok()));
    let (runs, stale) = (node.life.tasks.controllers.runs(), node.parts.stale());
    let feed = node.life.network.cluster.feed().map(|feed| feed.view());
    let text = node.life.telemetry.metrics.encode(format, &status, &verdicts, &runs, stale, feed.as_ref());
    Ok(([(header::CONTENT_TYPE, format.content_type())], text))
}
