//! `/v1/bpf/ct`: tracked flows.

use std::sync::Arc;

use axum::{Json, extract::State};
use tracing::Instrument as _;
use wharf_api::{ApiError, ErrorCode, FLOWS_DEFAULT, FLOWS_MOST, FlowList, FlowQuery, FlowState, FlowsRemoved};
use wharf_common::FlowState as CoreState;
use wharf_core::{flow::FlowFilter, kernel::KernelError};

use crate::{
    flows,
    node::{Node, looks::Purpose, registry::Registry},
    rest::{
        early::Restored,
        endpoint::accepts_work,
        error::{Answer, Failure, Query, invalid},
        id,
    },
};

/// Flows that match every filter, sorted. Reads all rows of the flow tables.
#[utoipa::path(get, path = "/v1/bpf/ct", tag = "bpf", params(FlowQuery),
    responses((status = 200, body = FlowList), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn list(Restored(node): Restored, Query(query): Query<FlowQuery>) -> Answer<Json<FlowList>> {
    let (filter, limit) = to_list(&node.life.endpoints.registry, &query)?;
    let kernel = Arc::clone(&node.life.kernel);
    Ok(Json(bounded(&node, async move { flows::list(&*kernel, &filter, limit).await }).await?))
}

/// Removes the matching flows; without a filter `all=true` is required. Traffic continues: a live flow's next packet
/// creates its row again.
#[utoipa::path(delete, path = "/v1/bpf/ct", tag = "bpf", params(FlowQuery),
    responses((status = 200, body = FlowsRemoved), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn remove(State(node): State<Arc<Node>>, Query(query): Query<FlowQuery>) -> Answer<Json<FlowsRemoved>> {
    accepts_work(&node, "remove flows")?;
    let filter = to_remove(&node.life.endpoints.registry, &query)?;
    let (kernel, asked) = (Arc::clone(&node.life.kernel), filter.clone());
    let removed = bounded(&node, async move { kernel.remove_flows(&asked).await }).await?;
    tracing::info!(removed, ?filter, "flows removed on request");
    Ok(Json(FlowsRemoved { removed }))
}

/// A read may take a second. Permits limit the calls, which continue without their clients.
async fn bounded<T: Send + 'static>(
    node: &Node,
    call: impl Future<Output = Result<T, KernelError>> + Send + 'static,
) -> Answer<T> {
    let permit = node.looks.turn(Purpose::Explanation).await;
    let work = async move {
        let result = call.await;
        drop(permit);
        result
    };
    let ended = node.life.tasks.operations.spawn(work.in_current_span()).await;
    Ok(ended.map_err(|e| Failure::new(ErrorCode::Internal, format!("read flows: {e}")))??)
}

/// Filter and limit of a list.
///
/// # Errors
/// 400 for a bad limit or `all`; 404 and 409 for the endpoint.
pub fn to_list(registry: &Registry, query: &FlowQuery) -> Answer<(FlowFilter, usize)> {
    const WHAT: &str = "list flows";
    if query.all.is_some() {
        return Err(invalid(format!("{WHAT}: `all` belongs to DELETE; without a filter all are listed")));
    }
    let limit = query.limit.unwrap_or(FLOWS_DEFAULT);
    if !(1..=FLOWS_MOST).contains(&limit) {
        return Err(invalid(format!("{WHAT}: limit {limit}: must be 1 to {FLOWS_MOST}")));
    }
    Ok((filter(registry, query, WHAT)?, usize::try_from(limit).unwrap_or(usize::MAX)))
}

/// Filter of a removal.
///
/// # Errors
/// 400 for a limit, and without exactly one of filter and `all`; 404 and 409 for the endpoint.
pub fn to_remove(registry: &Registry, query: &FlowQuery) -> Answer<FlowFilter> {
    const WHAT: &str = "remove flows";
    if query.limit.is_some() {
        return Err(invalid(format!("{WHAT}: `limit` belongs to GET; all that match are removed")));
    }
    match (query.is_filtered(), query.all == Some(true)) {
        (true, true) => Err(invalid(format!("{WHAT}: both a filter and all=true; give one of them"))),
        (false, false) => Err(invalid(format!("{WHAT}: no filter; give one, or all=true for every flow of the node"))),
        _ => filter(registry, query, WHAT),
    }
}

fn filter(registry: &Registry, query: &FlowQuery, what: &str) -> Answer<FlowFilter> {
    let addresses = match &query.endpoint {
        Some(text) => {
            let handle = id::parse(text).and_then(|id| id::find(registry, &id, text)).map_err(|e| e.of(what))?;
            let addresses: Vec<_> = handle.shared.read(|v| v.record.addresses().collect());
            if addresses.is_empty() {
                // An empty filter would match every flow.
                let message = format!("{what}: endpoint {} has no address yet", handle.id);
                return Err(Failure::new(ErrorCode::NotFound, message));
            }
            addresses
        }
        None => Vec::new(),
    };
    Ok(FlowFilter {
        addresses,
        network: query.address.map(|range| range.0),
        port: query.port,
        protocol: query.protocol.map(|protocol| protocol.0),
        state: query.state.map(|state| match state {
            FlowState::New => CoreState::New,
            FlowState::Established => CoreState::Established,
            FlowState::Closing => CoreState::Closing,
            FlowState::Closed => CoreState::Closed,
        }),
    })
}
