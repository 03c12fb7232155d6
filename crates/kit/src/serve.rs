//! Listeners: the unix socket and the metrics port.

mod places;

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{HeaderValue, StatusCode, header},
    serve::Listener,
};
use hyper::{body::Incoming, server::conn::http1, service::Service as _, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, UnixStream},
    sync::Semaphore,
    time::MissedTickBehavior,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wharf_api::{ApiError, ErrorCode};

use self::places::{Answer, Busy, Places};
use crate::{pulse::BEAT, socket::Socket};

const TARGET: &str = "wharf_agent::serve";
#[derive(Clone, Copy)]
struct Limit {
    all: usize,
    /// Without root, whose CNI plugin needs the rest.
    others: usize,
}

/// A client needs one.
const API: Limit = Limit { all: 1024, others: 960 };

/// Clients have no user.
const METRICS: Limit = Limit { all: 64, others: 64 };

const ADMIN: Limit = Limit { all: 32, others: 24 };

/// "Overloaded" answers; further connections are closed.
const REFUSALS: usize = 32;

const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection's user; request extension.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// User is root.
    pub is_root: bool,
}

impl Peer {
    fn of(stream: &UnixStream) -> Self {
        Self { is_root: stream.peer_cred().is_ok_and(|peer| peer.uid() == 0) }
    }
}

/// For a request's head, and between requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves the API until `stop`, then answers running requests. Calls `beat` while accepting.
pub async fn api(listener: Socket, router: Router, stop: CancellationToken, beat: impl Fn() + Send) {
    serve(listener, API, Peer::of, router, stop, beat).await;
}

/// Serves admin until `stop`.
pub async fn admin(listener: Socket, router: Router, stop: CancellationToken) {
    serve(listener, ADMIN, Peer::of, router, stop, || {}).await;
}

/// Binds `--metrics-listen`.
///
/// # Errors
/// The address, why, and what to do.
pub async fn listen_for_metrics(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program listens there (`ss -ltnp` names it): stop it, or choose another address"
            }
            io::ErrorKind::AddrNotAvailable => {
                "no interface in the agent's network namespace has this address: choose another address"
            }
            io::ErrorKind::PermissionDenied => "a port below 1024 needs CAP_NET_BIND_SERVICE: choose another port",
            _ => "choose another address",
        };
        anyhow::anyhow!("{error}: listen on --metrics-listen {address}; {remedy}")
    })
}

/// Serves metrics until `stop`.
pub async fn metrics(listener: TcpListener, router: Router, stop: CancellationToken) {
    serve(listener, METRICS, |_| Peer { is_root: false }, router, stop, || {}).await;
}

/// Further connections wait in the backlog. When users other than root have all their places, a connection replaces the
/// longest idle one, or is refused.
async fn serve<L: Listener>(
    mut listener: L,
    limit: Limit,
    peer_of: impl Fn(&L::Io) -> Peer + Send,
    router: Router,
    stop: CancellationToken,
    beat: impl Fn() + Send,
) where
    L::Io: Unpin,
{
    let (all, others) = (Arc::new(Semaphore::new(limit.all)), Arc::new(Places::new(limit.others)));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let (graceful, tasks) = (GracefulShutdown::new(), TaskTracker::new());
    let mut beats = tokio::time::interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accept = async {
            // Never closed.
            let permit = Arc::clone(&all).acquire_owned().await.ok();
            (listener.accept().await.0, permit)
        };
        let (io, permit) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept => accepted,
            _ = beats.tick() => {
                beat();
                continue;
            }
        };
        let peer = peer_of(&io);
        let place = if peer.is_root { None } else { others.take().map(Arc::new) };
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new());
        if !peer.is_root && place.is_none() {
            tracing::warn!(
                target: TARGET,
                "no place for a connection: each of the {} for users other than root has a request",
                limit.others
            );
            if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
                http.header_read_timeout(REFUSAL_TIMEOUT).keep_alive(false);
                let connection = http.serve_connection(
                    TokioIo::new(io),
                    service_fn(move |_| std::future::ready(Ok::<_, Infallible>(refuse(limit)))),
                );
                tasks.spawn(async move {
                    connection.await.ok();
                    drop(refusal);
                });
            }
            continue;
        }
        let closed = place.as_ref().map_or_else(CancellationToken::new, |place| place.closed.clone());
        let (inner, of_requests) = (TowerToHyperService::new(router.clone()), place.clone());
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(peer);
            let busy = of_requests.as_ref().map(Busy::begin);
            let answer = inner.call(request);
            async move { answer.await.map(|answer| answer.map(|body| Answer { body, _busy: busy })) }
        });
        http.header_read_timeout(HEADER_TIMEOUT);
        let connection = graceful.watch(http.serve_connection(TokioIo::new(io), service));
        tasks.spawn(async move {
            tokio::select! {
                result = connection => if let Err(error) = result {
                    tracing::debug!(target: TARGET, "connection: {error}");
                },
                () = closed.cancelled() => {
                    tracing::debug!(target: TARGET, "connection: closed while idle, another one needs the place");
                }
            }
            drop((place, permit));
        });
    }
    drop(listener);
    graceful.shutdown().await;
    tasks.close();
    tasks.wait().await;
}

fn refuse(limit: Limit) -> hyper::Response<String> {
    let error = ApiError {
        code: ErrorCode::Overloaded,
        message: format!("serve connection: users other than root have {} places, and all have requests", limit.others),
        hint: Some("try again in a second".to_owned()),
        retry_after_ms: Some(1_000),
        cni_code: None,
        op: None,
    };
    let mut answer = hyper::Response::new(serde_json::to_string(&error).unwrap_or_default());
    *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}
