//! Envoy's bootstrap configuration.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    envoy::User,
    resources::{ORIGINAL_DESTINATION, RUNTIME},
    shares::{self, Connections},
};

pub(crate) const XDS_CLUSTER: &str = "wharf-agent";
/// The server rejects other node ids.
pub(crate) const NODE_ID: &str = "wharf";

pub(crate) fn forwarded() -> String {
    format!("cluster.{ORIGINAL_DESTINATION}.upstream_rq_total")
}
const COUNTERS_EVERY: &str = "1s";
/// Prefixes of the sent counters. Per listener and endpoint, only [`shares`] are sent.
const BEGINNINGS: [&str; 6] = ["cluster.", "cluster_manager.", "listener_manager.", "overload.", "runtime.", "server."];

/// Instructions. Envoy's default, 100, is too small.
const MAX_EXPRESSION: u32 = 100_000;

const HEAP: &str = "envoy.resource_monitors.fixed_heap";
/// Bytes. 32,000 idle connections need half (37 KiB each with upstream, Envoy 1.40).
const MAX_HEAP: u64 = 2 << 30;

fn on_heap(action: &str, part: f64) -> Value {
    json!({"name": action, "triggers": [{"name": HEAP, "threshold": {"value": part}}]})
}

pub(crate) fn bootstrap(socket: &Path, admin: &Path, connections: Connections, user: Option<User>) -> Value {
    let counters = BEGINNINGS.map(|name| json!({"prefix": name})).into_iter();
    let counters: Vec<_> = counters.chain(shares::COUNTERS.map(|name| json!({"suffix": name}))).collect();
    let ads = json!({"ads": {}, "resource_api_version": "V3"});
    json!({
        // Another user gives other settings: the supervisor replaces Envoy.
        "node": {"id": NODE_ID, "cluster": NODE_ID, "metadata": {"user": user.map(|user| user.uid)}},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": true,
                "grpc_services": [{"envoy_grpc": {
                    "cluster_name": XDS_CLUSTER,
                    // The agent restarts within 1 s; Envoy's default back-off reaches 30 s.
                    "retry_policy": {"retry_back_off": {"base_interval": "0.1s", "max_interval": "1s"}},
                }}],
            },
            "cds_config": ads,
            "lds_config": ads,
        },
        "static_resources": {"clusters": [{
            "name": XDS_CLUSTER,
            "type": "STATIC",
            "connect_timeout": "1s",
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }},
            "load_assignment": {"cluster_name": XDS_CLUSTER, "endpoints": [{"lb_endpoints": [
                {"endpoint": {"address": {"pipe": {"path": socket}}}},
            ]}]},
        }]},
        "layered_runtime": {"layers": [
            {"name": "static", "static_layer": {
                "re2.max_program_size.error_level": MAX_EXPRESSION,
                "re2.max_program_size.warn_level": MAX_EXPRESSION,
            }},
            {"name": RUNTIME, "rtds_layer": {"name": RUNTIME, "rtds_config": ads}},
        ]},
        "stats_config": {"stats_matcher": {"inclusion_list": {"patterns": counters}}},
        "stats_flush_interval": COUNTERS_EVERY,
        "stats_sinks": [{"name": "envoy.stat_sinks.metrics_service", "typed_config": {
            "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": XDS_CLUSTER}},
        }}],
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                        "max_active_downstream_connections": connections.all,
                    },
                },
                {
                    "name": HEAP,
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                        "max_heap_size_bytes": MAX_HEAP,
                    },
                },
            ],
            "actions": [
                on_heap("envoy.overload_actions.shrink_heap", 0.9),
                on_heap("envoy.overload_actions.stop_accepting_requests", 0.95),
            ],
        },
        "admin": {"address": {"pipe": {"path": admin, "mode": 0o600}}},
    })
}
