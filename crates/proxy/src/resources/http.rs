//! HTTP of a member: each request judged, and passed on as the client sent it.

use envoy_types::pb::envoy::{
    config::{
        accesslog::v3::{
            AccessLog, AccessLogFilter, ComparisonFilter, StatusCodeFilter, access_log_filter::FilterSpecifier,
            comparison_filter,
        },
        core::v3::{
            DataSource, Http1ProtocolOptions, Http2ProtocolOptions, RuntimeUInt32, TypedExtensionConfig, data_source,
            http1_protocol_options::{HeaderKeyFormat, header_key_format::HeaderFormat},
        },
        route::v3::{
            Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost, route, route_action::ClusterSpecifier,
            route_match::PathSpecifier,
        },
    },
    extensions::{
        filters::{
            http::{rbac::v3::Rbac, router::v3::Router},
            network::http_connection_manager::v3::{
                HttpConnectionManager, HttpFilter, LocalReplyConfig, ResponseMapper,
                http_connection_manager::{
                    CodecType, PathWithEscapedSlashesAction, RouteSpecifier, ServerHeaderTransformation, UpgradeConfig,
                },
                http_filter,
            },
        },
        http::header_formatters::preserve_case::v3::PreserveCaseFormatterConfig,
    },
};
use prost::{Message, Name};

use super::{ORIGINAL_DESTINATION, forwarded_proto, no, pack, seconds, yes};

/// Time that a stream may be silent in both directions. Calls that wait for events are silent for long; what is silent for an
/// hour has usually lost its other end.
const STREAM_IDLE_SECONDS: i64 = 3600;
/// Time for a request's headers to arrive: nobody keeps a connection's memory by sending a byte now and then.
const HEADERS_SECONDS: i64 = 60;
/// Body of the answer to a request that no rule allows.
const DENIED: &str = "Access denied\r\n";

/// The connection manager: which codec, which rules, where to.
pub(super) fn connection_manager(stat_prefix: &str, rules: &Rbac, access_log: Vec<AccessLog>) -> HttpConnectionManager {
    HttpConnectionManager {
        codec_type: CodecType::Auto.into(),
        stat_prefix: stat_prefix.into(),
        http_filters: vec![
            http_filter("envoy.filters.http.header_mutation", &forwarded_proto::put_back()),
            http_filter("envoy.filters.http.rbac", rules),
            // Its own headers (x-envoy-upstream-service-time and such) would tell both ends of a proxy.
            http_filter("envoy.filters.http.router", &Router { suppress_envoy_headers: true, ..Router::default() }),
        ],
        early_header_mutation_extensions: vec![forwarded_proto::set_aside()],
        access_log,
        route_specifier: Some(RouteSpecifier::RouteConfig(routes())),
        // What is judged is what the server gets: paths are normalized (RFC 3986, section 6.2.2) before the rules see them, and
        // a path that servers read in two ways is refused.
        normalize_path: yes(),
        merge_slashes: true,
        path_with_escaped_slashes_action: PathWithEscapedSlashesAction::RejectRequest.into(),
        use_remote_address: no(),
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
        http2_protocol_options: Some(Http2ProtocolOptions::default()),
        stream_idle_timeout: seconds(STREAM_IDLE_SECONDS),
        request_headers_timeout: seconds(HEADERS_SECONDS),
        upgrade_configs: vec![UpgradeConfig { upgrade_type: "websocket".into(), ..UpgradeConfig::default() }],
        local_reply_config: Some(LocalReplyConfig { mappers: vec![denied()], ..LocalReplyConfig::default() }),
        ..HttpConnectionManager::default()
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

/// Everything goes where it was sent, without a time limit of the proxy's own.
fn routes() -> RouteConfiguration {
    let action = RouteAction {
        cluster_specifier: Some(ClusterSpecifier::Cluster(ORIGINAL_DESTINATION.into())),
        timeout: seconds(0),
        ..RouteAction::default()
    };
    let route = Route {
        r#match: Some(RouteMatch { path_specifier: Some(PathSpecifier::Prefix("/".into())), ..RouteMatch::default() }),
        action: Some(route::Action::Route(action)),
        ..Route::default()
    };
    RouteConfiguration {
        virtual_hosts: vec![VirtualHost {
            name: "any".into(),
            domains: vec!["*".into()],
            routes: vec![route],
            ..VirtualHost::default()
        }],
        // Else a listener that comes before its cluster would be refused.
        validate_clusters: no(),
        ..RouteConfiguration::default()
    }
}

/// Replaces the body of the proxy's own 403; that of a server's 403 stays.
fn denied() -> ResponseMapper {
    let is_403 = ComparisonFilter {
        op: comparison_filter::Op::Eq.into(),
        value: Some(RuntimeUInt32 { default_value: 403, runtime_key: "wharf.denied_status".into() }),
    };
    ResponseMapper {
        filter: Some(AccessLogFilter {
            filter_specifier: Some(FilterSpecifier::StatusCodeFilter(StatusCodeFilter { comparison: Some(is_403) })),
        }),
        body: Some(DataSource {
            specifier: Some(data_source::Specifier::InlineString(DENIED.into())),
            ..DataSource::default()
        }),
        ..ResponseMapper::default()
    }
}
