//! `/v1/health`: the health endpoints.

use std::{sync::Arc, time::Duration};

use axum::{Json, extract::State};
use tokio::time::timeout;
use wharf_api::{ApiError, ErrorCode, HealthReport};

use crate::{
    node::{Node, health::NAME},
    rest::error::{Answer, Failure},
};

/// A running round ends first; a launch may also run.
const BOUND: Duration = Duration::from_secs(5);

/// Health endpoints with their last probe results.
#[utoipa::path(get, path = "/v1/health", tag = "health", responses((status = 200, body = HealthReport)))]
pub async fn get(State(node): State<Arc<Node>>) -> Json<HealthReport> {
    Json(node.health.report())
}

/// Probes the local health endpoint now and returns the results of all nodes.
#[utoipa::path(post, path = "/v1/health/probe", tag = "health",
    responses((status = 200, body = HealthReport), (status = 429, body = ApiError), (status = 503, body = ApiError)))]
pub async fn probe(State(node): State<Arc<Node>>) -> Answer<Json<HealthReport>> {
    if !node.health.is_on() {
        let message = format!("probe {NAME}: nobody probes now: {}", node.health.view().message);
        return Err(Failure::new(ErrorCode::Unavailable, message));
    }
    let Some(round) = node.health.ask() else {
        let message = format!("probe {NAME}: others wait for a round already");
        return Err(Failure::new(ErrorCode::Busy, message).retry(1_000));
    };
    match timeout(BOUND, round).await {
        Ok(Ok(())) => Ok(Json(node.health.report())),
        Ok(Err(_)) => Err(Failure::new(ErrorCode::Unavailable, format!("probe {NAME}: the agent is stopping"))),
        Err(_) => {
            let message =
                format!("probe {NAME}: no round ended within {BOUND:?}; `wharf health status` tells what it does");
            Err(Failure::new(ErrorCode::DeadlineExceeded, message))
        }
    }
}
