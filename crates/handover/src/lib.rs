//! What the shim and the agent hand each other when they cannot talk.
//!
//! [`queue`]: a DEL that found no agent leaves a record in a directory, which the agent takes up at its start and while it
//! runs. Whose a link is, the shim reads from its mark (`wharf_names::mark`).
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

use std::time::Duration;

pub mod queue;

/// How long the shim waits for the agent's answer to a DEL before it takes the DEL over. `wharf_core::plan` holds the bounds
/// of a delete's steps below it, so only an agent that hangs does not answer in this time.
pub const DELETE_ANSWER: Duration = Duration::from_secs(30);
