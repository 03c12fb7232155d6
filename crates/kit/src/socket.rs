//! A unix socket that is rebound when its file is gone; the accept loop checks once a second.

use std::{
    fs::{OpenOptions, Permissions},
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown, fchown},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use axum::serve::Listener;
use nix::{fcntl::OFlag, unistd::geteuid};
use tokio::{
    net::{UnixListener, UnixStream, unix::SocketAddr},
    time::{Interval, MissedTickBehavior},
};

use crate::{accounts, kept::make_directory, sync::lock};

const TARGET: &str = "wharf_agent::socket";
/// Of [`Access::Operators`].
const GROUP: &str = "wharf";
const LOOK: Duration = Duration::from_secs(1);
/// New binds in status.
const RECENT: Duration = Duration::from_secs(30);

type FileId = (u64, u64);

/// Who may connect, besides the agent's user.
#[derive(Debug, PartialEq, Eq)]
enum Access {
    /// The group `wharf`, if it exists.
    Operators,
    /// This group; also for the socket's directory.
    Group(Option<String>),
}

impl Access {
    fn group(&self) -> anyhow::Result<Option<u32>> {
        match self {
            Self::Operators => accounts::group(GROUP).with_context(|| format!("look for the group {GROUP}")),
            Self::Group(None) => Ok(None),
            Self::Group(Some(name)) => check_group(name).map(Some),
        }
    }

    /// Makes the socket's directory.
    fn make(&self, socket: &Path) -> anyhow::Result<()> {
        let Some(directory) = socket.parent() else { return Ok(()) };
        make_directory(directory)?;
        if *self == Self::Operators {
            return Ok(());
        }
        wharf_crash::point("socket/after-directory");
        let shown = directory.display();
        // Not through a link; the open directory cannot be replaced.
        let flags = (OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits();
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(directory);
        let opened = opened.with_context(|| format!("open the directory {shown}"))?;
        let owner = opened.metadata().with_context(|| format!("look at {shown}"))?.uid();
        if owner != geteuid().as_raw() {
            bail!("use the directory {shown} for the socket: it belongs to the user {owner}; name another one");
        }
        for entry in std::fs::read_dir(directory).with_context(|| format!("list {shown}"))? {
            let name = entry.with_context(|| format!("list {shown}"))?.file_name();
            if Some(name.as_os_str()) != socket.file_name() {
                bail!("use the directory {shown} for the socket alone: it has {}; name another one", name.display());
            }
        }
        let mode = if matches!(self, Self::Group(None)) { 0o700 } else { 0o750 };
        opened.set_permissions(Permissions::from_mode(mode)).with_context(|| format!("set the mode of {shown}"))?;
        wharf_crash::point("socket/after-directory-mode");
        let Some(group) = self.group()? else { return Ok(()) };
        fchown(&opened, None, Some(group)).with_context(|| format!("give {shown} to group {group}"))?;
        wharf_crash::point("socket/after-directory-group");
        Ok(())
    }
}

/// A group that must exist.
///
/// # Errors
/// It does not, or `/etc/group` is unreadable.
pub fn check_group(name: &str) -> anyhow::Result<u32> {
    let group = accounts::group(name).with_context(|| format!("look for the group {name}"))?;
    group.with_context(|| format!("there is no group {name}; make it with `groupadd --system {name}`"))
}

/// Reachability; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Reach(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    lost: Option<String>,
    again: Option<Instant>,
}

impl Reach {
    /// Why it is unreachable.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        lock(&self.0).lost.clone()
    }

    /// Recent rebind's age.
    #[must_use]
    pub fn bound_again(&self) -> Option<Duration> {
        lock(&self.0).again.map(|at| at.elapsed()).filter(|ago| *ago < RECENT)
    }
}

#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    listener: UnixListener,
    file: FileId,
    looks: Interval,
    reach: Reach,
    access: Access,
}

impl Socket {
    /// Binds with mode 0660, and group `wharf` if it exists; replaces only a stale file.
    ///
    /// # Errors
    /// Another agent answers, or the file system refuses.
    pub async fn bind(path: &Path, reach: Reach) -> anyhow::Result<Self> {
        Self::bind_for(Access::Operators, path, reach).await
    }

    /// [`Socket::bind`] with another group, in its own directory.
    ///
    /// # Errors
    /// As [`Socket::bind`], or the group does not exist.
    pub async fn bind_apart(path: &Path, group: Option<String>, reach: Reach) -> anyhow::Result<Self> {
        let access = Access::Group(group);
        access.make(path)?;
        Self::bind_for(access, path, reach).await
    }

    async fn bind_for(access: Access, path: &Path, reach: Reach) -> anyhow::Result<Self> {
        let (listener, file) = bind(path, &access).await?;
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { path: path.to_owned(), listener, file, looks, reach, access })
    }

    /// Rebinds when the file is gone; logs each loss once.
    async fn look(&mut self) {
        let problem = match file_id(&self.path) {
            Ok(there) if there == self.file => {
                lock(&self.reach.0).lost = None;
                return;
            }
            Ok(_) => "was replaced by another file",
            Err(e) if e.kind() == io::ErrorKind::NotFound => "was removed",
            Err(_) => "cannot be looked at",
        };
        let result = async {
            self.access.make(&self.path)?;
            bind(&self.path, &self.access).await
        };
        match result.await {
            Ok((listener, file)) => {
                (self.listener, self.file) = (listener, file);
                let socket = self.path.display();
                tracing::warn!(target: TARGET, %socket, "the socket {problem}; it is bound again");
                let mut known = lock(&self.reach.0);
                (known.lost, known.again) = (None, Some(Instant::now()));
            }
            Err(error) => {
                let why = format!("its socket {problem}, and cannot be bound again: {error:#}");
                let mut known = lock(&self.reach.0);
                if known.lost.as_ref() != Some(&why) {
                    tracing::error!(target: TARGET, socket = %self.path.display(), "{why}");
                    known.lost = Some(why);
                }
            }
        }
    }
}

impl Listener for Socket {
    type Io = UnixStream;
    type Addr = SocketAddr;

    /// Cancel safe: an interrupted check begins again.
    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            tokio::select! {
                // Empties the old listener's queue first.
                biased;
                accepted = Listener::accept(&mut self.listener) => return accepted,
                _ = self.looks.tick() => {}
            }
            self.look().await;
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Drop for Socket {
    /// Keeps a file that is not the socket's.
    fn drop(&mut self) {
        if file_id(&self.path).is_ok_and(|there| there == self.file)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(target: TARGET, "remove the socket {}: {error}", self.path.display());
        }
    }
}

fn file_id(path: &Path) -> io::Result<FileId> {
    std::fs::symlink_metadata(path).map(|m| (m.dev(), m.ino()))
}

async fn bind(path: &Path, access: &Access) -> anyhow::Result<(UnixListener, FileId)> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            bail!("bind {}: there is something that is not a socket; move it away", path.display())
        }
        Ok(_) => match UnixStream::connect(path).await {
            Ok(_) => bail!("bind {}: another agent serves there; stop it, or use another --run-dir", path.display()),
            Err(_) => {
                std::fs::remove_file(path).with_context(|| format!("remove the stale socket {}", path.display()))?;
                wharf_crash::point("socket/after-stale");
            }
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).with_context(|| format!("look at {}", path.display())),
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    wharf_crash::point("socket/after-bind");
    let file = file_id(path).with_context(|| format!("look at {}", path.display()))?;
    let mode = if matches!(access, Access::Group(None)) { 0o600 } else { 0o660 };
    std::fs::set_permissions(path, Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {}", path.display()))?;
    wharf_crash::point("socket/after-mode");
    if let Some(group) = access.group()? {
        chown(path, None, Some(group)).with_context(|| format!("give {} to group {group}", path.display()))?;
        wharf_crash::point("socket/after-group");
    }
    Ok((listener, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    async fn is_served(socket: &mut Socket) -> bool {
        let path = socket.path.clone();
        let client = async move {
            while UnixStream::connect(&path).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let both = async { tokio::join!(Listener::accept(socket), client) };
        tokio::time::timeout(PATIENCE, both).await.is_ok()
    }

    #[tokio::test]
    async fn a_socket_whose_name_or_directory_is_removed_is_bound_again() {
        let root = tempfile::tempdir().expect("make directory");
        let path = root.path().join("run/a.sock");
        make_directory(path.parent().expect("parent")).expect("make directory");
        let reach = Reach::default();
        let mut socket = Socket::bind(&path, reach.clone()).await.expect("bound");
        assert!(is_served(&mut socket).await && reach.bound_again().is_none());
        std::fs::remove_file(&path).expect("remove");
        assert!(is_served(&mut socket).await && reach.bound_again().is_some());
        std::fs::remove_dir_all(root.path().join("run")).expect("remove");
        assert!(is_served(&mut socket).await);
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o660);
        assert_eq!(mode(&root.path().join("run")) & 0o022, 0, "nobody else may put another socket there");
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_is_anothers_stays_and_is_told_of_until_it_goes() {
        let root = tempfile::tempdir().expect("make directory");
        let path = root.path().join("a.sock");
        let reach = Reach::default();
        let mut socket = Socket::bind(&path, reach.clone()).await.expect("bound");
        std::fs::remove_file(&path).expect("remove");
        let other = UnixListener::bind(&path).expect("another agent");
        socket.look().await;
        let lost = reach.lost().expect("told of");
        assert!(lost.contains("was replaced by another file") && lost.contains("another agent serves there"), "{lost}");
        drop(other);
        std::fs::remove_file(&path).expect("remove");
        std::fs::write(&path, "a file").expect("write");
        socket.look().await;
        assert!(reach.lost().is_some_and(|lost| lost.contains("not a socket")));
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), "a file");
        std::fs::remove_file(&path).expect("remove");
        assert!(is_served(&mut socket).await && reach.lost().is_none());
        std::fs::remove_file(&path).expect("remove");
        std::fs::write(&path, "a file").expect("write");
        drop(socket);
        assert!(path.exists(), "it was not the socket's");
    }
}
