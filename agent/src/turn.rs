//! The right to be the node's one agent.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::{Context, bail};

/// Stands for the network namespace: a sysctl of which each namespace has one, with an inode of its own, that only who
/// administers the namespace may open (mode 0600). It is locked, and neither read nor written.
const NAMESPACE: &str = "/proc/sys/net/ipv4/tcp_fastopen_key";

/// Stands for the state directory, which others may be able to open.
pub const STATE_LOCK: &str = "lock";

/// The right to be the agent of a network namespace, of a bpffs and of a state directory. Held while this lives; the
/// kernel gives it back when the process ends, however it ends.
///
/// Each is a lock on a file that only root may open, so that nobody else can keep the agent from starting.
#[derive(Debug)]
pub struct Turn {
    _locks: Vec<File>,
}

impl Turn {
    /// Takes the network namespace of this thread. Two agents of one namespace would each remove what only the other's
    /// records explain.
    ///
    /// # Errors
    /// When another agent has it, or this process may not administer the namespace.
    pub fn take() -> anyhow::Result<Self> {
        let file = File::open(NAMESPACE).with_context(|| {
            format!("open {NAMESPACE} (the agent needs root and a /proc of its own network namespace)")
        })?;
        let taken = "another agent serves this network namespace; stop that one (its --run-dir does not matter)";
        Ok(Self { _locks: vec![lock(file, NAMESPACE.as_ref(), taken)?] })
    }

    /// Takes a bpffs as well.
    ///
    /// # Errors
    /// When another agent has it, or it is none.
    pub fn and_bpffs(mut self, bpffs: &Path) -> anyhow::Result<Self> {
        let root = wharf_datapath::ensure_pin_root(bpffs)?;
        let taken =
            format!("another agent uses the bpffs {}; give each its own (mount -t bpf bpf DIR)", bpffs.display());
        let directory = File::open(&root).with_context(|| format!("open {}", root.display()))?;
        self._locks.push(lock(directory, &root, &taken)?);
        Ok(self)
    }

    /// Takes a state directory as well: two agents would write each other's files over.
    ///
    /// # Errors
    /// When another agent has it, or nothing can be written there.
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
        // The directory itself may be open to others: a lock on it keeps nobody out.
        drop(held);
        let _others = File::open(directory.path()).map(|d| d.lock()).expect("lock the directory");
        take().expect("free again");
        let mode = std::fs::metadata(directory.path().join(STATE_LOCK)).expect("the lock").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else can open it");
    }
}
