//! Envoy's single upstream cluster: the original destination.

use std::collections::HashMap;

use envoy_types::pb::envoy::{
    config::{
        cluster::v3::{
            CircuitBreakers, Cluster, circuit_breakers,
            cluster::{ClusterDiscoveryType, DiscoveryType, LbPolicy},
        },
        core::v3::{
            BindConfig, Http1ProtocolOptions, Http2ProtocolOptions, HttpProtocolOptions as CommonOptions, SocketOption,
            socket_option,
        },
    },
    extensions::upstreams::http::v3::{
        HttpProtocolOptions,
        http_protocol_options::{UpstreamProtocolOptions, UseDownstreamHttpConfig},
    },
};
use prost::Name;

use super::{http, number, pack, seconds};

pub(crate) const ORIGINAL_DESTINATION: &str = "original-destination";

/// More than a SYN and two retransmissions (RFC 6298: 1 s, 2 s, 4 s).
const CONNECT_SECONDS: i64 = 10;
/// Short: after the client disconnects, the connection counts for it where both ends redirect.
const IDLE_SECONDS: i64 = 1;
/// `IP_BIND_ADDRESS_NO_PORT` (linux/in.h): connections can share a port.
const BIND_ADDRESS_NO_PORT: i64 = 24;

/// The listener sets source address and mark.
pub(crate) fn original_destination() -> Cluster {
    let protocols = HttpProtocolOptions {
        upstream_protocol_options: Some(UpstreamProtocolOptions::UseDownstreamProtocolConfig(
            UseDownstreamHttpConfig {
                http_protocol_options: Some(Http1ProtocolOptions {
                    enable_trailers: true,
                    header_key_format: Some(http::header_case()),
                    ..Http1ProtocolOptions::default()
                }),
                http2_protocol_options: Some(Http2ProtocolOptions::default()),
                ..UseDownstreamHttpConfig::default()
            },
        )),
        common_http_protocol_options: Some(CommonOptions {
            idle_timeout: seconds(IDLE_SECONDS),
            ..CommonOptions::default()
        }),
        ..HttpProtocolOptions::default()
    };
    Cluster {
        name: ORIGINAL_DESTINATION.into(),
        connect_timeout: seconds(CONNECT_SECONDS),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::OriginalDst.into())),
        lb_policy: LbPolicy::ClusterProvided.into(),
        connection_pool_per_downstream_connection: true,
        // Envoy's defaults (1,024) are for one service.
        circuit_breakers: Some(CircuitBreakers {
            thresholds: vec![circuit_breakers::Thresholds {
                max_connections: number(u32::MAX),
                max_pending_requests: number(u32::MAX),
                max_requests: number(u32::MAX),
                ..circuit_breakers::Thresholds::default()
            }],
            ..CircuitBreakers::default()
        }),
        upstream_bind_config: Some(BindConfig {
            socket_options: vec![SocketOption {
                description: "choose the port with the destination".into(),
                level: 0, // IPPROTO_IP, for both families
                name: BIND_ADDRESS_NO_PORT,
                state: socket_option::SocketState::StatePrebind.into(),
                value: Some(socket_option::Value::IntValue(1)),
                ..SocketOption::default()
            }],
            ..BindConfig::default()
        }),
        typed_extension_protocol_options: HashMap::from([(HttpProtocolOptions::full_name(), pack(&protocols))]),
        ..Cluster::default()
    }
}
