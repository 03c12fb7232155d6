//! Access log records (ALS).

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, SystemTime},
};

use envoy_types::pb::{
    envoy::{
        config::core::v3::{Address, address::Address as AddressKind, socket_address::PortSpecifier},
        data::accesslog::v3::{
            AccessLogCommon, HttpAccessLogEntry, ResponseFlags, TcpAccessLogEntry, http_access_log_entry::HttpVersion,
        },
        service::accesslog::v3::{StreamAccessLogsMessage, stream_access_logs_message::LogEntries},
    },
    google::protobuf::{Any, StringValue},
};
use prost::{Message, Name};

use crate::{
    listener::{ListenerKey, Member},
    resources::{MEMBER_OBJECT, parse_member_object},
};

/// Bytes of a text from a client.
const MAX_TEXT: usize = 2048;

/// An HTTP request or TLS connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Listener of the connection.
    pub listener: ListenerKey,
    /// Endpoint with the policy.
    pub member: Member,
    /// Start.
    pub at: SystemTime,
    /// Time to the end.
    pub duration: Option<Duration>,
    /// Client address.
    pub source: Option<SocketAddr>,
    /// The client's destination.
    pub destination: Option<SocketAddr>,
    /// Connected server; `None` without connection.
    pub server: Option<SocketAddr>,
    /// Result of the policy check.
    pub verdict: Verdict,
    /// Request or connection.
    pub content: Content,
    /// Whether [`Status::forwarded`](crate::Status::forwarded) includes it.
    pub is_counted: bool,
    /// Envoy's response flags (`UF`, `UC`, `NC`), comma-separated.
    pub flags: String,
}

/// Verdict on a request or connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Allowed, and received by the server.
    Forwarded,
    /// No rule allowed it.
    Denied,
    /// Unreadable request, or unreachable server.
    Failed,
}

/// Content; texts are cut to 2 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// An HTTP request.
    Http {
        /// `HTTP/1.1`, `HTTP/2`; `HTTP` if unknown.
        protocol: &'static str,
        /// Method; empty if unreadable.
        method: String,
        /// Normalized path with query.
        path: String,
        /// With port if present.
        host: String,
        /// Response status; 0 for none.
        status: u16,
    },
    /// A TLS connection.
    Tls {
        /// Server name, or empty.
        server_name: String,
    },
}

/// Drops entries without member, of other listeners.
pub(crate) fn records(message: StreamAccessLogsMessage) -> Vec<Record> {
    match message.log_entries {
        Some(LogEntries::HttpLogs(logs)) => logs.log_entry.into_iter().filter_map(http).collect(),
        Some(LogEntries::TcpLogs(logs)) => logs.log_entry.into_iter().filter_map(tls).collect(),
        None => Vec::new(),
    }
}

fn http(entry: HttpAccessLogEntry) -> Option<Record> {
    let common = entry.common_properties?;
    let (request, response) = (entry.request.unwrap_or_default(), entry.response.unwrap_or_default());
    // The second is of an earlier agent's listeners.
    let denied = ["direct_response", "rbac_access_denied"];
    let verdict = if denied.iter().any(|details| response.response_code_details.starts_with(details)) {
        Verdict::Denied
    } else if common.upstream_remote_address.is_some() && response.response_code_details.starts_with("via_upstream") {
        Verdict::Forwarded
    } else {
        Verdict::Failed
    };
    let method = request.request_headers.get(":method").cloned().unwrap_or_default();
    let content = Content::Http {
        protocol: match HttpVersion::try_from(entry.protocol_version) {
            Ok(HttpVersion::Http10) => "HTTP/1.0",
            Ok(HttpVersion::Http11) => "HTTP/1.1",
            Ok(HttpVersion::Http2) => "HTTP/2",
            _ => "HTTP",
        },
        method: cut(method),
        path: cut(request.path),
        host: cut(request.authority),
        status: response.response_code.and_then(|code| u16::try_from(code.value).ok()).unwrap_or(0),
    };
    record(common, verdict, content)
}

fn tls(entry: TcpAccessLogEntry) -> Option<Record> {
    let common = entry.common_properties?;
    let verdict = if common.response_flags.as_ref().is_some_and(|flags| flags.no_cluster_found) {
        Verdict::Denied
    } else if common.upstream_remote_address.is_some()
        && common.response_flags.as_ref().is_none_or(|flags| !flags.upstream_connection_failure)
    {
        Verdict::Forwarded
    } else {
        Verdict::Failed
    };
    let server_name = common.tls_properties.as_ref().map(|tls| tls.tls_sni_hostname.clone()).unwrap_or_default();
    record(common, verdict, Content::Tls { server_name: cut(server_name) })
}

fn record(mut common: AccessLogCommon, verdict: Verdict, content: Content) -> Option<Record> {
    let (listener, member) = parse_member_object(&text(&common.filter_state_objects.remove(MEMBER_OBJECT)?)?)?;
    let since_epoch = common.start_time.and_then(|time| span(time.seconds, time.nanos))?;
    Some(Record {
        listener,
        member,
        at: SystemTime::UNIX_EPOCH.checked_add(since_epoch)?,
        duration: common.duration.and_then(|duration| span(duration.seconds, duration.nanos)),
        source: common.downstream_remote_address.as_ref().and_then(address),
        destination: common.downstream_local_address.as_ref().and_then(address),
        server: common.upstream_remote_address.as_ref().and_then(address),
        is_counted: false,
        verdict,
        content,
        flags: common.response_flags.map(|flags| self::flags(&flags)).unwrap_or_default(),
    })
}

fn span(seconds: i64, nanos: i32) -> Option<Duration> {
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

fn text(object: &Any) -> Option<String> {
    (object.type_url == StringValue::type_url())
        .then(|| StringValue::decode(object.value.as_slice()).ok())
        .flatten()
        .map(|text| text.value)
}

fn address(address: &Address) -> Option<SocketAddr> {
    let Some(AddressKind::SocketAddress(socket)) = &address.address else { return None };
    let Some(PortSpecifier::PortValue(port)) = socket.port_specifier else { return None };
    let ip: IpAddr = socket.address.parse().ok()?;
    Some(SocketAddr::new(ip.to_canonical(), u16::try_from(port).ok()?))
}

fn flags(flags: &ResponseFlags) -> String {
    let all = [
        (flags.upstream_connection_failure, "UF"),
        (flags.upstream_connection_termination, "UC"),
        (flags.upstream_remote_reset, "UR"),
        (flags.upstream_overflow, "UO"),
        (flags.upstream_protocol_error, "UPE"),
        (flags.downstream_connection_termination, "DC"),
        (flags.downstream_protocol_error, "DPE"),
        (flags.downstream_remote_reset, "DR"),
        (flags.stream_idle_timeout, "SI"),
        (flags.no_cluster_found, "NC"),
        (flags.no_route_found, "NR"),
        (flags.local_reset, "LR"),
        (flags.overload_manager, "OM"),
    ];
    all.iter().filter_map(|(raised, name)| raised.then_some(*name)).collect::<Vec<_>>().join(",")
}

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
    text
}
