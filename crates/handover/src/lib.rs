//! What the shim and the agent hand each other when they cannot talk.
//!
//! [`mark`]: the alias on the host side of an endpoint's link says whose it is, so that the shim can find a container's
//! link without the agent, and the agent without its records. [`queue`]: a DEL that found no agent leaves a record in a
//! directory, which the agent takes up at its start and while it runs. [`names`]: the rules for the texts in both.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

pub mod mark;
pub mod names;
pub mod queue;
