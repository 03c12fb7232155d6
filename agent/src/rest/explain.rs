//! `/v1/explain` and `/v1/log`.

use axum::{Extension, Json};
use wharf_api::{AgentLog, ApiError, ErrorCode, Explanation};
use wharf_kit::telemetry::LogFilter;

use crate::{
    explain::explain,
    rest::{
        early::Restored,
        error::{Answer, Failure, Segment},
    },
};

/// State and history of an endpoint, container or address. Deleted subjects are kept for a day. `kind`: kind of the
/// subject, `several` or `unknown`.
#[utoipa::path(get, path = "/v1/explain/{subject}", tag = "agent", params(("subject" = String, Path,
    description = "An endpoint's number, an address, a container id or the beginning of one (with `/INTERFACE`), `cni-attachment-id:ID:IFNAME`, `pod-name:[NAMESPACE/]NAME`, or a link's name")),
    responses((status = 200, body = Explanation), (status = 400, body = ApiError), (status = 503, body = ApiError)))]
pub async fn get(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<Explanation>> {
    explain(&node, &text).await.map(Json).map_err(|why| Failure::new(ErrorCode::InvalidRequest, why.to_string()))
}

/// The last log lines in memory.
#[utoipa::path(get, path = "/v1/log", tag = "agent", responses((status = 200, body = AgentLog)))]
pub async fn log(Extension(log): Extension<LogFilter>) -> Json<AgentLog> {
    Json(log.ring().tail())
}
