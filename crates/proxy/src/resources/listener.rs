//! A listener and its filter chains.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use envoy_types::pb::{
    envoy::{
        config::{
            core::v3::{
                Address, CidrRange, DataSource, SocketAddress, SubstitutionFormatString, TrafficDirection, address,
                data_source, socket_address, substitution_format_string::Format,
            },
            listener::v3::{
                AdditionalAddress, Filter, FilterChain, FilterChainMatch, Listener as EnvoyListener, ListenerFilter,
                ListenerFilterChainMatchPredicate, filter,
                listener::{
                    ConnectionBalanceConfig,
                    connection_balance_config::{BalanceType, ExactBalance},
                },
                listener_filter,
                listener_filter_chain_match_predicate::Rule,
            },
        },
        extensions::filters::{
            common::set_filter_state::v3::{FilterStateValue, filter_state_value},
            listener::{original_src::v3::OriginalSrc, tls_inspector::v3::TlsInspector},
            network::{
                connection_limit::v3::ConnectionLimit,
                set_filter_state::v3::Config as SetFilterState,
                tcp_proxy::v3::{TcpProxy, tcp_proxy::ClusterSpecifier},
            },
        },
        r#type::v3::Int32Range,
    },
    google::protobuf::UInt64Value,
};
use prost::{Message, Name};
use wharf_policy::requests::ServerName;

use super::{ORIGINAL_DESTINATION, access_log, http, no, number, pack, routes, seconds, yes};
use wharf_policy::model::Direction;

use crate::{
    listener::{Listener, Member, mark},
    shares::{Connections, prefix},
};

/// The first bytes distinguish TLS from HTTP.
const FIRST_BYTES_SECONDS: i64 = 15;
/// Per connection and direction.
const BUFFER_BYTES: u32 = 256 * 1024;
/// No such cluster: Envoy logs and closes the connection.
const NOWHERE: &str = "nowhere";
/// Envoy's name for connections without TLS.
const PLAIN: &str = "raw_buffer";
const TLS: &str = "tls";

pub(crate) fn listener(wanted: &Listener, connections: Connections) -> EnvoyListener {
    let name = wanted.key().to_string();
    let any_v4 = socket_address(Ipv4Addr::UNSPECIFIED.into(), wanted.port);
    let any_v6 = socket_address(Ipv6Addr::UNSPECIFIED.into(), wanted.port);
    let ways = ways(wanted, &name);
    let owners = owners(wanted);
    let share = connections.of_endpoint;
    let members = owners
        .iter()
        .flat_map(|(member, addresses)| ways.iter().map(move |way| chain(wanted, way, *member, addresses, share)));
    EnvoyListener {
        // Envoy reads a connection's local address only on a socket bound to any address. (SO_ORIGINAL_DST is the
        // address before DNAT.)
        address: Some(any_v4),
        additional_addresses: vec![AdditionalAddress { address: Some(any_v6), ..AdditionalAddress::default() }],
        stat_prefix: name.clone(),
        filter_chains: std::iter::once(own(wanted, &name)).chain(members).collect(),
        listener_filters: vec![
            // Not on the listener's own port: silent hosts could hold all connections.
            ListenerFilter {
                filter_disabled: Some(ListenerFilterChainMatchPredicate {
                    rule: Some(Rule::DestinationPortRange(Int32Range {
                        start: wanted.port.into(),
                        end: i32::from(wanted.port) + 1,
                    })),
                }),
                ..listener_filter("envoy.filters.listener.tls_inspector", &TlsInspector::default())
            },
            // With the client's port, both legs would be one connection to connection tracking.
            listener_filter(
                "envoy.filters.listener.original_src",
                &OriginalSrc { bind_port: false, mark: mark(wanted.direction) },
            ),
        ],
        listener_filters_timeout: seconds(FIRST_BYTES_SECONDS),
        per_connection_buffer_limit_bytes: number(BUFFER_BYTES),
        transparent: yes(),
        // A lookup by port needs one socket per family.
        enable_reuse_port: no(),
        // Otherwise one worker takes most connections.
        connection_balance_config: Some(ConnectionBalanceConfig {
            balance_type: Some(BalanceType::ExactBalance(ExactBalance {})),
        }),
        traffic_direction: match wanted.direction {
            Direction::Ingress => TrafficDirection::Inbound,
            Direction::Egress => TrafficDirection::Outbound,
        }
        .into(),
        name,
        ..EnvoyListener::default()
    }
}

/// Envoy refuses two chains for an address; a member without address has none: it would match all.
fn owners(wanted: &Listener) -> BTreeMap<Member, BTreeSet<IpAddr>> {
    let mut owners: BTreeMap<IpAddr, Member> = BTreeMap::new();
    for (member, addresses) in &wanted.members {
        for address in addresses {
            let owner = owners.entry(address.to_canonical()).or_insert(*member);
            if (member.epoch, member.id) > (owner.epoch, owner.id) {
                *owner = *member;
            }
        }
    }
    let mut members: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (address, member) in owners {
        members.entry(member).or_default().insert(address);
    }
    members
}

/// Chain `self` of [`super`].
fn own(wanted: &Listener, name: &str) -> FilterChain {
    FilterChain {
        name: "self".into(),
        filter_chain_match: Some(FilterChainMatch {
            destination_port: number(wanted.port.into()),
            ..FilterChainMatch::default()
        }),
        filters: vec![network_filter(
            "envoy.filters.network.tcp_proxy",
            &TcpProxy {
                stat_prefix: name.into(),
                cluster_specifier: Some(ClusterSpecifier::Cluster(NOWHERE.into())),
                ..TcpProxy::default()
            },
        )],
        ..FilterChain::default()
    }
}

/// Kinds of connections.
struct Way {
    what: &'static str,
    transport: &'static str,
    server_names: Vec<String>,
    filter: Filter,
}

fn ways(wanted: &Listener, name: &str) -> Vec<Way> {
    let tcp_proxy = |cluster: &str| {
        network_filter(
            "envoy.filters.network.tcp_proxy",
            &TcpProxy {
                stat_prefix: name.into(),
                cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.into())),
                access_log: access_log::tcp(),
                ..TcpProxy::default()
            },
        )
    };
    let manager = http::connection_manager(name, routes::routes(&wanted.requests), access_log::http());
    let http = network_filter("envoy.filters.network.http_connection_manager", &manager);
    let mut ways = vec![
        Way { what: "http", transport: PLAIN, server_names: Vec::new(), filter: http },
        Way { what: "denied", transport: TLS, server_names: Vec::new(), filter: tcp_proxy(NOWHERE) },
    ];
    // Without names the chain would match every name.
    if !wanted.requests.server_names.is_empty() {
        let server_names = wanted.requests.server_names.iter().map(server_name).collect();
        ways.push(Way { what: "tls", transport: TLS, server_names, filter: tcp_proxy(ORIGINAL_DESTINATION) });
    }
    ways
}

fn chain(wanted: &Listener, way: &Way, member: Member, addresses: &BTreeSet<IpAddr>, share: u64) -> FilterChain {
    let prefixes = addresses.iter().copied().map(host_prefix).collect();
    let mut matching = FilterChainMatch {
        transport_protocol: way.transport.into(),
        server_names: way.server_names.clone(),
        ..FilterChainMatch::default()
    };
    match wanted.direction {
        Direction::Ingress => matching.prefix_ranges = prefixes,
        Direction::Egress => matching.source_prefix_ranges = prefixes,
    }
    // Envoy ends a chain's connections when its name changes.
    let round = wanted.rounds.get(&member).map(|round| format!("-{round}")).unwrap_or_default();
    FilterChain {
        name: format!("{}-{member}{round}", way.what),
        filter_chain_match: Some(matching),
        filters: vec![limit(wanted, member, share), objects(wanted, member), way.filter.clone()],
        ..FilterChain::default()
    }
}

fn server_name(name: &ServerName) -> String {
    match name {
        ServerName::Exact(name) => name.clone(),
        ServerName::Under(domain) => format!("*.{domain}"),
    }
}

fn limit(wanted: &Listener, member: Member, share: u64) -> Filter {
    network_filter(
        "envoy.filters.network.connection_limit",
        &ConnectionLimit {
            stat_prefix: prefix(wanted.key(), member),
            max_connections: Some(UInt64Value { value: share }),
            ..ConnectionLimit::default()
        },
    )
}

fn objects(wanted: &Listener, member: Member) -> Filter {
    let object = |name: &str, factory: &str, text: String| FilterStateValue {
        key: Some(filter_state_value::Key::ObjectKey(name.into())),
        factory_key: factory.into(),
        value: Some(filter_state_value::Value::FormatString(SubstitutionFormatString {
            format: Some(Format::TextFormatSource(DataSource {
                specifier: Some(data_source::Specifier::InlineString(text)),
                ..DataSource::default()
            })),
            ..SubstitutionFormatString::default()
        })),
        ..FilterStateValue::default()
    };
    let values = vec![
        object("envoy.network.transport_socket.original_dst_address", "", "%DOWNSTREAM_LOCAL_ADDRESS%".into()),
        object(access_log::MEMBER_OBJECT, "envoy.string", access_log::member_object(wanted.key(), member)),
    ];
    network_filter(
        "envoy.filters.network.set_filter_state",
        &SetFilterState { on_new_connection: values, ..SetFilterState::default() },
    )
}

fn network_filter<M: Message + Name>(name: &str, config: &M) -> Filter {
    Filter { name: name.into(), config_type: Some(filter::ConfigType::TypedConfig(pack(config))) }
}

fn listener_filter<M: Message + Name>(name: &str, config: &M) -> ListenerFilter {
    ListenerFilter {
        name: name.into(),
        config_type: Some(listener_filter::ConfigType::TypedConfig(pack(config))),
        ..ListenerFilter::default()
    }
}

fn host_prefix(address: IpAddr) -> CidrRange {
    let length = if address.is_ipv4() { 32 } else { 128 };
    CidrRange { address_prefix: address.to_string(), prefix_len: number(length) }
}

fn socket_address(address: IpAddr, port: u16) -> Address {
    Address {
        address: Some(address::Address::SocketAddress(SocketAddress {
            address: address.to_string(),
            port_specifier: Some(socket_address::PortSpecifier::PortValue(port.into())),
            ..SocketAddress::default()
        })),
    }
}
