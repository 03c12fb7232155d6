//! The handover from the shim to an agent that does not answer.
//!
//! [`queue`]: a DEL without an agent writes a deletion record to a directory. The agent processes the records at
//! start and while it runs. The shim identifies the owner of a link by its mark (`wharf_names::mark`). [`report`]:
//! the outcome of a command that the agent did not answer, for the agent to count. [`command`]: the description of a
//! command, also sent with the shim's requests.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

use std::time::Duration;

pub mod command;
pub mod queue;
pub mod report;

/// Time limit for the agent's answer to a DEL; afterwards the shim runs the DEL. `wharf_core::plan` keeps the
/// deadlines of a delete's steps below it, so only a hung agent exceeds it.
pub const DELETE_ANSWER: Duration = Duration::from_secs(30);

/// Directory of locks in the agent's run directory: serializes the commands of an attachment while an IPAM plugin
/// leases its addresses.
pub const IPAM_TURNS: &str = "ipam-turns";
