//! Envoy resources. Filter chains of a listener:
//!
//! | chain | matches | does |
//! |---|---|---|
//! | `self` | connections to the listener's own port | closes: they would loop |
//! | `http-MEMBER` | connections without TLS | checks each HTTP request |
//! | `tls-MEMBER` | TLS handshakes for allowed names | forwards |
//! | `denied-MEMBER` | other TLS handshakes | closes and logs |
//!
//! Other connections are closed. Routes are inline: an acknowledged listener could lack a separate resource (RDS).

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

/// Deterministic: Envoy compares listeners by content.
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
