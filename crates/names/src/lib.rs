//! Names and ids shared by all crates. Depends only on `wharf_common`.
//!
//! [`attached`]: names of attached programs. [`ids`]: a type for each id. [`rules`]: the rules of names. [`link`]:
//! the name of the host side of an endpoint's link. [`mark`]: the alias of the host side, which names the link's
//! owner. [`port`]: which published ports conflict.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

pub mod attached;
pub mod ids;
pub mod link;
pub mod mark;
pub mod port;
pub mod rules;
