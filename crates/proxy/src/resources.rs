//! Resources of Envoy: what a listener is in Envoy's words, and the cluster that every connection leaves by.
//!
//! A listener has at most three filter chains for a member, and one for itself:
//!
//! | chain | matches | does |
//! |---|---|---|
//! | `self` | connections to the listener's own port | closes them: nobody redirected them, and they would come back for ever |
//! | `http-MEMBER` | the member's connections without TLS | HTTP, each request judged |
//! | `tls-MEMBER` | the member's TLS handshakes for names that are allowed | passes bytes on, unopened |
//! | `denied-MEMBER` | the member's other TLS handshakes | closes and logs them |
//!
//! Nothing else matches, and Envoy closes what matches no chain. Routes, which are the rules about requests, are inline: in another resource (RDS)
//! an acknowledged listener could still lack them.

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

/// A resource, ready to be sent.
pub(crate) type Resource = Any;

/// Packs a message the same way each time: Envoy compares listeners by their content.
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

/// A time in whole seconds; 0 is "never" where Envoy takes a timeout.
const fn seconds(seconds: i64) -> Option<Duration> {
    Some(Duration { seconds, nanos: 0 })
}
