//! The xDS protocol without transport, in both variants.

#[cfg(test)]
mod model_tests;
mod subscription;
mod wire;

pub use self::subscription::Variant;
pub(crate) use self::{
    subscription::{Request, Response, Stream},
    wire::{delta_request, delta_response, sotw_request, sotw_response},
};
