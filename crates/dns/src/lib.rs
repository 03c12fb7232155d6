//! x
pub mod cache;
pub mod wire;
