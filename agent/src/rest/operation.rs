//! Requests as operations, whose ids log lines and error answers name.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Request, State},
    http::{Method, StatusCode},
    middleware::Next,
    response::Response,
};
use tokio::time::timeout;
use tracing::Level;
use wharf_api::ErrorCode;
use wharf_kit::telemetry::operation::{self, Kind, OpId};

use crate::{node::Node, rest::command::Counted};

/// An error, for the log.
#[derive(Debug, Clone)]
pub struct Told {
    pub code: ErrorCode,
    pub message: String,
}

tokio::task_local! {
    static CHANGES: bool;
}

/// Whether an answer is logged; failed reads of absent objects are not.
#[must_use]
pub fn is_told(status: StatusCode) -> bool {
    status.is_server_error() || CHANGES.try_with(|changes| *changes).unwrap_or(false)
}

/// The kernel needs tens of milliseconds for a delete; if it hangs, requests still show the endpoints.
const SETTLE: Duration = Duration::from_secs(1);

/// An answered delete's endpoint is invisible to later requests.
pub async fn follow(State(node): State<Arc<Node>>, request: Request, next: Next) -> Response {
    let settled = async move { timeout(SETTLE, node.life.endpoints.registry.settled(|_| true)).await.ok() };
    run(request, next, settled).await
}

/// [`follow`] in delegated mode.
pub async fn follow_delegated(request: Request, next: Next) -> Response {
    run(request, next, std::future::ready(())).await
}

async fn run<T>(request: Request, next: Next, settled: impl Future<Output = T>) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let changes = !matches!(method, Method::GET | Method::HEAD | Method::OPTIONS);
    let kind = kind(&method, &path);
    let op = OpId::next(kind);
    let work = async {
        if kind == Kind::Request {
            settled.await; // the request shows what there is
        }
        let response = next.run(request).await;
        if let Some(Told { code, message }) = response.extensions().get()
            && is_told(response.status())
            && response.extensions().get::<Counted>().is_none()
        {
            let status = response.status().as_u16();
            if response.status().is_server_error() {
                tracing::event!(Level::WARN, %method, path, status, ?code, "{message}");
            } else {
                tracing::event!(Level::INFO, %method, path, status, ?code, "{message}");
            }
        }
        response
    };
    operation::within(op, op.span(), CHANGES.scope(changes, work)).await
}

fn kind(method: &Method, path: &str) -> Kind {
    match *method {
        Method::PUT if path.starts_with("/v1/endpoint/") => Kind::Create,
        Method::DELETE if path.starts_with("/v1/endpoint") => Kind::Delete,
        _ => Kind::Request,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_named_by_what_it_does() {
        assert_eq!(kind(&Method::PUT, "/v1/endpoint/cni-attachment-id:c:eth0"), Kind::Create);
        assert_eq!(kind(&Method::DELETE, "/v1/endpoint"), Kind::Delete);
        for (method, path) in
            [(Method::GET, "/v1/endpoint/7"), (Method::DELETE, "/v1/ipam/10.0.0.1"), (Method::PUT, "/")]
        {
            assert_eq!(kind(&method, path), Kind::Request, "{method} {path}");
        }
    }

    #[test]
    fn looks_that_find_nothing_are_not_told() {
        assert!(!is_told(StatusCode::NOT_FOUND) && is_told(StatusCode::INTERNAL_SERVER_ERROR));
    }
}
