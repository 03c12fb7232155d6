//! Listeners: the unix socket, and the metrics port when one is asked for.

use std::{sync::Arc, time::Duration};

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
