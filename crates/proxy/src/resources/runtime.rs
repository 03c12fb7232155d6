//! Values that Envoy takes without new listeners (RTDS): whether it tells of each request.

use envoy_types::pb::{
    envoy::service::runtime::v3::Runtime,
    google::protobuf::{Struct, Value, value::Kind},
};

/// Name of the resource, and of the layer in the bootstrap.
pub(crate) const RUNTIME: &str = "wharf";
/// Percent of the requests that servers got and answered without an error, of which Envoy tells. All others it always tells of. An Envoy
/// without the layer tells of all.
pub(super) const TELL: &str = "wharf.tell_forwarded";

/// The layer.
pub(crate) fn runtime(tell: bool) -> Runtime {
    let percent = Value { kind: Some(Kind::NumberValue(if tell { 100.0 } else { 0.0 })) };
    Runtime { name: RUNTIME.into(), layer: Some(Struct { fields: [(TELL.to_owned(), percent)].into() }) }
}
