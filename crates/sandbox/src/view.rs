//! What is told of sandboxes.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::Serialize;

use crate::{name::SandboxName, process::Running, record::Record};

/// What a sandbox is, by its record and by what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// A command is making it.
    Creating,
    /// Whole.
    Ready,
    /// An interface that a plugin made is not in its namespace any more.
    Detached,
    /// Its create was interrupted.
    Interrupted,
    /// Its create failed, and so did the undo.
    Broken,
    /// A command is stopping it.
    Stopping,
    /// A stop failed or was interrupted.
    StopUnfinished,
    /// Stopped by a command.
    Stopped,
    /// Its namespace is gone: the node was started anew, or somebody removed it.
    Gone,
    /// Its record cannot be used.
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

/// A sandbox in a list. Of a damaged one only name, state and problem are known.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Its name.
    pub name: SandboxName,
    /// What it is.
    pub state: State,
    /// Why the last operation on it failed.
    pub problem: Option<String>,
    /// CNI's container id.
    pub container_id: Option<String>,
    /// Milliseconds since the Unix epoch; 0 when it is not known.
    pub created_unix_ms: u64,
    /// The file of its namespace.
    pub netns: Option<PathBuf>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Its networks, in the order of its interfaces.
    pub networks: Vec<String>,
    /// Addresses with their prefix lengths, in that order.
    pub addresses: Vec<String>,
    /// How many processes live in it.
    pub processes: usize,
}

/// Everything about a sandbox.
#[derive(Debug, Clone, Serialize)]
pub struct Details {
    /// What it is.
    pub state: State,
    /// Its record.
    #[serde(flatten)]
    pub record: Record,
    /// What lives in it.
    pub running: Vec<Running>,
    /// What the plugins' CHECK says of each attachment; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Vec<Checked>>,
}

/// What CHECK says of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// The network.
    pub network: String,
    /// The interface.
    pub ifname: String,
    /// False when the network's version or `disableCheck` forbids it.
    pub checked: bool,
    /// What is amiss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Details {
    /// Whether nothing is known to be amiss.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.check.iter().flatten().all(|c| c.problem.is_none())
    }
}
