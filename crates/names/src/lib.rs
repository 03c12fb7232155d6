//! Names and ids that every room spells the same. A leaf: it knows nobody.
//!
//! [`ids`]: a type for each id, parsed once where it comes in. [`rules`]: the rules behind them. [`link`]: the name of the
//! host side of an endpoint's link. [`mark`]: the alias on it, which says whose it is.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

pub mod ids;
pub mod link;
pub mod mark;
pub mod rules;
