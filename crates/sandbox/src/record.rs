//! A sandbox's record: a versioned JSON document.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wharf_names::ids::{ContainerId, IfName, NetworkName};

use crate::name::SandboxName;

/// The only supported version.
pub const VERSION: u32 = 1;

/// State of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub version: u32,
    /// Also the file's name.
    pub name: SandboxName,
    /// CNI container id. Its random part protects a later sandbox of this name from a late delete.
    pub container_id: ContainerId,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Boot of the namespace.
    pub boot_id: String,
    pub phase: Phase,
    /// The last operation's error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Network namespace.
    pub netns: Netns,
    /// Labels for plugins (`args.cni.labels`).
    pub labels: BTreeMap<String, String>,
    /// In order of attachment.
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
    /// Incomplete. If the lock is free, the creator died.
    Creating,
    /// Complete.
    Ready,
    /// A create and its rollback failed.
    Broken,
    /// A stop is incomplete.
    Stopping,
    /// Only the record is left.
    Stopped,
}

/// A network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Netns {
    /// Path of the bind mount.
    pub path: PathBuf,
    pub identity: Identity,
}

/// Identity within a boot. The kernel reuses inode numbers, but not cookies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Device of nsfs.
    pub dev: u64,
    pub inode: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14), else 0.
    pub cookie: u64,
}

/// A network of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    pub network: NetworkName,
    /// In the sandbox.
    pub ifname: IfName,
    /// Configurations without `prevResult`. Stored, because their source may change before the DEL.
    pub plugins: Vec<Value>,
    pub cni_args: String,
    /// The network allows CHECK.
    pub check: bool,
    /// Number of plugins, from the first, that need a DEL. Written before each ADD and after each DEL.
    pub to_delete: usize,
    /// Result of the chain.
    pub result: Option<Value>,
}

impl Attachment {
    /// CNI version of the plugins.
    #[must_use]
    pub fn cni_version(&self) -> &str {
        self.plugins.first().and_then(|p| p.get("cniVersion")?.as_str()).unwrap_or_default()
    }

    /// The interface in the sandbox, if the result lists it.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        let all = self.result.as_ref()?.get("interfaces")?.as_array()?;
        let is_inside = |i: &&Value| i.get("sandbox").and_then(Value::as_str).is_some_and(|path| !path.is_empty());
        let names = all.iter().filter(is_inside).filter_map(|i| i.get("name")?.as_str());
        names.into_iter().find(|name| *name == self.ifname.as_str())
    }

    /// The result's addresses, with prefix lengths.
    #[must_use]
    pub fn addresses(&self) -> Vec<&str> {
        let ips = self.result.as_ref().and_then(|r| r.get("ips")?.as_array()).map(Vec::as_slice).unwrap_or_default();
        ips.iter().filter_map(|ip| ip.get("address")?.as_str()).collect()
    }
}

/// A process, identified within a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22); differs for a reused pid.
    pub started: u64,
}

/// Current boot id.
///
/// # Errors
/// `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
