//! Errors of policy.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use wharf_core::kernel::KernelError;
use wharf_policy::{
    compile::{self, Table, TooLarge},
    model::PolicyName,
    read::Refusal,
};

use crate::limits::{LIMITS, PARTS};

/// Failure of a change of policy.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PolicyError {
    /// Invalid text.
    #[error("{}", told(.0))]
    Refused(Vec<Refusal>),
    /// Imported texts are too long.
    #[error("import policies: {bytes} bytes of text, at most {most} are kept; delete policies, or shorten the texts")]
    Texts {
        /// Bytes with the new text.
        bytes: usize,
        /// Limit.
        most: usize,
    },
    /// Unknown policy.
    #[error("delete {name}: there is no such policy")]
    Unknown {
        name: PolicyName,
        /// Namespaces with a policy of this kind and name.
        elsewhere: Vec<String>,
    },
    /// The policy directory owns the policy.
    #[error("change {name}: it is of the policy directory's file {file}; change or remove that file")]
    OfDirectory { name: PolicyName, file: String },
    /// The cluster feed owns the policy.
    #[error("change {name}: the cluster feed has it; change it in the cluster")]
    OfCluster { name: PolicyName },
    /// Invalid namespace or labels.
    #[error("set labels of namespace {name}: {why}")]
    Namespace {
        /// Name as given.
        name: String,
        /// Broken rule.
        why: String,
    },
    #[error("delete namespace {0}: it was given no labels")]
    UnknownNamespace(String),
    /// Rows do not fit; nothing has changed.
    #[error("{0}{until_boot}; the policies of before stay in force", until_boot = until_boot(.0))]
    Rows(#[from] compile::Refused),
    /// The proxy refused a listener; nothing has changed.
    #[error("{0}; the policies of before stay in force")]
    Proxy(String),
    /// The kernel lacks rows.
    #[error(
        "put policy into the kernel: {0}; it is tried again every 2 s, and endpoints that wait for it are refused until then"
    )]
    Kernel(#[from] KernelError),
    /// Saving failed; nothing has changed.
    #[error("keep policies in {}: {why}; nothing has changed", .path.display())]
    NotKept { path: PathBuf, why: Arc<std::io::Error> },
    /// Unusable policy directory.
    #[error("read the policy directory {}: {why}; what its files said stays in force", .path.display())]
    Directory { path: PathBuf, why: String },
    /// The policy file, or the rows of the cluster feed, are gone, but the kernel has rules.
    #[error("{}", lost(.path, *.of_cluster))]
    Lost {
        path: PathBuf,
        /// The rows of the cluster feed are gone.
        of_cluster: bool,
    },
    /// Unusable policy file.
    #[error(
        "read policies of {}: {why}; restore the file, or remove it and import the policies again: until then the kernel's rules \
         stay in force",
        .path.display()
    )]
    Unusable { path: PathBuf, why: String },
}

/// Refusals of a text, one per line.
#[must_use]
pub fn told(refusals: &[Refusal]) -> String {
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Remedy for an earlier version's table.
fn until_boot(refused: &compile::Refused) -> String {
    let (fit, limit) = match refused {
        compile::Refused::TooLarge(TooLarge { table: Table::Ipcache, limit, .. }) => (LIMITS.ipcache, *limit),
        compile::Refused::TooLarge(TooLarge { table: Table::Networks, limit, .. }) => (LIMITS.ipcache / PARTS, *limit),
        _ => return String::new(),
    };
    if limit >= fit {
        return String::new();
    }
    format!("; until the node boots, the table of addresses is one of an earlier version: after that, {fit} fit")
}

fn lost(path: &Path, of_cluster: bool) -> String {
    const STAY: &str = "the rules stay in force as they are, new containers are refused and new labels wait, until";
    if of_cluster {
        return format!(
            "rows of the cluster feed are lost, which the rules need; {STAY} a producer has sent every row and this \
             version can read its policies (`wharf cluster feed`); a start without `--cluster-feed` gives them up"
        );
    }
    format!(
        "the kernel has rules of policies, and {}, which kept the policies, is gone; {STAY} the policies are imported again \
         (`wharf policy import`) or given up, which opens containers (`wharf policy delete --all`)",
        path.display()
    )
}
