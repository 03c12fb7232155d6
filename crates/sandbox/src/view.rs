//! Views of sandboxes for the CLI.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::Serialize;

use crate::{name::SandboxName, process::Running, record::Record};

/// State by record and kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Being created.
    Creating,
    /// Complete.
    Ready,
    /// An interface is gone.
    Detached,
    /// A create was interrupted.
    Interrupted,
    /// A create and its rollback failed.
    Broken,
    /// Being stopped.
    Stopping,
    /// A stop failed or was interrupted.
    StopUnfinished,
    /// Stopped by a command.
    Stopped,
    /// The namespace is gone, for example after a reboot.
    Gone,
    /// The record is unusable.
    Damaged,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creating => "being created",
            Self::Ready => "ready",
            Self::Detached => "detached (an interface is gone)",
            Self::Interrupted => "broken (its create was interrupted)",
            Self::Broken => "broken (its create failed)",
            Self::Stopping => "being stopped",
            Self::StopUnfinished => "stopping (its stop has not ended)",
            Self::Stopped => "stopped",
            Self::Gone => "stopped (its namespace is gone)",
            Self::Damaged => "damaged (its record cannot be used)",
        })
    }
}

/// A listed sandbox. If damaged, it has only name, state and problem.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub name: SandboxName,
    pub state: State,
    /// The last operation's error.
    pub problem: Option<String>,
    /// CNI container id.
    pub container_id: Option<String>,
    /// Milliseconds since the Unix epoch; 0 if unknown.
    pub created_unix_ms: u64,
    /// The namespace's file.
    pub netns: Option<PathBuf>,
    pub labels: BTreeMap<String, String>,
    /// In interface order.
    pub networks: Vec<String>,
    /// With prefix lengths, in the same order.
    pub addresses: Vec<String>,
    /// Number of processes.
    pub processes: usize,
}

/// State and record.
#[derive(Debug, Clone, Serialize)]
pub struct Details {
    pub state: State,
    #[serde(flatten)]
    pub record: Record,
    /// Processes.
    pub running: Vec<Running>,
    /// CHECK by attachment; only on request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Vec<Checked>>,
}

/// CHECK of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checked {
    pub network: String,
    pub ifname: String,
    /// False if the network forbids CHECK.
    pub checked: bool,
    /// Problem, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Details {
    /// No CHECK reports a problem.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.check.iter().flatten().all(|c| c.problem.is_none())
    }
}
