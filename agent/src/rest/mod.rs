//! The REST API: routes and document.

mod addressing;
pub mod audit;
pub mod body;
pub mod cluster;
pub mod command;
pub mod config;
mod early;
pub mod endpoint;
pub mod error;
pub mod explain;
pub mod flow;
pub mod health;
pub mod id;
pub mod ipam;
pub mod late;
pub mod map;
pub mod monitor;
pub mod operation;
pub mod parse;
pub mod policy;
pub mod proxy;
pub mod status;

use std::sync::Arc;

use axum::{Extension, Router, body::Bytes, extract::DefaultBodyLimit, http::header};
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};
use wharf_kit::telemetry::LogFilter;

use crate::node::Node;

/// Bytes; a GC of 10,000 attachments fits.
const MAX_BODY: usize = 2 * 1024 * 1024;

#[derive(OpenApi)]
#[openapi(info(
    title = "Wharf agent",
    description = "Container networking on this node. Served on a unix socket, <run-dir>/wharf.sock.",
    license(name = "Apache-2.0", identifier = "Apache-2.0")
))]
struct Document;

fn api() -> OpenApiRouter<Arc<Node>> {
    let mut router = routes();
    id::describe(router.get_openapi_mut());
    router
}

fn routes() -> OpenApiRouter<Arc<Node>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(status::healthz))
        .routes(routes!(status::rows))
        .routes(routes!(status::prometheus))
        .routes(routes!(config::get, config::patch))
        .routes(routes!(endpoint::list, endpoint::remove_container))
        .routes(routes!(endpoint::put, endpoint::get, endpoint::patch, endpoint::remove))
        .routes(routes!(endpoint::log))
        .routes(routes!(endpoint::health))
        .routes(routes!(endpoint::labels))
        .routes(routes!(endpoint::config))
        .routes(routes!(explain::get))
        .routes(routes!(explain::log))
        .routes(routes!(health::get))
        .routes(routes!(health::probe))
        .routes(routes!(ipam::view, ipam::allocate))
        .routes(routes!(ipam::allocate_exact, ipam::release))
        .routes(routes!(cluster::get))
        .routes(routes!(cluster::pods))
        .routes(routes!(map::list))
        .routes(routes!(map::get))
        .routes(routes!(flow::list, flow::remove))
        .merge(
            OpenApiRouter::new()
                .routes(routes!(policy::list, policy::import, policy::remove))
                .layer(DefaultBodyLimit::max(body::LONGEST)),
        )
        .routes(routes!(policy::explain))
        .routes(routes!(proxy::get))
        .routes(routes!(proxy::names))
        .routes(routes!(policy::of_endpoint))
        .routes(routes!(policy::namespaces))
        .routes(routes!(policy::set_namespace, policy::remove_namespace))
        .routes(routes!(monitor::stream_events))
        .routes(routes!(audit::look, audit::repair))
        .routes(routes!(audit::gc))
}

/// Checked in as `crates/api/openapi.json`.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    api().into_openapi()
}

/// All routes, for the socket.
pub fn router(node: Arc<Node>, log: LogFilter) -> Router {
    let (router, document) = api().split_for_parts();
    // As bytes: every connection would copy an object's megabyte of small allocations.
    let document = Bytes::from(document.to_json().unwrap_or_else(|e| format!("{{\"error\": \"{e}\"}}")));
    let document = move || {
        let body = document.clone();
        async move { ([(header::CONTENT_TYPE, "application/json")], body) }
    };
    router
        .route("/v1/openapi.json", axum::routing::get(document))
        .fallback(|| async {
            error::Failure::new(
                wharf_api::ErrorCode::NotFound,
                "find route: no such path; GET /v1/openapi.json lists them",
            )
        })
        .layer(axum::middleware::from_fn_with_state(
            (Arc::clone(&node.commands), Some(Arc::clone(&node))),
            command::measure,
        ))
        .layer(axum::middleware::from_fn(late::refuse))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&node), operation::follow))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(log))
        .layer(axum::middleware::from_fn_with_state(Arc::<body::Bodies>::default(), body::hold))
        .with_state(node)
}

/// The TCP listener must not expose the API.
pub fn metrics_router(node: Arc<Node>) -> Router {
    Router::new().route("/metrics", axum::routing::get(status::prometheus)).with_state(node)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checked_in_openapi_document_is_what_the_routes_make() {
        let made = super::document().to_pretty_json().expect("document serialises") + "\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/api/openapi.json");
        if std::env::var_os("WHARF_UPDATE_OPENAPI").is_some() {
            std::fs::write(path, &made).expect("write openapi.json");
        }
        let kept = std::fs::read_to_string(path).expect("read openapi.json");
        assert!(
            kept == made,
            "crates/api/openapi.json is stale: run `WHARF_UPDATE_OPENAPI=1 cargo test -p wharf-agent openapi` and review the difference"
        );
    }
}
