//! Network namespaces. `setns` is permanent for a thread, so a dedicated thread enters the namespace, opens a socket
//! (which stays there), and returns.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    sched::{CloneFlags, setns, unshare},
    sys::{stat::Mode, statfs::fstatfs},
};
use wharf_core::{
    endpoint::NetnsRef,
    kernel::{KernelError, KernelErrorKind, Result},
};

use crate::{
    error::{fail, wrap},
    netlink::{self, Connection},
};

/// `NSFS_MAGIC` of `linux/magic.h`.
const NSFS_MAGIC: i64 = 0x6e73_6673;
/// `NS_GET_NSTYPE` of `linux/nsfs.h`: `_IO(0xb7, 0x3)`.
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
/// `SO_NETNS_COOKIE` of `asm-generic/socket.h` (Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Callers are blocking threads, which wait for room.
const QUEUE: usize = 64;

const OBSERVE: &str = "open network namespace";

pub(crate) struct Netns {
    fd: OwnedFd,
    dev: u64,
    inode: u64,
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Netns {
    fn open(operation: &'static str, path: &Path) -> Result<Self> {
        let subject = || path.display().to_string();
        // O_PATH: a FIFO does not block, a device sees no open.
        let handle = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|e| unresolved(operation, subject(), e))?;
        let not_one = |what: &str| {
            let cause = format!("{what}; give the path of a network namespace (/run/netns/NAME or /proc/PID/ns/net)");
            fail(operation, subject(), KernelErrorKind::NotANetns, cause)
        };
        let fs = fstatfs(&handle).map_err(|e| wrap(operation, subject(), &io::Error::from(e)))?;
        if fs.filesystem_type().0 != NSFS_MAGIC {
            return Err(not_one("it is not a namespace"));
        }
        let real = PathBuf::from(format!("/proc/thread-self/fd/{}", handle.as_raw_fd()));
        let fd = open(&real, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|e| wrap(operation, subject(), &io::Error::from(e)))?;
        // SAFETY: NS_GET_NSTYPE only reads; `fd` is open.
        let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) };
        if kind != libc::CLONE_NEWNET {
            return Err(not_one("it is a namespace of another kind"));
        }
        let meta = File::from(fd.try_clone().map_err(|e| wrap(operation, subject(), &e))?)
            .metadata()
            .map_err(|e| wrap(operation, subject(), &e))?;
        Ok(Self { fd, dev: meta.dev(), inode: meta.ino() })
    }
}

/// `NotANetns` for paths that can never resolve.
fn unresolved(operation: &'static str, subject: String, errno: Errno) -> KernelError {
    let error = wrap(operation, subject, &io::Error::from(errno));
    match errno {
        Errno::ELOOP | Errno::ENOTDIR | Errno::ENAMETOOLONG => {
            KernelError { kind: KernelErrorKind::NotANetns, ..error }
        }
        _ => error,
    }
}

/// 0 where the kernel has none.
fn cookie(socket: &impl AsRawFd) -> u64 {
    let mut value = 0u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).unwrap_or_default();
    // SAFETY: `value` and `length` outlive the call; `length` is the size of `value`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if rc == 0 { value } else { 0 }
}

pub(crate) fn has_cookie() -> Result<bool> {
    Ok(cookie(Connection::open()?.socket()) != 0)
}

type Job = Box<dyn FnMut() + Send>;

struct Visit {
    netns: Vec<OwnedFd>,
    job: Job,
    reply: SyncSender<io::Result<()>>,
}

/// The only thread that enters other namespaces. Drop ends it.
pub(crate) struct NetnsThread {
    queue: Option<SyncSender<Visit>>,
    thread: Option<JoinHandle<()>>,
    home: (u64, u64),
}

impl NetnsThread {
    /// The caller's namespace is the node's.
    pub(crate) fn start() -> Result<Self> {
        let start = |e: &io::Error| wrap("start namespace thread", "wharf-netns", e);
        let home = File::open("/proc/thread-self/ns/net").map_err(|e| start(&e))?;
        let meta = home.metadata().map_err(|e| start(&e))?;
        let (queue, visits) = sync_channel(QUEUE);
        let thread = thread::Builder::new()
            .name("wharf-netns".to_owned())
            .spawn(move || serve(&visits, &home))
            .map_err(|e| start(&e))?;
        Ok(Self { queue: Some(queue), thread: Some(thread), home: (meta.dev(), meta.ino()) })
    }

    /// Fails if the path now leads to another namespace.
    pub(crate) fn open(&self, operation: &'static str, wanted: &NetnsRef) -> Result<Netns> {
        let netns = Netns::open(operation, &wanted.path)?;
        if (netns.dev, netns.inode) != (wanted.dev, wanted.inode) {
            return Err(moved(operation, wanted));
        }
        Ok(netns)
    }

    pub(crate) fn connect(&self, operation: &'static str, wanted: &NetnsRef) -> Result<Connection> {
        let subject = || wanted.path.display().to_string();
        self.connect_each(operation, [wanted])?.pop().unwrap_or_else(|| Err(ended(operation, subject())))
    }

    pub(crate) fn connect_each<'a>(
        &self,
        operation: &'static str,
        wanted: impl IntoIterator<Item = &'a NetnsRef>,
    ) -> Result<Vec<Result<Connection>>> {
        let opened: Vec<_> = wanted.into_iter().map(|wanted| (wanted, self.open(operation, wanted))).collect();
        let there: Vec<&Netns> = opened.iter().filter_map(|(_, netns)| netns.as_ref().ok()).collect();
        let subject = opened.first().map(|(wanted, _)| wanted.path.display().to_string()).unwrap_or_default();
        let mut made = self.visit_each(operation, &subject, &there, Connection::open)?.into_iter();
        let connection = |(wanted, netns): (&NetnsRef, Result<Netns>)| {
            netns?;
            let connection = made.next().ok_or_else(|| ended(operation, wanted.path.display().to_string()))??;
            // Inode numbers can be reused, cookies never.
            if cookie(connection.socket()) == wanted.cookie { Ok(connection) } else { Err(moved(operation, wanted)) }
        };
        Ok(opened.into_iter().map(connection).collect())
    }

    pub(crate) fn visit<T: Send + 'static>(
        &self,
        operation: &'static str,
        subject: &str,
        netns: &Netns,
        job: impl FnMut() -> T + Send + 'static,
    ) -> Result<T> {
        self.visit_each(operation, subject, &[netns], job)?.pop().ok_or_else(|| ended(operation, subject.to_owned()))
    }

    fn visit_each<T: Send + 'static>(
        &self,
        operation: &'static str,
        subject: &str,
        netns: &[&Netns],
        mut job: impl FnMut() -> T + Send + 'static,
    ) -> Result<Vec<T>> {
        let ended = || ended(operation, subject.to_owned());
        let fds: io::Result<Vec<OwnedFd>> = netns.iter().map(|netns| netns.fd.try_clone()).collect();
        let fds = fds.map_err(|e| wrap(operation, subject, &e))?;
        // Room for every result: the thread never waits for the caller.
        let (result, outcomes) = sync_channel(fds.len());
        let (reply, answer) = sync_channel(1);
        let span = tracing::Span::current();
        let job: Job = Box::new(move || {
            let _unwanted = result.try_send(span.in_scope(&mut job));
        });
        let queue = self.queue.as_ref().ok_or_else(ended)?;
        queue.send(Visit { netns: fds, job, reply }).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?.map_err(|e| wrap(operation, subject, &e))?;
        Ok(outcomes.try_iter().collect())
    }
}

impl Drop for NetnsThread {
    fn drop(&mut self) {
        drop(self.queue.take());
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

fn ended(operation: &'static str, subject: String) -> KernelError {
    fail(operation, subject, KernelErrorKind::Other, "the namespace thread has ended; restart the agent")
}

fn moved(operation: &'static str, wanted: &NetnsRef) -> KernelError {
    let cause = "the namespace is gone; the path now leads to another";
    fail(operation, wanted.path.display().to_string(), KernelErrorKind::NotFound, cause)
}

fn serve(visits: &Receiver<Visit>, home: &File) {
    while let Ok(Visit { netns, mut job, reply }) = visits.recv() {
        let visited = netns.iter().try_for_each(|netns| {
            setns(netns, CloneFlags::CLONE_NEWNET)?;
            job();
            Ok(())
        });
        if let Err(e) = setns(home, CloneFlags::CLONE_NEWNET) {
            // The thread must not work in a wrong namespace.
            tracing::error!(error = %e, "cannot return to the node's network namespace");
            return;
        }
        let _unwanted = reply.try_send(visited.map_err(|e: Errno| io::Error::from(e)));
    }
}

pub(crate) fn observe(thread: &NetnsThread, path: &Path) -> Result<NetnsRef> {
    let netns = Netns::open(OBSERVE, path)?;
    let subject = path.display().to_string();
    if (netns.dev, netns.inode) == thread.home {
        let cause = "it is the node's own network namespace; a container needs one of its own";
        return Err(fail(OBSERVE, subject, KernelErrorKind::NotANetns, cause));
    }
    let connection = thread.visit(OBSERVE, &subject, &netns, Connection::open)??;
    let cookie = cookie(connection.socket());
    Ok(NetnsRef { path: path.to_owned(), dev: netns.dev, inode: netns.inode, cookie })
}

/// Whether the kernel makes endpoints' netkit links. Found out once; the error is a failure to find out.
pub(crate) fn has_netkit() -> std::result::Result<bool, &'static KernelError> {
    static FOUND: LazyLock<Result<bool>> = LazyLock::new(probe_netkit);
    FOUND.as_ref().copied()
}

/// In a temporary namespace, which ends with its thread.
fn probe_netkit() -> Result<bool> {
    let (operation, subject) = ("probe netkit", "a temporary network namespace");
    let attempt = move || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|e| wrap(operation, subject, &io::Error::from(e)))?;
        match Connection::open()?.batch(vec![netlink::link::netkit_probe()])?.pop() {
            // Of an unknown kind. Before Linux 6.10, netkit refuses MAC addresses.
            Some(Err(refusal)) if refusal.is(libc::EOPNOTSUPP) => Ok(false),
            Some(Err(refusal)) => Err(refusal.into_error(operation, subject)),
            _ => Ok(true),
        }
    };
    let panicked = |_| fail(operation, subject, KernelErrorKind::Other, "the thread panicked");
    thread::spawn(attempt).join().map_err(panicked)?
}
