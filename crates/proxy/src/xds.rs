//! The xDS protocol without transport.
//!
//! Both variants use the same [`Request`] and [`Response`]: state of the world (SotW), where a response holds all
//! resources of a type, and incremental (delta), where it holds changes. The agent's Envoy uses delta.

#[cfg(test)]
mod model_tests;
mod subscription;
mod wire;

pub use self::subscription::Variant;
pub(crate) use self::{
    subscription::{Request, Response, Stream},
    wire::{delta_request, delta_response, sotw_request, sotw_response},
};
