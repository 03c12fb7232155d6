//! Locks that make this process the node's only agent.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::{Context, bail};

/// One inode per network namespace; only its administrator may open it.
const NAMESPACE: &str = "/proc/sys/net/ipv4/tcp_fastopen_key";

/// Other users may be able to open the state directory.
pub const STATE_LOCK: &str = "lock";

/// Exclusive use of a network namespace, a bpffs and a state directory, until the process ends. Only root may open the
/// lock files: no other user prevents a start.
#[derive(Debug)]
pub struct Turn {
    _locks: Vec<File>,
}

impl Turn {
    /// Locks this thread's network namespace: a second agent would remove the first one's objects.
    pub fn take() -> anyhow::Result<Self> {
        let file = File::open(NAMESPACE).with_context(|| {
            format!("open {NAMESPACE} (the agent needs root and a /proc of its own network namespace)")
        })?;
        let taken = "another agent serves this network namespace; stop that one (its --run-dir does not matter)";
        Ok(Self { _locks: vec![lock(file, NAMESPACE.as_ref(), taken)?] })
    }

    /// Also locks a bpffs.
    ///
    /// # Errors
    /// Locked, or no bpffs.
    pub fn and_bpffs(mut self, bpffs: &Path) -> anyhow::Result<Self> {
        let root = wharf_datapath::ensure_pin_root(bpffs)?;
        let taken =
            format!("another agent uses the bpffs {}; give each its own (mount -t bpf bpf DIR)", bpffs.display());
        let directory = File::open(&root).with_context(|| format!("open {}", root.display()))?;
        self._locks.push(lock(directory, &root, &taken)?);
        Ok(self)
    }

    /// Also locks a state directory: two agents would overwrite each other's files.
    pub fn and_state(mut self, directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(STATE_LOCK);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        let taken =
            format!("another agent uses the state directory {}; give each its own (--state-dir)", directory.display());
        self._locks.push(lock(file, &path, &taken)?);
        Ok(self)
    }
}

fn lock(file: File, path: &Path, taken: &str) -> anyhow::Result<File> {
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("start: {taken}"),
        Err(TryLockError::Error(e)) => Err(e).with_context(|| format!("lock {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_state_directory_is_one_agents_for_as_long_as_it_holds_it() {
        let directory = tempfile::tempdir().expect("make directory");
        let take = || Turn { _locks: Vec::new() }.and_state(directory.path());
        let held = take().expect("nobody has it");
        let refused = take().expect_err("somebody has it").to_string();
        assert!(
            refused.contains("another agent uses the state directory") && refused.contains("--state-dir"),
            "{refused}"
        );
        drop(held);
        let _others = File::open(directory.path()).map(|d| d.lock()).expect("lock the directory");
        take().expect("free again");
        let mode = std::fs::metadata(directory.path().join(STATE_LOCK)).expect("the lock").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else can open it");
    }
}
