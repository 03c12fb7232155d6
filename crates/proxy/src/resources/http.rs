//! Envoy's HTTP filters for a member.

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

/// Long: calls can wait for events.
const STREAM_IDLE_SECONDS: i64 = 3600;
/// From the first byte: slow senders must not hold a connection.
const HEADERS_SECONDS: i64 = 15;
/// Per HTTP/2 connection.
const STREAMS: u32 = 100;
/// Per request. HTTP/2 compresses headers: few bytes can fill this for every stream.
const HEADERS_KIB: u32 = 16;

/// Prefix of headers that control or reveal Envoy.
const ORDERS: &str = "x-envoy-";
/// Envoy adds it for private clients.
pub(super) const ADDED: &str = "x-envoy-internal";

/// The routes contain the rules.
pub(super) fn connection_manager(
    stat_prefix: &str,
    routes: RouteConfiguration,
    access_log: Vec<AccessLog>,
) -> HttpConnectionManager {
    HttpConnectionManager {
        codec_type: CodecType::Auto.into(),
        stat_prefix: stat_prefix.into(),
        http_filters: vec![
            // They would reveal the proxy.
            http_filter("envoy.filters.http.router", &Router { suppress_envoy_headers: true, ..Router::default() }),
        ],
        early_header_mutation_extensions: vec![without_orders_to_envoy(), forwarded_proto::set_aside()],
        access_log,
        route_specifier: Some(RouteSpecifier::RouteConfig(routes)),
        // Rules must check what the server gets (RFC 3986, section 6.2.2).
        normalize_path: yes(),
        merge_slashes: true,
        path_with_escaped_slashes_action: PathWithEscapedSlashesAction::RejectRequest.into(),
        use_remote_address: no(),
        forward_client_cert_details: ForwardClientCertDetails::AlwaysForwardOnly.into(),
        skip_xff_append: true,
        generate_request_id: no(),
        preserve_external_request_id: true,
        server_header_transformation: ServerHeaderTransformation::PassThrough.into(),
        // The server answers "Expect: 100-continue".
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
        max_request_headers_kb: number(HEADERS_KIB),
        upgrade_configs: vec![UpgradeConfig { upgrade_type: "websocket".into(), ..UpgradeConfig::default() }],
        ..HttpConnectionManager::default()
    }
}

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

/// For case-sensitive programs.
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
