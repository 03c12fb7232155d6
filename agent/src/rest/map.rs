//! `/v1/map`: BPF maps and their rows.

use std::sync::Arc;

use axum::{Json, extract::State};
use wharf_api::{ApiError, BpfMap, BpfMapDump, ErrorCode};
use wharf_core::kernel::Kernel as _;

use crate::{
    endpoint::create::kernel_error,
    rest::{
        LinuxNode,
        error::{Answer, Failure, Segment},
        status::api_map,
    },
};

/// Every map of ours, shared ones first.
#[utoipa::path(get, path = "/v1/map", tag = "bpf", responses((status = 200, body = [BpfMap]), (status = 500, body = ApiError)))]
pub async fn list(State(node): State<Arc<LinuxNode>>) -> Answer<Json<Vec<BpfMap>>> {
    let maps = node.kernel.observe_maps().await.map_err(|e| kernel_error(&e))?;
    Ok(Json(maps.into_iter().map(api_map).collect()))
}

/// One map with its rows. An endpoint's map is called `ID.NAME`, for example `7.CONFIG` (or `7%2FCONFIG`).
#[utoipa::path(get, path = "/v1/map/{name}", tag = "bpf", params(("name" = String, Path)),
    responses((status = 200, body = BpfMapDump), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 500, body = ApiError)))]
pub async fn get(State(node): State<Arc<LinuxNode>>, Segment(name): Segment) -> Answer<Json<BpfMapDump>> {
    let name = name.replacen('.', "/", 1);
    let maps = node.kernel.observe_maps().await.map_err(|e| kernel_error(&e))?;
    let Some(map) = maps.into_iter().find(|m| m.name == name) else {
        let shown: String = name.chars().take(80).collect();
        return Err(Failure::new(ErrorCode::NotFound, format!("find map {shown}: no such map"))
            .hint("`wharf bpf map list` shows them"));
    };
    let rows = node.kernel.dump_map(&name).await.map_err(|e| kernel_error(&e))?;
    Ok(Json(BpfMapDump { map: api_map(map), rows }))
}
