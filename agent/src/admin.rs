//! The admin thread, which answers while the main runtime hangs.
//!
//! Its runtime serves `<run-dir>/admin.sock`, observes the status ([`crate::status`]) without blocking, and feeds the
//! watchdog ([`crate::watchdog`]). Other requests have a time limit and separate threads: a hang takes one of eight
//! slots.

use std::{path::PathBuf, sync::Arc, thread::JoinHandle, time::Duration};

use anyhow::Context;
use axum::{
    Router,
    extract::{Query, Request},
    http::Method,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use wharf_api::{ErrorCode, StatusQuery};
use wharf_kit::{
    serve,
    socket::{Reach, Socket},
    telemetry::LogFilter,
};

use crate::{
    node::Node,
    rest::{self, error::Failure},
    status,
};

/// Concurrent requests except for the status.
const APART: usize = 8;
const READ_LIMIT: Duration = Duration::from_secs(10);
const GRACE: Duration = Duration::from_secs(2);
/// One per status part and request; more for those in the kernel.
const BLOCKING: usize = 64;

/// The running admin thread.
pub struct Admin {
    stop: CancellationToken,
    handle: Handle,
    thread: JoinHandle<()>,
}

impl Admin {
    /// Binds the socket and starts the thread.
    pub async fn start(node: &Arc<Node>, log: LogFilter) -> anyhow::Result<Self> {
        let (socket, stop) = (node.life.config.admin_socket(), CancellationToken::new());
        let (ready, bound) = oneshot::channel();
        let thread = {
            let (node, stop) = (Arc::clone(node), stop.clone());
            std::thread::Builder::new()
                .name("wharf-admin".into())
                .spawn(move || run(node, log, socket, stop, ready))
                .context("start the admin thread")?
        };
        let handle = bound.await.context("start the admin thread: it ended")??;
        Ok(Self { stop, handle, thread })
    }

    /// Runtime for tasks that run while the main runtime hangs.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Answers pending requests, ends the thread and removes the socket.
    pub async fn stop(self) {
        self.stop.cancel();
        let thread = self.thread;
        match timeout(GRACE * 2, tokio::task::spawn_blocking(move || thread.join())).await {
            Ok(Ok(Ok(()))) => {}
            Ok(_) => tracing::error!("the admin thread panicked"),
            Err(_) => tracing::warn!("the admin thread did not end within {:?}", GRACE * 2),
        }
    }
}

fn run(
    node: Arc<Node>,
    log: LogFilter,
    socket: PathBuf,
    stop: CancellationToken,
    ready: oneshot::Sender<anyhow::Result<Handle>>,
) {
    let begun = begin(&socket, node.pulses.admin_socket.clone());
    let (runtime, listener) = match begun {
        Ok(begun) => begun,
        Err(error) => return drop(ready.send(Err(error))),
    };
    node.parts.look_on(runtime.handle().clone());
    let router = router(node, log);
    if ready.send(Ok(runtime.handle().clone())).is_err() {
        return;
    }
    runtime.block_on(async {
        let patience = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
        };
        tokio::select! {
            () = serve::admin(listener, router, stop.clone()) => {}
            () = patience => {}
        }
    });
    runtime.shutdown_background();
}

fn begin(socket: &std::path::Path, reach: Reach) -> anyhow::Result<(Runtime, Socket)> {
    let runtime = Builder::new_current_thread()
        .thread_name("wharf-admin-look")
        .max_blocking_threads(BLOCKING)
        .enable_all()
        .build()
        .context("start the admin thread's runtime")?;
    let listener = runtime.block_on(Socket::bind(socket, reach))?;
    Ok((runtime, listener))
}

fn router(node: Arc<Node>, log: LogFilter) -> Router {
    let places = Arc::new(Semaphore::new(APART));
    let guard = {
        let node = Arc::clone(&node);
        move |request: Request, next: Next| serve_one(Arc::clone(&node), Arc::clone(&places), request, next)
    };
    rest::router(node, log).layer(from_fn(guard))
}

async fn serve_one(node: Arc<Node>, places: Arc<Semaphore>, request: Request, next: Next) -> Response {
    match (request.method().clone(), request.uri().path()) {
        (Method::GET, "/v1/healthz") => match Query::<StatusQuery>::try_from_uri(request.uri()) {
            Ok(Query(query)) => {
                let mut status = status::status(&node).await;
                status.from_admin = true;
                rest::status::answer(status, query)
            }
            Err(e) => Failure::new(ErrorCode::InvalidRequest, format!("read query: {}", e.body_text())).into_response(),
        },
        (Method::GET | Method::HEAD, _) | (Method::PATCH, "/v1/config") => apart(places, request, next).await,
        (method, path) => Failure::new(
            ErrorCode::InvalidRequest,
            format!("{method} {path}: the admin thread's socket only looks and changes settings"),
        )
        .hint("ask the agent's own socket, wharf.sock")
        .into_response(),
    }
}

async fn apart(places: Arc<Semaphore>, request: Request, next: Next) -> Response {
    let what = format!("{} {}", request.method(), request.uri().path());
    let Ok(place) = places.try_acquire_owned() else {
        let why = format!("{what}: {APART} requests have not been answered yet; what they look at may be stuck");
        return Failure::new(ErrorCode::Overloaded, why).hint("`wharf status` says what is stuck").into_response();
    };
    let here = Handle::current();
    let job = tokio::task::spawn_blocking(move || {
        let response = here.block_on(next.run(request));
        drop(place);
        response
    });
    match timeout(READ_LIMIT, job).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => Failure::new(ErrorCode::Internal, format!("{what}: {error}")).into_response(),
        Err(_) => {
            let why = format!("{what}: no answer within {} s; what it looks at is stuck", READ_LIMIT.as_secs());
            Failure::new(ErrorCode::DeadlineExceeded, why).hint("`wharf status` says what is stuck").into_response()
        }
    }
}
