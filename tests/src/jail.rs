//! Where a container runtime runs unseen by the machine, and cannot outlive the test: mount and process namespaces of
//! its own, in the node's network namespace.
//!
//! The runtime's process namespace hangs on one process, the keeper. It dies with the test's thread, and the kernel
//! then ends everything in the namespace: containers, their monitors, clean-up commands. The mount namespace covers the
//! directories a runtime writes to with tmpfs. Only `/run` is seen by the test and its agent too, since there the
//! runtime binds the network namespaces whose paths it passes to the plugin.

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use crate::{
    process::{Finished, command_in, run},
    space::Space,
    wait,
};
use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::signal::{SigHandler, Signal, signal},
};

/// Covered in the runtime's mount namespace alone, where they exist: its storage, CNI's cache, its locks in shared
/// memory, the machine's own settings for it.
const COVERED: [&str; 3] = ["/var/lib", "/dev/shm", "/etc/containers"];
const CGROUPS: &str = "/sys/fs/cgroup";
/// Of the name of a test's cgroup; the test's process id follows.
const CGROUP_PREFIX: &str = "wharf-test-";

/// Namespaces for a runtime; everything in them ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Jail {
    keeper: Child,
    processes: File,
    mounts: File,
    cgroup: String,
}

impl Jail {
    /// Makes one in a node's network namespace. The calling thread's mount namespace must be private already.
    pub(crate) fn create(node: &Space) -> Result<Self> {
        sweep_cgroups()?;
        tmpfs("/run").context("cover /run with a tmpfs")?;
        mount(None::<&str>, "/run", None::<&str>, MsFlags::MS_SHARED, None::<&str>).context("share /run")?;
        let mut keeper = command_in(node, "sleep")?;
        keeper.arg("infinity").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: between fork and exec the closure makes system calls on constants; paths this short are not
        // allocated.
        unsafe { keeper.pre_exec(settle) };
        let keeper = in_new_process_namespace(|| keeper.spawn())?.context("start the runtime's first process")?;
        let of_keeper = |ns: &str| {
            let path = format!("/proc/{}/ns/{ns}", keeper.id());
            File::open(&path).with_context(|| format!("open {path}"))
        };
        let (processes, mounts) = (of_keeper("pid")?, of_keeper("mnt")?);
        Ok(Self { keeper, processes, mounts, cgroup: unique_cgroup() })
    }

    /// Name of the one cgroup, below the root, that all of the runtime's are in.
    pub(crate) fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// Runs a command to its end inside; it must come from [`command_in`], with the node's namespace.
    pub(crate) fn run(&self, command: Command, stdin: &[u8], limit: Duration) -> Result<Finished> {
        self.inside(command, |command| run(command, stdin, limit))
    }

    /// Starts a command inside, as [`Self::run`] does.
    pub(crate) fn spawn(&self, command: Command) -> Result<Child> {
        self.inside(command, |mut command| command.spawn().context("start the runtime"))
    }

    fn inside<T>(&self, mut command: Command, start: impl FnOnce(Command) -> Result<T>) -> Result<T> {
        let mounts = self.mounts.try_clone().context("copy a descriptor")?;
        let enter = move || Ok(setns(&mounts, CloneFlags::CLONE_NEWNS)?);
        // SAFETY: between fork and exec the closure makes one system call on a value it owns; it allocates nothing.
        unsafe { command.pre_exec(enter) };
        setns(&self.processes, CloneFlags::CLONE_NEWPID).context("enter the runtime's process namespace")?;
        let started = start(command);
        back_to_own_process_namespace()?;
        started
    }

    /// A path as the runtime sees it.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.keeper.id())).join(inside.trim_start_matches('/'))
    }

    /// What runs inside, the keeper left out: process ids as they are inside, and command lines.
    pub(crate) fn running(&self) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.path("/proc")).context("list the runtime's processes")? {
            let path = entry.context("list the runtime's processes")?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name == "1" || !name.bytes().all(|b| b.is_ascii_digit()) {
                continue;
            }
            // One that ends while it is looked at is one that does not run.
            if let Ok(line) = fs::read(path.join("cmdline")) {
                found
                    .push((name.into_owned(), String::from_utf8_lossy(&line).replace('\0', " ").trim_end().to_owned()));
            }
        }
        Ok(found)
    }

    /// Names in a directory, as the runtime sees it; none when it is not there.
    pub(crate) fn entries(&self, inside: &str) -> Result<Vec<String>> {
        let path = self.path(inside);
        if !path.is_dir() {
            return Ok(Vec::new());
        }
        let entries = fs::read_dir(&path).with_context(|| format!("read {inside}"))?;
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        entries.map(name).collect::<io::Result<_>>().with_context(|| format!("read {inside}"))
    }

    /// Ends everything inside and takes away what the kernel does not take by itself.
    fn end(&mut self) -> Result<()> {
        // The keeper's end is reported only after everything else in its process namespace is gone.
        self.keeper.kill().context("kill the runtime's first process")?;
        self.keeper.wait().context("wait for the runtime's processes")?;
        umount2("/run", MntFlags::MNT_DETACH).context("uncover /run")?;
        for top in cgroup_trees()? {
            let ours = top.join(&self.cgroup);
            wait::until(&format!("{} to be free of processes", ours.display()), || {
                Ok(remove_cgroup(&ours).is_ok().then_some(()))
            })?;
        }
        Ok(())
    }
}

impl Drop for Jail {
    fn drop(&mut self) {
        if let Err(e) = self.end()
            && !std::thread::panicking()
        {
            eprintln!("the container runtime of this test left something behind: {e:#}");
        }
    }
}

/// The keeper's work before it sleeps for good.
fn settle() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    for path in COVERED {
        match tmpfs(path) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let hidden = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), hidden, None::<&str>)?;
    // SAFETY: no handler is installed; this process and what it becomes never wait for a child. Orphans that become its
    // children are then reaped by the kernel.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }?;
    Ok(())
}

fn tmpfs(path: &str) -> Result<(), Errno> {
    mount(Some("wharf-test"), path, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755"))
}

/// What `start` spawns is the first process of a new namespace. Meanwhile this thread can make no threads.
fn in_new_process_namespace<T>(start: impl FnOnce() -> T) -> Result<T> {
    unshare(CloneFlags::CLONE_NEWPID).context("unshare the process namespace")?;
    let started = start();
    back_to_own_process_namespace()?;
    Ok(started)
}

fn back_to_own_process_namespace() -> Result<()> {
    let own = File::open("/proc/thread-self/ns/pid").context("open this thread's process namespace")?;
    setns(own, CloneFlags::CLONE_NEWPID).context("go back to this thread's process namespace")
}

fn unique_cgroup() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{CGROUP_PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Removes the empty cgroups of tests that were killed: all that such a test leaves behind.
fn sweep_cgroups() -> Result<()> {
    for top in cgroup_trees()? {
        let Ok(groups) = fs::read_dir(&top) else { continue };
        for group in groups.filter_map(Result::ok) {
            let name = group.file_name();
            let owner = name.to_str().and_then(|n| n.strip_prefix(CGROUP_PREFIX)?.split('-').next());
            if owner.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()) {
                // One that is not empty, or that another test sweeps just now, is not this test's business.
                remove_cgroup(&group.path()).ok();
            }
        }
    }
    Ok(())
}

/// The root of each cgroup hierarchy: of version 2 the one, of version 1 one for each controller.
fn cgroup_trees() -> Result<Vec<PathBuf>> {
    let mut trees = vec![PathBuf::from(CGROUPS)];
    for entry in fs::read_dir(CGROUPS).with_context(|| format!("read {CGROUPS}"))? {
        let path = entry.with_context(|| format!("read {CGROUPS}"))?.path();
        if path.is_dir() {
            trees.push(path);
        }
    }
    Ok(trees)
}

/// Removes a cgroup and those in it; one that is not there is removed.
fn remove_cgroup(path: &Path) -> io::Result<()> {
    if !path.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let inner = entry?;
        if inner.file_type()?.is_dir() {
            remove_cgroup(&inner.path())?;
        }
    }
    fs::remove_dir(path)
}
