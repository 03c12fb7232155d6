//! Access logs (ALS). An entry costs as much as forwarding the request: successful requests are logged only while
//! watched, otherwise counted ([`crate::bootstrap::forwarded`]).

use envoy_types::pb::{
    envoy::{
        config::{
            accesslog::v3::{
                AccessLog, AccessLogFilter, ComparisonFilter, GrpcStatusFilter, OrFilter, ResponseFlagFilter,
                RuntimeFilter, StatusCodeFilter, access_log, access_log_filter::FilterSpecifier, comparison_filter,
                grpc_status_filter,
            },
            core::v3::{ApiVersion, GrpcService, RuntimeUInt32, grpc_service},
        },
        extensions::access_loggers::grpc::v3::{
            CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig, TcpGrpcAccessLogConfig,
        },
        r#type::v3::FractionalPercent,
    },
    google::protobuf::Duration,
};
use prost::{Message, Name};
use wharf_policy::model::Direction;

use super::{number, pack, runtime};
use crate::{
    bootstrap::XDS_CLUSTER,
    listener::{ListenerKey, Member},
};

/// Filter state object: with equal log settings, Envoy opens one stream.
pub(crate) const MEMBER_OBJECT: &str = "wharf.member";

pub(super) fn member_object(key: ListenerKey, member: Member) -> String {
    format!("{} {} {} {}", key.direction, key.port, member.id, member.epoch)
}

pub(crate) fn parse_member_object(text: &str) -> Option<(ListenerKey, Member)> {
    let mut words = text.split(' ');
    let direction = match words.next()? {
        "ingress" => Direction::Ingress,
        "egress" => Direction::Egress,
        _ => return None,
    };
    let key = ListenerKey { direction, port: words.next()?.parse().ok()? };
    let member = Member { id: words.next()?.parse().ok()?, epoch: words.next()?.parse().ok()? };
    words.next().is_none().then_some((key, member))
}

pub(super) fn http() -> Vec<AccessLog> {
    let config = HttpGrpcAccessLogConfig {
        common_config: Some(common("http")),
        // The entry's field has only methods of RFC 9110.
        additional_request_headers_to_log: vec![":method".into()],
        ..HttpGrpcAccessLogConfig::default()
    };
    vec![AccessLog { filter: Some(told()), ..log("envoy.access_loggers.http_grpc", &config) }]
}

/// Denied and failed requests; while watched, all.
fn told() -> AccessLogFilter {
    let error = ComparisonFilter {
        op: comparison_filter::Op::Ge.into(),
        value: Some(RuntimeUInt32 { default_value: 400, runtime_key: "wharf.error_status".into() }),
    };
    let filters = [
        FilterSpecifier::StatusCodeFilter(StatusCodeFilter { comparison: Some(error) }),
        // A denied gRPC request has status 200.
        FilterSpecifier::GrpcStatusFilter(GrpcStatusFilter {
            statuses: vec![grpc_status_filter::Status::PermissionDenied.into()],
            exclude: false,
        }),
        FilterSpecifier::ResponseFlagFilter(ResponseFlagFilter::default()),
        FilterSpecifier::RuntimeFilter(RuntimeFilter {
            runtime_key: runtime::TELL.into(),
            percent_sampled: Some(FractionalPercent { numerator: 100, ..FractionalPercent::default() }),
            use_independent_randomness: true,
        }),
    ];
    let filters = filters.map(|filter| AccessLogFilter { filter_specifier: Some(filter) }).into();
    AccessLogFilter { filter_specifier: Some(FilterSpecifier::OrFilter(OrFilter { filters })) }
}

pub(super) fn tcp() -> Vec<AccessLog> {
    vec![log("envoy.access_loggers.tcp_grpc", &TcpGrpcAccessLogConfig { common_config: Some(common("tcp")) })]
}

fn log<M: Message + Name>(name: &str, config: &M) -> AccessLog {
    AccessLog {
        name: name.into(),
        config_type: Some(access_log::ConfigType::TypedConfig(pack(config))),
        ..AccessLog::default()
    }
}

fn common(name: &str) -> CommonGrpcAccessLogConfig {
    CommonGrpcAccessLogConfig {
        log_name: name.into(),
        grpc_service: Some(GrpcService {
            target_specifier: Some(grpc_service::TargetSpecifier::EnvoyGrpc(grpc_service::EnvoyGrpc {
                cluster_name: XDS_CLUSTER.into(),
                ..grpc_service::EnvoyGrpc::default()
            })),
            ..GrpcService::default()
        }),
        transport_api_version: ApiVersion::V3.into(),
        buffer_flush_interval: Some(Duration { seconds: 0, nanos: 200_000_000 }),
        buffer_size_bytes: number(16 * 1024),
        filter_state_objects_to_log: vec![MEMBER_OBJECT.into()],
        ..CommonGrpcAccessLogConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_members_object_is_read_back_and_nothing_else_is() {
        let key = ListenerKey { direction: Direction::Egress, port: 15001 };
        let member = Member { id: 7, epoch: u64::MAX };
        assert_eq!(parse_member_object(&member_object(key, member)), Some((key, member)));
        for text in ["", "egress", "egress 1 2", "egress 1 2 3 4", "north 1 2 3", "egress 70000 2 3", "egress 1 2 -3"] {
            assert_eq!(parse_member_object(text), None, "{text:?}");
        }
    }
}
