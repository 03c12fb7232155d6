//! The layout of the pin tree.
//!
//! ```text
//! <bpffs>/wharf/v<ABI>/shared/{ENDPOINTS,CALLS,NODE_CALLS,PROFILES,EVENTS,STACK_PATHS,STACK_USERS,SOURCES,
//!     FLOWS,FLOWS_RECENT,FLOWS_NEW,FLOW_CACHE,FLOW_CACHE_ENDS,FRAGMENT_SLOTS,FRAGMENTS,FLOW_USE,FLOW_TOTALS,
//!     PROXY_USE,IPCACHE,POLICY_PORTS,POLICY_CELLS,POLICY_SETS,POLICY_STATE,ADDRESS_GENERATIONS,sink}
//! <bpffs>/wharf/v<ABI>/endpoints/<id>/{from_container,to_container,deliver,CONFIG,METRICS,BANDWIDTH,link_*}
//! <bpffs>/wharf/v<ABI>/closing/<host interface>/{link_from_container,link_to_container}
//! ```
//! `closing` has the sink's attachments of deleted endpoints: a link must drop packets until it is removed.
//!
//! Directories, the names of hooked programs and links, and `METRICS` are the same in every ABI version, for `upgrade`.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use nix::sys::statfs::statfs;
use wharf_common::map;
use wharf_core::{
    ids::{EndpointId, IfName},
    kernel::{KernelErrorKind, Result},
};
use wharf_names::attached;

use crate::error::{fail, wrap};

/// `linux/magic.h`.
pub(crate) const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

pub(crate) const ROOT: &str = attached::PIN_ROOT;
const ENDPOINTS_DIR: &str = attached::PIN_ENDPOINTS;
const CLOSING_DIR: &str = "closing";

/// In the order of `Programs::program_ids`.
pub(crate) const PROGRAMS: [&str; 3] = ["from_container", "to_container", "deliver"];
/// In the order of `Programs::map_ids`.
pub(crate) const MAPS: [&str; 3] = [map::CONFIG, map::METRICS, map::BANDWIDTH];
/// Of the first two programs.
pub(crate) const LINKS: [&str; 2] = attached::LINK_PINS;
pub(crate) const SHARED_MAPS: [&str; 24] = [
    map::ENDPOINTS,
    map::CALLS,
    map::NODE_CALLS,
    map::PROFILES,
    map::EVENTS,
    map::STACK_PATHS,
    map::STACK_USERS,
    map::SOURCES,
    map::FLOWS,
    map::FLOWS_RECENT,
    map::FLOWS_NEW,
    map::FLOW_CACHE,
    map::FLOW_CACHE_ENDS,
    map::FRAGMENT_SLOTS,
    map::FRAGMENTS,
    map::FLOW_USE,
    map::FLOW_TOTALS,
    map::PROXY_USE,
    map::IPCACHE,
    map::POLICY_PORTS,
    map::POLICY_CELLS,
    map::POLICY_SETS,
    map::POLICY_STATE,
    map::ADDRESS_GENERATIONS,
];
pub(crate) const SINK: &str = attached::SINK;
/// Exists once programs with log records were loaded.
pub(crate) const LOGS: &str = "AYA_LOGS";

pub(crate) fn upcoming(name: &str) -> String {
    format!("next_{name}")
}

pub(crate) fn is_shared(name: &str) -> bool {
    name == LOGS || SHARED_MAPS.into_iter().chain([SINK]).any(|shared| name == shared || name == upcoming(shared))
}

fn version_of(name: &str) -> Option<u32> {
    let version = name.strip_prefix('v')?.parse().ok()?;
    (name == format!("v{version}")).then_some(version)
}

#[derive(Debug, Clone)]
pub(crate) struct PinTree {
    bpffs: PathBuf,
    root: PathBuf,
}

fn check_bpffs(bpffs: &Path) -> Result<()> {
    let operation = "open bpffs";
    let subject = bpffs.display().to_string();
    let hint = format!("mount one with `mount -t bpf bpf {subject}`, or name another with --bpffs");
    let fs = statfs(bpffs).map_err(|e| {
        let cause = format!("{e}; {hint}");
        fail(operation, &subject, KernelErrorKind::NotFound, cause)
    })?;
    if fs.filesystem_type().0 != BPF_FS_MAGIC {
        let cause = format!("it is there, but it is not a bpffs; {hint}");
        return Err(fail(operation, subject, KernelErrorKind::NotFound, cause));
    }
    Ok(())
}

/// Ensures and returns Wharf's directory on the bpffs; only root may enter.
///
/// # Errors
/// `NotFound`: not a bpffs.
pub fn ensure_pin_root(bpffs: &Path) -> Result<PathBuf> {
    check_bpffs(bpffs)?;
    let root = bpffs.join(ROOT);
    let subject = || root.display().to_string();
    fs::create_dir_all(&root).map_err(|e| wrap("make pin directory", subject(), &e))?;
    fs::set_permissions(&root, fs::Permissions::from_mode(0o700))
        .map_err(|e| wrap("set the mode of pin directory", subject(), &e))?;
    Ok(root)
}

/// Whether a bpffs has Wharf's directory.
#[must_use]
pub fn has_pin_root(bpffs: &Path) -> bool {
    check_bpffs(bpffs).is_ok() && bpffs.join(ROOT).is_dir()
}

impl PinTree {
    pub(crate) fn open(bpffs: &Path) -> Result<Self> {
        check_bpffs(bpffs)?;
        let root = bpffs.join(ROOT).join(format!("v{}", wharf_common::abi::version()));
        Ok(Self { bpffs: bpffs.to_owned(), root })
    }

    pub(crate) fn all(bpffs: &Path) -> Result<Vec<Self>> {
        let root = bpffs.join(ROOT);
        let of_version = |name: &String| version_of(name).is_some();
        let tree = |name: String| Self { bpffs: bpffs.to_owned(), root: root.join(name) };
        Ok(names(&root)?.into_iter().filter(of_version).map(tree).collect())
    }

    pub(crate) fn check_bpffs(&self) -> Result<()> {
        check_bpffs(&self.bpffs)
    }

    pub(crate) fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// Unique while the bpffs is mounted.
    pub(crate) fn device(&self) -> Result<u64> {
        let read = fs::metadata(&self.bpffs).map_err(|e| wrap("open bpffs", self.bpffs.display().to_string(), &e))?;
        Ok(read.dev())
    }

    /// Newest first; creates nothing.
    pub(crate) fn others(&self) -> Result<Vec<Self>> {
        let mut others = Self::all(&self.bpffs)?;
        others.retain(|tree| tree.root != self.root);
        others.sort_by_key(|tree| std::cmp::Reverse(tree.version()));
        Ok(others)
    }

    pub(crate) fn version_name(&self) -> String {
        self.root.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub(crate) fn version(&self) -> u32 {
        version_of(&self.version_name()).unwrap_or_default()
    }

    pub(crate) fn endpoint_ids(&self) -> Result<BTreeSet<EndpointId>> {
        Ok(names(&self.endpoints_dir())?.iter().filter_map(|name| name.parse().ok()).collect())
    }

    pub(crate) fn in_use(&self) -> Result<Vec<String>> {
        let mut names = names(&self.endpoints_dir())?;
        names.extend(self::names(&self.closing_dir())?);
        Ok(names)
    }

    pub(crate) fn ensure_directories(&self) -> Result<()> {
        for dir in [self.shared_dir(), self.endpoints_dir(), self.closing_dir()] {
            fs::create_dir_all(&dir).map_err(|e| wrap("make pin directory", dir.display().to_string(), &e))?;
        }
        Ok(())
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn shared_dir(&self) -> PathBuf {
        self.root.join("shared")
    }

    pub(crate) fn shared(&self, name: &str) -> PathBuf {
        self.shared_dir().join(name)
    }

    pub(crate) fn endpoints_dir(&self) -> PathBuf {
        self.root.join(ENDPOINTS_DIR)
    }

    pub(crate) fn endpoint_dir(&self, id: EndpointId) -> PathBuf {
        self.endpoints_dir().join(id.to_string())
    }

    pub(crate) fn endpoint(&self, id: EndpointId, name: &str) -> PathBuf {
        self.endpoint_dir(id).join(name)
    }

    pub(crate) fn closing_dir(&self) -> PathBuf {
        self.root.join(CLOSING_DIR)
    }

    /// bpffs allows no dot in a name.
    pub(crate) fn closing(&self, host: &IfName) -> PathBuf {
        self.closing_dir().join(host.as_str().replace('.', "_"))
    }
}

pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e: &io::Error| wrap("list pins", dir.display().to_string(), e);
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(&e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(|e| failed(&e))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

pub(crate) fn unpin(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(wrap("unpin", path.display().to_string(), &e)),
    }
}

/// A missing directory is no error; a subdirectory stays and is one.
pub(crate) fn remove_files(dir: &Path) -> Result<()> {
    for name in names(dir)? {
        let path = dir.join(name);
        if !path.is_dir() {
            unpin(&path)?;
        }
    }
    remove_dir(dir)
}

pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::ENOTEMPTY) => {
            let left = names(path)?.join(", ");
            let cause = format!("it holds what is not ours: {left}; it was left alone");
            Err(fail("remove pin directory", path.display().to_string(), KernelErrorKind::Conflict, cause))
        }
        Err(e) => Err(wrap("remove pin directory", path.display().to_string(), &e)),
    }
}

pub(crate) fn replace(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| wrap("move pin", to.display().to_string(), &e))
}
