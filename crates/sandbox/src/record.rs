//! What is kept of a sandbox: one JSON document, with the version of its form.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wharf_names::ids::{ContainerId, IfName, NetworkName};

use crate::name::SandboxName;

/// Version of the form that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// A sandbox, as its file has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// Its name; that of the file, too.
    pub name: SandboxName,
    /// CNI's container id: the name and a random part, so that a late delete never meets a later sandbox of the name.
    pub container_id: ContainerId,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// The boot in which it was made; its namespace ended with it.
    pub boot_id: String,
    /// How far it is.
    pub phase: Phase,
    /// Why the last operation on it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Its network namespace.
    pub netns: Netns,
    /// Labels, as the plugins get them (`args.cni.labels`).
    pub labels: BTreeMap<String, String>,
    /// Its networks, in the order in which they are attached.
    pub attachments: Vec<Attachment>,
    /// What `run` started and may live.
    pub processes: Vec<Process>,
}

impl Record {
    /// Reads a file's text.
    ///
    /// # Errors
    /// Why it is no record of [`VERSION`].
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        // The version first: another one may have any other field.
        let value: Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        match value.get("version").and_then(Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => return Err(format!("its version is {version}, and only {VERSION} is known here")),
            None => return Err("it has no version".to_owned()),
        }
        serde_json::from_value(value).map_err(|e| e.to_string())
    }
}

/// How far a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Namespace and networks are being made; whoever did it has died, if nobody holds the lock.
    Creating,
    /// Whole.
    Ready,
    /// A create failed, and so did taking back what it had made.
    Broken,
    /// A stop has begun and not ended.
    Stopping,
    /// Nothing is left but the name and this record.
    Stopped,
}

/// A network namespace, and how it is told from every other one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Netns {
    /// The file that it is bound to.
    pub path: PathBuf,
    /// Which one it is.
    pub identity: Identity,
}

/// What tells a namespace from the others of a boot. The kernel reuses numbers of inodes, not cookies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Device of nsfs.
    pub dev: u64,
    /// Its inode.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14); 0 where the kernel has none.
    pub cookie: u64,
}

/// One network of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    /// The network.
    pub network: NetworkName,
    /// The interface in the sandbox.
    pub ifname: IfName,
    /// The configuration of each plugin, as it is executed but for `prevResult`. Kept, because the file that it comes from may
    /// change before the DEL.
    pub plugins: Vec<Value>,
    /// `CNI_ARGS`.
    pub cni_args: String,
    /// Whether the network allows CHECK.
    pub check: bool,
    /// How many plugins, from the first, still need a DEL: written before each ADD and after each DEL.
    pub to_delete: usize,
    /// What the last plugin's ADD answered, once the whole chain succeeded.
    pub result: Option<Value>,
}

impl Attachment {
    /// The version of CNI that its plugins speak.
    #[must_use]
    pub fn cni_version(&self) -> &str {
        self.plugins.first().and_then(|p| p.get("cniVersion")?.as_str()).unwrap_or_default()
    }

    /// The interface in the sandbox, when the result says that a plugin made it.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        let all = self.result.as_ref()?.get("interfaces")?.as_array()?;
        let is_inside = |i: &&Value| i.get("sandbox").and_then(Value::as_str).is_some_and(|path| !path.is_empty());
        let names = all.iter().filter(is_inside).filter_map(|i| i.get("name")?.as_str());
        names.into_iter().find(|name| *name == self.ifname.as_str())
    }

    /// The addresses in the result, with their prefix lengths.
    #[must_use]
    pub fn addresses(&self) -> Vec<&str> {
        let ips = self.result.as_ref().and_then(|r| r.get("ips")?.as_array()).map(Vec::as_slice).unwrap_or_default();
        ips.iter().filter_map(|ip| ip.get("address")?.as_str()).collect()
    }
}

/// A process, told from every other one of a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its start (proc_pid_stat(5), field 22), in clock ticks since the boot: a later process of the number has another.
    pub started: u64,
}

/// The id of this boot.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
