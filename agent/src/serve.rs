//! Listeners: the unix socket, and the metrics port when one is asked for.

use std::{fs::File, io, os::linux::net::SocketAddrExt as _, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore, time::MissedTickBehavior};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{pulse::BEAT, socket::Socket};

/// Connections at once; a shim or a CLI needs one each.
const MAX_CONNECTIONS: usize = 1024;

/// Connections at once on the metrics port.
const MAX_SCRAPERS: usize = 64;

/// Connections at once on the admin thread's socket.
const MAX_ADMINS: usize = 32;

/// Longest time for a request's head, and for the pause between two requests on one connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Name in the network namespace's table of abstract unix sockets (unix(7)) that the node's one agent holds.
const TURN: &[u8] = b"wharf-agent";

/// The right to be the agent of a network namespace and of a bpffs. Held while this lives; the kernel gives both back
/// when the process ends, however it ends.
#[derive(Debug)]
pub struct Turn {
    _namespace: std::os::unix::net::UnixListener,
    _bpffs: File,
}

impl Turn {
    /// Takes it. Two agents of one namespace would each remove what only the other's records explain.
    ///
    /// # Errors
    /// When another agent has it.
    pub fn take(bpffs: &Path) -> anyhow::Result<Self> {
        let name = std::os::unix::net::SocketAddr::from_abstract_name(TURN).context("name the agent's turn")?;
        let namespace = match std::os::unix::net::UnixListener::bind_addr(&name) {
            Ok(socket) => socket,
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                bail!(
                    "start: another agent serves this network namespace; stop that one (its --run-dir does not matter)"
                )
            }
            Err(e) => return Err(e).context("take the agent's turn in this network namespace"),
        };
        let directory = File::open(bpffs).with_context(|| format!("open {}", bpffs.display()))?;
        match directory.try_lock() {
            Ok(()) => Ok(Self { _namespace: namespace, _bpffs: directory }),
            Err(std::fs::TryLockError::WouldBlock) => {
                bail!(
                    "start: another agent uses the bpffs {}; give each its own (mount -t bpf bpf DIR)",
                    bpffs.display()
                )
            }
            Err(std::fs::TryLockError::Error(e)) => Err(e).with_context(|| format!("lock {}", bpffs.display())),
        }
    }
}

/// Takes a directory for one agent, for as long as the handle lives: two would write each other's files over.
///
/// # Errors
/// When another agent has it, or it cannot be locked.
pub fn take_directory(path: &Path) -> anyhow::Result<std::fs::File> {
    let directory = std::fs::File::open(path).with_context(|| format!("open {}", path.display()))?;
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(std::fs::TryLockError::WouldBlock) => {
            bail!("start: another agent uses the state directory {}; give each its own (--state-dir)", path.display())
        }
        Err(std::fs::TryLockError::Error(e)) => Err(e).with_context(|| format!("lock {}", path.display())),
    }
}

/// Serves the API until told to stop; requests that run are answered first. Beats while it takes connections.
pub async fn api(listener: Socket, router: Router, stop: CancellationToken, beat: impl Fn() + Send) {
    serve(listener, MAX_CONNECTIONS, router, stop, beat).await;
}

/// Serves the admin thread's socket until told to stop.
pub async fn admin(listener: Socket, router: Router, stop: CancellationToken) {
    serve(listener, MAX_ADMINS, router, stop, || {}).await;
}

/// Serves metrics until told to stop.
pub async fn metrics(listener: TcpListener, router: Router, stop: CancellationToken) {
    serve(listener, MAX_SCRAPERS, router, stop, || {}).await;
}

/// Accepts as many connections as there are places; further ones wait in the kernel's backlog. A client that takes longer
/// than [`HEADER_TIMEOUT`] for a request's head, or sends none, loses its place.
async fn serve<L: Listener>(
    mut listener: L,
    places: usize,
    router: Router,
    stop: CancellationToken,
    beat: impl Fn() + Send,
) where
    L::Io: Unpin,
{
    let places = Arc::new(Semaphore::new(places));
    let (graceful, tasks) = (GracefulShutdown::new(), TaskTracker::new());
    let mut beats = tokio::time::interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accept = async {
            // The semaphore is never closed, so there is always a place in the end.
            let place = Arc::clone(&places).acquire_owned().await.ok();
            (listener.accept().await.0, place)
        };
        let (io, place) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept => accepted,
            _ = beats.tick() => {
                beat();
                continue;
            }
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(io), TowerToHyperService::new(router.clone()));
        let connection = graceful.watch(connection);
        tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("connection: {error}");
            }
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
    tasks.close();
    tasks.wait().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_one_agents_for_as_long_as_it_holds_it() {
        let directory = tempfile::tempdir().expect("make directory");
        let held = take_directory(directory.path()).expect("nobody has it");
        let refused = take_directory(directory.path()).expect_err("somebody has it").to_string();
        assert!(
            refused.contains("another agent uses the state directory") && refused.contains("--state-dir"),
            "{refused}"
        );
        drop(held);
        take_directory(directory.path()).expect("free again");
    }
}
