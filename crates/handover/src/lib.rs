//! The handover from the shim to an agent that does not answer: deletion records ([`queue`]), outcomes ([`report`]) of
//! a [`command`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

use std::time::Duration;

pub mod command;
pub mod queue;
pub mod report;

/// Time limit of a DEL's answer; then the shim runs the DEL. Above a delete's deadlines (`wharf_core::plan`): only a
/// hung agent exceeds it.
pub const DELETE_ANSWER: Duration = Duration::from_secs(30);

/// Lock directory in the run directory: serializes an attachment's commands that use an IPAM plugin.
pub const IPAM_TURNS: &str = "ipam-turns";
