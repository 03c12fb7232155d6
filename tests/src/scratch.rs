//! Files that cannot outlive the test: a tmpfs in a mount namespace private to the thread.

use std::{
    cell::RefCell,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// Directories every Linux system has and no Wharf test needs; the first that is not above our own binaries is covered
/// by the tmpfs. Covering an existing directory needs no new one, which a killed test would leave behind.
const CANDIDATES: [&str; 4] = ["/mnt", "/media", "/srv", "/opt"];

/// A directory for the files in place of the tmpfs, for the benchmark with the agent's files on a disk. They stay
/// there.
const ON_DISK: &str = "WHARF_SCRATCH";

thread_local! {
    static ROOT: RefCell<Option<Root>> = const { RefCell::new(None) };
}

struct Root {
    path: PathBuf,
    next: u32,
}

/// A fresh directory on this thread's private tmpfs. Threads and processes started from here see it; nobody else does.
///
/// # Errors
/// Without root, or when the kernel refuses mount namespaces.
pub fn fresh_dir(name: &str) -> Result<PathBuf> {
    ROOT.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(Root { path: private_tmpfs()?, next: 0 });
        }
        let Some(root) = slot.as_mut() else { bail!("private tmpfs is not there") };
        root.next += 1;
        let dir = root.path.join(format!("{name}{}", root.next));
        fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
        Ok(dir)
    })
}

fn private_tmpfs() -> Result<PathBuf> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "making network namespaces needs root: use `cargo xtask test` or `cargo xtask demo`, which call sudo, or be root"
    );
    unshare(CloneFlags::CLONE_NEWNS).context("unshare the mount namespace")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("make the mounts private")?;
    let bins = crate::process::bin_dir();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"));
    let usable = |c: &str| Path::new(c).is_dir() && !bins.starts_with(c) && !workspace.starts_with(c);
    let Some(path) = CANDIDATES.into_iter().find(|c| usable(c)) else {
        bail!("none of {CANDIDATES:?} can be covered by a tmpfs (missing, or above {})", workspace.display());
    };
    if let Some(disk) = std::env::var_os(ON_DISK) {
        let own = tempfile::tempdir_in(&disk).with_context(|| format!("{ON_DISK}={}", disk.display()))?.keep();
        mount(Some(&own), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .with_context(|| format!("mount {} on {path}", own.display()))?;
    } else {
        mount(Some("wharf-test"), path, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755"))
            .with_context(|| format!("mount a private tmpfs on {path}"))?;
    }
    // Some tests run a binary as another user.
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| format!("chmod {path}"))?;
    Ok(PathBuf::from(path))
}

/// Mounts a bpffs of its own (every mount is another instance) on a new directory.
///
/// # Errors
/// When the kernel has no bpffs.
pub fn mount_bpffs(dir: &Path) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("create {}", dir.display()))?;
    mount(Some("bpf"), dir, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
        .with_context(|| format!("mount a bpffs on {} (the kernel needs CONFIG_BPF_SYSCALL)", dir.display()))
}
