//! Values that Envoy takes without new listeners (RTDS): whether it tells of each request, and how many connections a listener takes.

use envoy_types::pb::{
    envoy::service::runtime::v3::Runtime,
    google::protobuf::{Struct, Value, value::Kind},
};

use crate::{listener::ListenerKey, shares::Connections};

/// Name of the resource, and of the layer in the bootstrap.
pub(crate) const RUNTIME: &str = "wharf";
/// Percent of the requests that servers got and answered without an error, of which Envoy tells. All others it always tells of. An Envoy
/// without the layer tells of all.
pub(super) const TELL: &str = "wharf.tell_forwarded";

/// The layer.
pub(crate) fn runtime<'a>(
    tell: bool,
    listeners: impl Iterator<Item = &'a ListenerKey>,
    connections: Connections,
) -> Runtime {
    let value = |number| Value { kind: Some(Kind::NumberValue(number)) };
    let share = connections.of_listener as f64;
    // Envoy looks for it when it accepts a connection, before it waits for the first bytes.
    let limit = |key: &ListenerKey| (format!("envoy.resource_limits.listener.{key}.connection_limit"), value(share));
    let told = (TELL.to_owned(), value(if tell { 100.0 } else { 0.0 }));
    Runtime { name: RUNTIME.into(), layer: Some(Struct { fields: listeners.map(limit).chain([told]).collect() }) }
}
