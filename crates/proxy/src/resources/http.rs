//! HTTP of a member: each request judged, and passed on as the client sent it.

use envoy_types::pb::envoy::{
    config::{
        accesslog::v3::AccessLog,
        common::mutation_rules::v3::{
            HeaderMutation,
            header_mutation::{Action, RemoveOnMatch},
        },
        core::v3::{
            Http1ProtocolOptions, Http2ProtocolOptions, TypedExtensionConfig,
            http1_protocol_options::{HeaderKeyFormat, header_key_format::HeaderFormat},
        },
        route::v3::RouteConfiguration,
    },
    extensions::{
        filters::{
            http::router::v3::Router,
            network::http_connection_manager::v3::{
                HttpConnectionManager, HttpFilter,
                http_connection_manager::{
                    CodecType, ForwardClientCertDetails, PathWithEscapedSlashesAction, RouteSpecifier,
                    ServerHeaderTransformation, UpgradeConfig,
                },
                http_filter,
            },
        },
        http::{
            early_header_mutation::header_mutation::v3::HeaderMutation as EarlyMutation,
            header_formatters::preserve_case::v3::PreserveCaseFormatterConfig,
        },
    },
    r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
};
use prost::{Message, Name};

use super::{forwarded_proto, no, number, pack, seconds, yes};

/// Time that a stream may be silent in both directions. Calls that wait for events are silent for long; what is silent for an
/// hour has usually lost its other end.
const STREAM_IDLE_SECONDS: i64 = 3600;
/// Time for a request's headers to arrive, from the first byte on: a byte now and then does not keep a connection.
const HEADERS_SECONDS: i64 = 15;
/// Requests under way on a connection of HTTP/2. With the share of connections this bounds an endpoint's requests that are under way or wait for a server.
const STREAMS: u32 = 100;

/// Headers by which a client gives Envoy orders (time limits, retries), and by which Envoy tells servers of itself.
const ORDERS: &str = "x-envoy-";
/// The one that the connection manager adds: the client has an address that it takes for one of a private network.
pub(super) const ADDED: &str = "x-envoy-internal";

/// The connection manager: which codec, which rules, where to. The routes are the rules: each further filter would cost every request.
pub(super) fn connection_manager(
    stat_prefix: &str,
    routes: RouteConfiguration,
    access_log: Vec<AccessLog>,
) -> HttpConnectionManager {
    HttpConnectionManager {
        codec_type: CodecType::Auto.into(),
        stat_prefix: stat_prefix.into(),
        http_filters: vec![
            // Its own headers (x-envoy-upstream-service-time and such) would tell both ends of a proxy.
            http_filter("envoy.filters.http.router", &Router { suppress_envoy_headers: true, ..Router::default() }),
        ],
        early_header_mutation_extensions: vec![without_orders_to_envoy(), forwarded_proto::set_aside()],
        access_log,
        route_specifier: Some(RouteSpecifier::RouteConfig(routes)),
        // What is judged is what the server gets: paths are normalized (RFC 3986, section 6.2.2) before the rules see them, and
        // a path that servers read in two ways is refused.
        normalize_path: yes(),
        merge_slashes: true,
        path_with_escaped_slashes_action: PathWithEscapedSlashesAction::RejectRequest.into(),
        use_remote_address: no(),
        forward_client_cert_details: ForwardClientCertDetails::AlwaysForwardOnly.into(),
        skip_xff_append: true,
        generate_request_id: no(),
        preserve_external_request_id: true,
        server_header_transformation: ServerHeaderTransformation::PassThrough.into(),
        // The server answers "Expect: 100-continue", not the proxy.
        proxy_100_continue: true,
        http_protocol_options: Some(Http1ProtocolOptions {
            accept_http_10: true,
            enable_trailers: true,
            header_key_format: Some(header_case()),
            ..Http1ProtocolOptions::default()
        }),
        http2_protocol_options: Some(Http2ProtocolOptions {
            max_concurrent_streams: number(STREAMS),
            ..Http2ProtocolOptions::default()
        }),
        stream_idle_timeout: seconds(STREAM_IDLE_SECONDS),
        request_headers_timeout: seconds(HEADERS_SECONDS),
        upgrade_configs: vec![UpgradeConfig { upgrade_type: "websocket".into(), ..UpgradeConfig::default() }],
        ..HttpConnectionManager::default()
    }
}

/// Removes all that begins with [`ORDERS`] before Envoy reads it.
fn without_orders_to_envoy() -> TypedExtensionConfig {
    let begins = StringMatcher { match_pattern: Some(MatchPattern::Prefix(ORDERS.into())), ..StringMatcher::default() };
    let remove = RemoveOnMatch { key_matcher: Some(begins) };
    TypedExtensionConfig {
        name: "envoy.http.early_header_mutation.header_mutation".into(),
        typed_config: Some(pack(&EarlyMutation {
            mutations: vec![HeaderMutation { action: Some(Action::RemoveOnMatch(remove)) }],
        })),
    }
}

/// Header names keep their upper and lower case in HTTP/1.1, for programs that compare them byte by byte.
pub(super) fn header_case() -> HeaderKeyFormat {
    HeaderKeyFormat {
        header_format: Some(HeaderFormat::StatefulFormatter(TypedExtensionConfig {
            name: "envoy.http.stateful_header_formatters.preserve_case".into(),
            typed_config: Some(pack(&PreserveCaseFormatterConfig::default())),
        })),
    }
}

fn http_filter<M: Message + Name>(name: &str, config: &M) -> HttpFilter {
    HttpFilter {
        name: name.into(),
        config_type: Some(http_filter::ConfigType::TypedConfig(pack(config))),
        ..HttpFilter::default()
    }
}
