//! A network namespace that lives as long as its value.

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    thread,
};

use anyhow::{Context, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};

/// A network namespace without a name; the open file holds it.
#[derive(Debug)]
pub struct Space {
    file: File,
}

impl Space {
    /// Makes a new one, empty but for a loopback interface that is down.
    ///
    /// # Errors
    /// Without root, or when the kernel's limit of namespaces is reached.
    pub fn create() -> Result<Self> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("unshare the network namespace")?;
            let path = "/proc/thread-self/ns/net";
            Ok(Self { file: File::open(path).with_context(|| format!("open {path}"))? })
        })
    }

    /// One that is there already: a file that a namespace is bound to, or `/proc/<pid>/ns/net`.
    ///
    /// # Errors
    /// When there is no such file, or it is not a network namespace.
    pub fn open(path: &Path) -> Result<Self> {
        let space = Self { file: File::open(path).with_context(|| format!("open {}", path.display()))? };
        space.run(|| ()).with_context(|| format!("{} is not a network namespace", path.display()))?;
        Ok(space)
    }

    /// Another value for the same namespace.
    ///
    /// # Errors
    /// When the descriptor cannot be copied.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self { file: self.file.try_clone().context("copy the namespace's descriptor")? })
    }

    /// Gives it a name: binds it to a new file, as container runtimes do.
    ///
    /// # Errors
    /// When the path cannot be made or mounted on.
    pub fn bind(&self, path: &Path) -> Result<()> {
        File::create(path).with_context(|| format!("create {}", path.display()))?;
        let bound = self.run(|| {
            mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .with_context(|| format!("bind the namespace to {}", path.display()))
        });
        bound?
    }

    /// Runs a closure on a thread inside the namespace. Sockets it makes stay in the namespace wherever they are used.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        on_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
            Ok(f())
        })
    }

    /// From now on, ports that the kernel chooses for sockets of the namespace are of this range, both ends included.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn choose_ports_from(&self, first: u16, last: u16) -> Result<()> {
        let set = || std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{first} {last}"));
        self.run(set)?.context("set ip_local_port_range")
    }

    /// Names of the interfaces in the namespace, in the kernel's order.
    ///
    /// # Errors
    /// When the namespace cannot be entered or `/proc` is not mounted.
    pub fn links(&self) -> Result<Vec<String>> {
        let text = self.run(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?.context("read net/dev")?;
        Ok(text.lines().skip(2).filter_map(|l| l.split_once(':')).map(|(name, _)| name.trim().to_owned()).collect())
    }
}

impl AsFd for Space {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Runs a closure on a thread of its own (it inherits this thread's mount namespace) and hands on its panic.
fn on_thread<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|s| match s.spawn(f).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
