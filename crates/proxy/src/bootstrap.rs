//! What Envoy is told when it starts: where the server is, and how to behave. Everything else comes from the server.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    envoy::User,
    resources::{ORIGINAL_DESTINATION, RUNTIME},
    shares::{self, Connections},
};

/// Name of the cluster that is this server.
pub(crate) const XDS_CLUSTER: &str = "wharf-agent";
/// What the agent's own Envoy calls itself; nobody else is served.
pub(crate) const NODE_ID: &str = "wharf";

/// Envoy's counter of what it has sent on to servers: requests, and TLS connections.
pub(crate) fn forwarded() -> String {
    format!("cluster.{ORIGINAL_DESTINATION}.upstream_rq_total")
}
/// How often Envoy tells its counters.
const COUNTERS_EVERY: &str = "1s";
/// Envoy's counters by the beginnings of their names. All that it has is told each second, and the number of listeners and endpoints has no bound: of
/// those only what [`shares`] reads, which is told where it is not zero.
const BEGINNINGS: [&str; 6] = ["cluster.", "cluster_manager.", "listener_manager.", "overload.", "runtime.", "server."];

/// Instructions of a compiled regular expression. (Envoy's own limit, 100, refuses two lines of text; the matcher's time
/// is linear in the text whatever the expression.)
const MAX_EXPRESSION: u32 = 100_000;

/// What watches Envoy's heap.
const HEAP: &str = "envoy.resource_monitors.fixed_heap";
/// Bytes of Envoy's heap. A connection without traffic, with the one to its server, needs 37 KiB (Envoy 1.40): 32,000 of them about half of this. The rest is
/// for what connections buffer, which their ends choose.
const MAX_HEAP: u64 = 2 << 30;

/// What Envoy does once its heap has that part of [`MAX_HEAP`].
fn on_heap(action: &str, part: f64) -> Value {
    json!({"name": action, "triggers": [{"name": HEAP, "threshold": {"value": part}}]})
}

/// The bootstrap: `socket` is where the server listens, `admin` where Envoy's own interface shall, `connections` how many
/// it takes, `user` whom it runs as.
pub(crate) fn bootstrap(socket: &Path, admin: &Path, connections: Connections, user: Option<User>) -> Value {
    let counters = BEGINNINGS.map(|name| json!({"prefix": name})).into_iter();
    let counters: Vec<_> = counters.chain(shares::COUNTERS.map(|name| json!({"suffix": name}))).collect();
    let ads = json!({"ads": {}, "resource_api_version": "V3"});
    json!({
        // An Envoy of another user cannot reach the socket: it has other settings, by which the supervisor tells that it is to be replaced.
        "node": {"id": NODE_ID, "cluster": NODE_ID, "metadata": {"user": user.map(|user| user.uid)}},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": true,
                "grpc_services": [{"envoy_grpc": {
                    "cluster_name": XDS_CLUSTER,
                    // The agent is back within a second; Envoy's own back-off reaches half a minute.
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
