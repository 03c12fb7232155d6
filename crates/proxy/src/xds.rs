//! The xDS protocol without its transport: what a request means, and what to answer.
//!
//! Both variants become the same [`Request`] and come from the same [`Response`]: the state of the world (SotW), where a response holds every
//! resource of a type, and the incremental one (delta), where it holds what changed. The agent's own Envoy uses delta.

#[cfg(test)]
mod model_tests;
mod subscription;
mod wire;

pub use self::subscription::Variant;
pub(crate) use self::{
    subscription::{Request, Response, Stream},
    wire::{delta_request, delta_response, sotw_request, sotw_response},
};
