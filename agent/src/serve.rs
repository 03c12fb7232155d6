//! Listeners: the unix socket, and the metrics port when one is asked for.

use std::{
    io,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll},
};

use anyhow::{Context, bail};
use axum::{Router, serve::Listener};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::CancellationToken;

/// Connections at once; a shim or a CLI needs one each.
const MAX_CONNECTIONS: usize = 1024;

/// Connections at once on the metrics port.
const MAX_SCRAPERS: usize = 64;

/// Group that may talk to the agent, when the system has it.
const GROUP: &str = "wharf";

/// Binds the socket: mode 0660, group `wharf` where there is one. A stale socket file is replaced; a live one is not.
///
/// # Errors
/// When another agent answers there, or the file system refuses.
pub async fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            bail!("bind {}: there is something that is not a socket; move it away", path.display())
        }
        Ok(_) => match UnixStream::connect(path).await {
            Ok(_) => bail!("bind {}: another agent serves there; stop it, or use another --run-dir", path.display()),
            Err(_) => {
                std::fs::remove_file(path).with_context(|| format!("remove the stale socket {}", path.display()))?
            }
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).with_context(|| format!("look at {}", path.display())),
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("set the mode of {}", path.display()))?;
    if let Ok(Some(group)) = nix::unistd::Group::from_name(GROUP) {
        nix::unistd::chown(path, None, Some(group.gid))
            .with_context(|| format!("give {} to group {GROUP}", path.display()))?;
    }
    Ok(listener)
}

/// Serves the API until told to stop; requests that run are answered first.
///
/// # Errors
/// When the listener fails.
pub async fn api(listener: UnixListener, router: Router, stop: CancellationToken) -> io::Result<()> {
    axum::serve(Limited::new(listener, MAX_CONNECTIONS), router).with_graceful_shutdown(stop.cancelled_owned()).await
}

/// Serves metrics until told to stop.
///
/// # Errors
/// When the listener fails.
pub async fn metrics(listener: TcpListener, router: Router, stop: CancellationToken) -> io::Result<()> {
    axum::serve(Limited::new(listener, MAX_SCRAPERS), router).with_graceful_shutdown(stop.cancelled_owned()).await
}

/// A listener that has at most so many connections; further ones wait in the kernel's backlog.
struct Limited<L> {
    listener: L,
    places: Arc<Semaphore>,
}

impl<L> Limited<L> {
    fn new(listener: L, connections: usize) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(connections)) }
    }
}

impl<L: Listener> Listener for Limited<L>
where
    L::Io: Unpin,
{
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // The semaphore is never closed, so there is always a place in the end.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (io, address) = self.listener.accept().await;
        (Connection { io, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that gives its place back when it ends.
struct Connection<T> {
    io: T,
    _place: Option<OwnedSemaphorePermit>,
}

impl<T: AsyncRead + Unpin> AsyncRead for Connection<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Connection<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
