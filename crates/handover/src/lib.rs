//! The handover from the shim to the agent when the agent does not answer.
//!
//! [`queue`]: a DEL without an agent leaves a deletion record in a directory. The agent processes the records at its
//! start and while it runs. The shim identifies the owner of a link by its mark (`wharf_names::mark`).
//! [`report`]: a command that the agent did not answer leaves a report of its outcome, which the agent counts. [`command`]: the
//! names of a command, which the shim's requests carry too.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

use std::time::Duration;

pub mod command;
pub mod queue;
pub mod report;

/// How long the shim waits for the agent's answer to a DEL before it runs the DEL itself. `wharf_core::plan` keeps
/// the deadlines of a delete's steps below this, so only an agent that hangs does not answer in time.
pub const DELETE_ANSWER: Duration = Duration::from_secs(30);

/// Directory, in the agent's run directory, of the locks by which commands of one attachment take turns while an IPAM plugin leases its addresses.
pub const IPAM_TURNS: &str = "ipam-turns";
