//! Named network namespaces, compatible with `ip netns`. `setns` and `unshare` run on new threads, because they change
//! the thread permanently.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, socket},
        stat::Mode,
        statfs::{NSFS_MAGIC, fstatfs},
    },
};

use crate::{
    error::{SandboxError, errno, io},
    record::Identity,
};

/// Mounts removed from a path; this crate makes one.
const MAX_MOUNTS: usize = 8;
/// The lock is held for two system calls.
const DIRECTORY_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) file: File,
    pub(crate) identity: Identity,
}

#[derive(Debug)]
pub(crate) enum Seen {
    Nothing,
    Namespace(Namespace),
    Plain,
    Other(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    Removed,
    Before,
    /// Another namespace has the path.
    Replaced,
}

impl Namespace {
    /// Its loopback interface is up. It lives as long as this value or its bind mount.
    pub(crate) fn create() -> Result<Self, SandboxError> {
        let path = Path::new("/proc/thread-self/ns/net");
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).map_err(errno("make network namespace", path))?;
            let file = File::open(path).map_err(io("open network namespace", path))?;
            loopback_up().map_err(io("set up loopback interface of", path))?;
            let identity = identity(&file).map_err(io("identify network namespace", path))?;
            Ok(Self { file, identity })
        })
    }

    pub(crate) fn interfaces(&self) -> io::Result<Vec<String>> {
        let table = on_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET)?;
            fs::read_to_string("/proc/thread-self/net/dev")
        })?;
        // After two header lines; a name has no colon (dev_valid_name in net/core/dev.c).
        Ok(table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect())
    }

    pub(crate) fn bind(&self, path: &Path) -> Result<(), SandboxError> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        share(directory)?;
        OpenOptions::new().write(true).create_new(true).mode(0o444).open(path).map_err(io("create", path))?;
        wharf_crash::point("sandbox-create/after-file");
        let source = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        mount(Some(source.as_str()), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(errno("bind network namespace to", path))
    }
}

/// Does not follow a final link.
pub(crate) fn look(path: &Path) -> Result<Seen, SandboxError> {
    let failed = || errno("look at", path);
    // O_PATH does not open the file, so a FIFO does not block.
    let handle = match open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty()) {
        Ok(handle) => handle,
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(Seen::Nothing),
        Err(e) => return Err(failed()(e)),
    };
    if fstatfs(&handle).map_err(failed())?.filesystem_type() == NSFS_MAGIC {
        let own = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let file = File::open(own).map_err(io("open", path))?;
        let entered = on_thread(|| {
            if setns(&file, CloneFlags::CLONE_NEWNET).is_err() {
                return Ok(None);
            }
            identity(&file).map(Some).map_err(io("identify network namespace", path))
        })?;
        let Some(identity) = entered else { return Ok(Seen::Other("a namespace of another kind")) };
        return Ok(Seen::Namespace(Namespace { file, identity }));
    }
    let there = File::from(handle).metadata().map_err(io("look at", path))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    let around = fs::metadata(directory).map_err(io("look at", directory))?;
    Ok(if there.dev() != around.dev() {
        Seen::Other("another file system")
    } else if there.is_dir() {
        Seen::Other("a directory")
    } else {
        Seen::Plain
    })
}

/// `None` if not at its path.
pub(crate) fn find(path: &Path, identity: Identity) -> Result<Option<Namespace>, SandboxError> {
    Ok(match look(path)? {
        Seen::Namespace(namespace) if namespace.identity == identity => Some(namespace),
        _ => None,
    })
}

/// Removes a namespace's path, and thus the namespace unless a process holds it. `wanted` is `None` after a reboot,
/// when no mount exists. Removing the file also removes the mount from other mount namespaces, where other sandboxes'
/// processes would keep the namespace alive.
pub(crate) fn remove(path: &Path, wanted: Option<Identity>) -> Result<Gone, SandboxError> {
    let mut gone = Gone::Before;
    for _ in 0..MAX_MOUNTS {
        match look(path)? {
            Seen::Namespace(found) if Some(found.identity) == wanted => {
                drop(found);
                // Other processes may hold the file open; `ip netns del` does the same.
                umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).map_err(errno("unmount", path))?;
                gone = Gone::Removed;
                wharf_crash::point("sandbox-stop/after-unmount");
            }
            Seen::Namespace(_) => return Ok(Gone::Replaced),
            Seen::Nothing => return Ok(gone),
            Seen::Plain => {
                match fs::remove_file(path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("remove", path)(e)),
                    _ => {}
                }
                wharf_crash::point("sandbox-stop/after-unlink");
                return Ok(gone);
            }
            Seen::Other(what) => return Err(SandboxError::Foreign { path: path.to_owned(), what }),
        }
    }
    Err(SandboxError::Foreign { path: path.to_owned(), what: "a stack of mounts" })
}

/// Makes a shared mount, as `ip netns add` does. That command would otherwise later bind the directory over itself, and
/// leave an unreachable mount for each name.
fn share(directory: &Path) -> Result<(), SandboxError> {
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(io("create", directory))?;
    // `ip netns add` takes the same lock: otherwise, both could bind the directory.
    let lock = File::open(directory).map_err(io("open", directory))?;
    let end = Instant::now() + DIRECTORY_PATIENCE;
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => return Err(io("lock", directory)(io::ErrorKind::TimedOut.into())),
            Err(TryLockError::Error(e)) => return Err(io("lock", directory)(e)),
        }
    }
    let shared = || mount(None::<&str>, directory, None::<&str>, MsFlags::MS_SHARED | MsFlags::MS_REC, None::<&str>);
    match shared() {
        // Not a mount point yet.
        Err(Errno::EINVAL) => {
            mount(Some(directory), directory, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
                .map_err(errno("mount on itself", directory))?;
            shared().map_err(errno("share mounts of", directory))
        }
        other => other.map_err(errno("share mounts of", directory)),
    }
}

/// The calling thread must be in the namespace.
fn identity(file: &File) -> io::Result<Identity> {
    let meta = file.metadata()?;
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: `cookie` and `length` live through the call; `length` is the size of `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result != 0 && Errno::last() != Errno::ENOPROTOOPT {
        return Err(io::Error::last_os_error());
    }
    Ok(Identity { dev: meta.dev(), inode: meta.ino(), cookie })
}

/// As runtimes do before the first plugin.
fn loopback_up() -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let up = libc::c_short::try_from(libc::IFF_UP).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: all zeros are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::try_from(*from).map_err(|_| io::ErrorKind::InvalidData)?;
    }
    request.ifr_ifru.ifru_flags = up;
    // SAFETY: the pointer is to a live `ifreq`, which SIOCSIFFLAGS only reads.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Propagates a panic.
pub(crate) fn on_thread<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|s| match s.spawn(f).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
