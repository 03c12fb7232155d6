//! `/v1/audit` and `/v1/gc`.

use std::{collections::BTreeSet, sync::Arc};

use axum::{Json, extract::State, http::StatusCode};
use tracing::Instrument as _;
use wharf_api::{ApiError, AuditReport, DeleteResult, GcAttachment, GcRequest};
use wharf_core::ids::{NetworkName, RuntimeName};

use crate::{
    audit,
    endpoint::collect,
    node::Node,
    rest::{
        early::Restored,
        endpoint::accepts_work,
        error::{Answer, Body, Failure},
    },
};

/// Differences between kernel, bpffs and store. Changes nothing.
#[utoipa::path(get, path = "/v1/audit", tag = "agent", responses((status = 200, body = AuditReport), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn look(Restored(node): Restored) -> Answer<Json<AuditReport>> {
    Ok(Json(audit::audit(&node.life, &node.audit_findings, false).await?))
}

/// Compares store and kernel, and repairs the objects that are provably Wharf's.
#[utoipa::path(post, path = "/v1/audit", tag = "agent",
    responses((status = 200, body = AuditReport), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn repair(State(node): State<Arc<Node>>) -> Answer<Json<AuditReport>> {
    accepts_work(&node, "repair")?;
    // Also without the client: the kernel completes an abandoned call, perhaps after a newer one.
    let owned = Arc::clone(&node);
    let work = async move {
        // First: routes to endpoints have its addresses as source.
        owned.life.network.ensure_node().await?;
        audit::audit(&owned.life, &owned.audit_findings, true).await
    };
    let done = node.life.tasks.operations.spawn(work.in_current_span()).await;
    let stopped = |_| Failure::new(wharf_api::ErrorCode::Unavailable, "repair: the agent is stopping");
    Ok(Json(done.map_err(stopped)??))
}

/// Deletes a network's endpoints whose attachment the runtime does not know, and other leftovers.
#[utoipa::path(post, path = "/v1/gc", tag = "endpoint", request_body = GcRequest,
    responses((status = 200, body = DeleteResult), (status = 206, body = DeleteResult), (status = 400, body = ApiError), (status = 503, body = ApiError)))]
pub async fn gc(
    State(node): State<Arc<Node>>,
    Body(body): Body<GcRequest>,
) -> Answer<(StatusCode, Json<DeleteResult>)> {
    let bad = |e| Failure::new(wharf_api::ErrorCode::InvalidRequest, format!("collect garbage: {e}"));
    let network = NetworkName::parse(&body.network).map_err(bad)?;
    let runtime = body.runtime.as_deref().map(RuntimeName::parse).transpose().map_err(bad)?;
    accepts_work(&node, "collect garbage")?;
    let valid: BTreeSet<GcAttachment> = body.valid.into_iter().collect();
    let result = collect::collect(&node.life, &network, &valid, runtime.as_ref()).await;
    let status = if result.errors.is_empty() { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT };
    Ok((status, Json(result)))
}
