//! Names and ids of API, records, kernel and plugin.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

pub mod attached;
pub mod endpoint;
pub mod ids;
pub mod link;
pub mod mark;
pub mod port;
pub mod rules;
