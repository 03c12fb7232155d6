//! The xDS protocol without transport: state of the world (SotW), where a response holds all resources of a type, and
//! incremental (delta). The agent's Envoy uses delta.

#[cfg(test)]
mod model_tests;
mod subscription;
mod wire;

pub use self::subscription::Variant;
pub(crate) use self::{
    subscription::{Request, Response, Stream},
    wire::{delta_request, delta_response, sotw_request, sotw_response},
};
