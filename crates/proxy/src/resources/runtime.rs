//! Values that change without new listeners (RTDS).

use envoy_types::pb::{
    envoy::service::runtime::v3::Runtime,
    google::protobuf::{Struct, Value, value::Kind},
};

use crate::{listener::ListenerKey, shares::Connections};

/// Also the name of the bootstrap's layer.
pub(crate) const RUNTIME: &str = "wharf";
/// Percentage of logged successful requests; 100 without the layer.
pub(super) const TELL: &str = "wharf.tell_forwarded";

pub(crate) fn runtime<'a>(
    tell: bool,
    listeners: impl Iterator<Item = &'a ListenerKey>,
    connections: Connections,
) -> Runtime {
    let value = |number| Value { kind: Some(Kind::NumberValue(number)) };
    let share = connections.of_listener as f64;
    let limit = |key: &ListenerKey| (format!("envoy.resource_limits.listener.{key}.connection_limit"), value(share));
    let told = (TELL.to_owned(), value(if tell { 100.0 } else { 0.0 }));
    Runtime { name: RUNTIME.into(), layer: Some(Struct { fields: listeners.map(limit).chain([told]).collect() }) }
}
