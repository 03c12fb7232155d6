//! The record of a sandbox: a versioned JSON document.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wharf_names::ids::{ContainerId, IfName, NetworkName};

use crate::name::SandboxName;

/// Written version; no other is read.
pub const VERSION: u32 = 1;

/// State of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// Name of sandbox and file.
    pub name: SandboxName,
    /// CNI container id. A random part keeps a late delete from a later sandbox with the name.
    pub container_id: ContainerId,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Boot of the namespace, which ends with it.
    pub boot_id: String,
    /// Phase.
    pub phase: Phase,
    /// Error of the last operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Network namespace.
    pub netns: Netns,
    /// Labels for the plugins (`args.cni.labels`).
    pub labels: BTreeMap<String, String>,
    /// Networks in the order of attachment.
    pub attachments: Vec<Attachment>,
    /// Processes that `run` started.
    pub processes: Vec<Process>,
}

impl Record {
    /// Parses a record.
    ///
    /// # Errors
    /// Why the text is no record of [`VERSION`].
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        // Another version may have other fields.
        let value: Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        match value.get("version").and_then(Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => return Err(format!("its version is {version}, and only {VERSION} is known here")),
            None => return Err("it has no version".to_owned()),
        }
        serde_json::from_value(value).map_err(|e| e.to_string())
    }
}

/// Phase of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Incomplete. If the lock is free, the creating process has died.
    Creating,
    /// Complete.
    Ready,
    /// A create failed, and so did its rollback.
    Broken,
    /// A stop has not finished.
    Stopping,
    /// Only the record is left.
    Stopped,
}

/// A network namespace and its identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Netns {
    /// Path of the bind mount.
    pub path: PathBuf,
    /// Identity.
    pub identity: Identity,
}

/// Identity within a boot. The kernel reuses inode numbers, not cookies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Device of nsfs.
    pub dev: u64,
    /// Inode.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14); 0 if the kernel has none.
    pub cookie: u64,
}

/// One network of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    /// Network.
    pub network: NetworkName,
    /// Interface in the sandbox.
    pub ifname: IfName,
    /// Configuration of each plugin, without `prevResult`. Stored, because the source may change before the DEL.
    pub plugins: Vec<Value>,
    /// `CNI_ARGS`.
    pub cni_args: String,
    /// Whether the network allows CHECK.
    pub check: bool,
    /// Number of plugins, from the first, that need a DEL. Written before each ADD and after each DEL.
    pub to_delete: usize,
    /// Result of the whole chain.
    pub result: Option<Value>,
}

impl Attachment {
    /// CNI version of the plugins.
    #[must_use]
    pub fn cni_version(&self) -> &str {
        self.plugins.first().and_then(|p| p.get("cniVersion")?.as_str()).unwrap_or_default()
    }

    /// Interface in the sandbox, if the result lists one.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        let all = self.result.as_ref()?.get("interfaces")?.as_array()?;
        let is_inside = |i: &&Value| i.get("sandbox").and_then(Value::as_str).is_some_and(|path| !path.is_empty());
        let names = all.iter().filter(is_inside).filter_map(|i| i.get("name")?.as_str());
        names.into_iter().find(|name| *name == self.ifname.as_str())
    }

    /// Addresses in the result, with prefix lengths.
    #[must_use]
    pub fn addresses(&self) -> Vec<&str> {
        let ips = self.result.as_ref().and_then(|r| r.get("ips")?.as_array()).map(Vec::as_slice).unwrap_or_default();
        ips.iter().filter_map(|ip| ip.get("address")?.as_str()).collect()
    }
}

/// Identifies a process within a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22); differs for a reused pid.
    pub started: u64,
}

/// Id of the current boot.
///
/// # Errors
/// `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
