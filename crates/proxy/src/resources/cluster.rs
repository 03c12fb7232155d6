//! The only cluster: connections go to the client's destination.

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
use nix::{
    setsockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt},
};
use prost::Name;

use super::{http, number, pack, seconds};

pub(crate) const ORIGINAL_DESTINATION: &str = "original-destination";

/// Time for a TCP handshake: more than a SYN and two retransmissions (RFC 6298: 1 s, 2 s, 4 s).
const CONNECT_SECONDS: i64 = 10;
/// Idle time of an upstream connection, also after its client has disconnected.
const IDLE_SECONDS: i64 = 5;
/// `IP_BIND_ADDRESS_NO_PORT` (linux/in.h): the port is chosen when the destination is known, so connections to
/// several servers can share it.
const BIND_ADDRESS_NO_PORT: i64 = 24;
/// `IP_LOCAL_PORT_RANGE` (linux/in.h), Linux 6.3: lowest port, and the highest from bit 16 on.
const LOCAL_PORT_RANGE: i32 = 51;
/// Ports of connections to servers: below the usual ephemeral range (32768 to 60999) of the clients, whose address these
/// connections have. A client cannot open a connection with the addresses and ports of one of these.
const PORTS: [u16; 2] = [2_048, 32_767];

/// [`LOCAL_PORT_RANGE`] of a socket.
#[derive(Debug, Clone, Copy)]
struct LocalPortRange;
setsockopt_impl!(LocalPortRange, 0, LOCAL_PORT_RANGE, u32, sockopt::SetStruct<u32>);

/// The value of [`LOCAL_PORT_RANGE`], `None` on a kernel without this option: Envoy connects only if all options can be set.
fn port_range() -> Option<u32> {
    let [lowest, highest] = PORTS.map(u32::from);
    let value = highest << 16 | lowest;
    let probe = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).ok()?;
    setsockopt(&probe, LocalPortRange, &value).ok().map(|()| value)
}

/// The listener sets source address and mark; upstream connections serve only their client.
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
        // Envoy's defaults (1,024) are for one service; this cluster is all servers.
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
            socket_options: [
                Some(option("choose the port with the destination", BIND_ADDRESS_NO_PORT, 1)),
                port_range().map(|ports| option("no port of the client's", LOCAL_PORT_RANGE.into(), ports.into())),
            ]
            .into_iter()
            .flatten()
            .collect(),
            ..BindConfig::default()
        }),
        typed_extension_protocol_options: HashMap::from([(HttpProtocolOptions::full_name(), pack(&protocols))]),
        ..Cluster::default()
    }
}

fn option(description: &str, name: i64, value: i64) -> SocketOption {
    SocketOption {
        description: description.into(),
        level: 0, // IPPROTO_IP, for both families
        name,
        state: socket_option::SocketState::StatePrebind.into(),
        value: Some(socket_option::Value::IntValue(value)),
        ..SocketOption::default()
    }
}
