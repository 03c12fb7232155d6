//! Envoy resources of listeners, and the cluster for upstream connections. Filter chains of a listener:
//!
//! | chain | matches | does |
//! |---|---|---|
//! | `self` | connections to the listener's own port | closes them: they would loop |
//! | `http-MEMBER` | the member's connections without TLS | HTTP, each request checked |
//! | `tls-MEMBER` | the member's TLS handshakes for allowed names | passes bytes on |
//! | `denied-MEMBER` | the member's other TLS handshakes | closes and logs them |
//!
//! Other connections are closed. Routes (the request rules) are inline, because an acknowledged listener could lack a
//! separate resource (RDS).

mod access_log;
mod cluster;
mod forwarded_proto;
mod http;
mod listener;
mod routes;
mod runtime;

pub(crate) use self::{
    access_log::{MEMBER_OBJECT, parse_member_object},
    cluster::{ORIGINAL_DESTINATION, original_destination},
    listener::listener,
    runtime::{RUNTIME, runtime},
};

use envoy_types::pb::google::protobuf::{Any, BoolValue, Duration, UInt32Value};
use prost::{Message, Name};

pub(crate) type Resource = Any;

/// Deterministic, because Envoy compares listeners by content.
pub(crate) fn pack<M: Message + Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.encode_to_vec() }
}

const fn yes() -> Option<BoolValue> {
    Some(BoolValue { value: true })
}

const fn no() -> Option<BoolValue> {
    Some(BoolValue { value: false })
}

const fn number(value: u32) -> Option<UInt32Value> {
    Some(UInt32Value { value })
}

/// As an Envoy timeout, 0 is "never".
const fn seconds(seconds: i64) -> Option<Duration> {
    Some(Duration { seconds, nanos: 0 })
}
