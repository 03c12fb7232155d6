//! `/v1/map`: BPF maps and their rows.

use std::{collections::BTreeMap, sync::Arc};

use axum::{Json, extract::State};
use wharf_api::{ApiError, BpfMap, BpfMapDump, ErrorCode};
use wharf_common::map::{EVENTS, EVENTS_BYTES, EVENTS_PER_SECOND};
use wharf_core::kernel::{KernelErrorKind, MapInfo};

use crate::{
    node::Node,
    rest::{
        error::{Answer, Failure, Segment},
        status::api_map,
    },
};

const FEW: usize = 6;

/// Wharf's maps, shared ones first.
#[utoipa::path(get, path = "/v1/map", tag = "bpf", responses((status = 200, body = [BpfMap]), (status = 500, body = ApiError)))]
pub async fn list(State(node): State<Arc<Node>>) -> Answer<Json<Vec<BpfMap>>> {
    let maps = node.life.kernel.observe_maps().await?;
    Ok(Json(maps.into_iter().map(api_map).collect()))
}

/// One map with its rows; for the ring buffer `EVENTS` its properties. An endpoint's map is `ID.NAME`, such as
/// `7.CONFIG` (or `7%2FCONFIG`).
#[utoipa::path(get, path = "/v1/map/{name}", tag = "bpf", params(("name" = String, Path)),
    responses((status = 200, body = BpfMapDump), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 500, body = ApiError)))]
pub async fn get(State(node): State<Arc<Node>>, Segment(name): Segment) -> Answer<Json<BpfMapDump>> {
    let name = name.replacen('.', "/", 1);
    let mut maps = node.life.kernel.observe_maps().await?;
    let Some(at) = maps.iter().position(|m| m.name == name) else { return Err(no_such(&name, &maps)) };
    let rows = match name.as_str() {
        EVENTS => vec![events(&node)],
        _ => match node.life.kernel.dump_map(&name).await {
            Ok(rows) => rows,
            Err(e) if e.kind == KernelErrorKind::NotFound => return Err(no_such(&name, &maps)),
            Err(e) if e.kind == KernelErrorKind::Unsupported => {
                return Err(Failure::new(ErrorCode::Unsupported, e.to_string()));
            }
            Err(e) => return Err(e.into()),
        },
    };
    Ok(Json(BpfMapDump { map: api_map(maps.swap_remove(at)), rows }))
}

fn no_such(name: &str, maps: &[MapInfo]) -> Failure {
    let shown: String = name.chars().take(80).collect();
    let (of_endpoints, shared): (Vec<_>, Vec<_>) = maps.iter().map(|m| m.name.as_str()).partition(|n| n.contains('/'));
    let few = of_endpoints.iter().take(FEW).copied().chain((of_endpoints.len() > FEW).then_some("..."));
    let names: Vec<&str> = shared.into_iter().chain(few).collect();
    Failure::new(ErrorCode::NotFound, format!("find map {shown}: no such map"))
        .hint(&format!("there are {}; `wharf bpf map list` shows them", names.join(", ")))
}

/// `GET /v1/monitor` shows the buffer's events.
fn events(node: &Node) -> BTreeMap<String, String> {
    let facts = [
        ("bytes", u64::from(EVENTS_BYTES)),
        ("events-per-second-of-an-endpoint", u64::from(EVENTS_PER_SECOND)),
        ("read-by-the-agent", node.life.telemetry.monitor.packet_events()),
        ("readers-of-the-monitor", node.life.telemetry.monitor.readers() as u64),
        ("trace-sampling", u64::from(node.life.telemetry.monitor.sampling())),
    ];
    facts.map(|(name, value)| (name.to_owned(), value.to_string())).into()
}
