//! Request bodies: read before the request is handled, within a budget.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, HttpBody as _},
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use futures::StreamExt as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use wharf_api::{ErrorCode, POLICY_TEXT_MOST};
use wharf_kit::serve::Peer;

use crate::rest::error::Failure;

/// Bytes: a policy text, lengthened by JSON. Routes have lower limits.
pub const LONGEST: usize = 2 * POLICY_TEXT_MOST;
/// Bytes for root, and as many for other users.
const BUDGET: usize = 16 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Memory for bodies.
pub struct Bodies {
    root: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

impl Default for Bodies {
    fn default() -> Self {
        Self::new(BUDGET)
    }
}

impl Bodies {
    fn new(budget: usize) -> Self {
        let budget = || Arc::new(Semaphore::new(budget));
        Self { root: budget(), others: budget() }
    }

    async fn read(&self, peer: Peer, body: Body) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), Failure> {
        let budget = if peer.is_root { &self.root } else { &self.others };
        let (mut text, mut permit, mut length, mut fits) = (Vec::new(), None::<OwnedSemaphorePermit>, 0_usize, true);
        let mut data = body.into_data_stream();
        while let Some(part) = data.next().await {
            let part = part.map_err(|e| refused(format!("{e}")))?;
            length = length.saturating_add(part.len());
            if length > LONGEST {
                return Err(refused(format!("it is longer than {LONGEST} bytes")));
            }
            let more = u32::try_from(part.len()).ok().filter(|_| fits);
            match more.and_then(|more| Arc::clone(budget).try_acquire_many_owned(more).ok()) {
                Some(more) => {
                    text.extend_from_slice(&part);
                    match &mut permit {
                        Some(permit) => permit.merge(more),
                        None => permit = Some(more),
                    }
                }
                // Reads on: a client that still sends may not see the answer.
                None => (fits, text, permit) = (false, Vec::new(), None),
            }
        }
        if fits { Ok((text, permit)) } else { Err(no_room(peer)) }
    }
}

fn refused(cause: String) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, format!("read body: {cause}"))
}

fn no_room(peer: Peer) -> Failure {
    let whose = if peer.is_root { "root" } else { "users other than root" };
    let message =
        format!("read body: bodies of requests by {whose} fill the {BUDGET} bytes that the agent holds at once");
    tracing::warn!("{message}");
    Failure::new(ErrorCode::Overloaded, message).hint("try again in a second").retry(1_000)
}

/// Holds the body's budget until the answer.
pub async fn hold(State(bodies): State<Arc<Bodies>>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let peer = request.extensions().get().copied().unwrap_or(Peer { is_root: false });
    let (head, body) = request.into_parts();
    match timeout(TIMEOUT, bodies.read(peer, body)).await {
        Ok(Ok((text, permit))) => {
            let response = next.run(Request::from_parts(head, Body::from(text))).await;
            drop(permit);
            response
        }
        Ok(Err(failure)) => failure.into_response(),
        Err(_) => refused(format!("it did not arrive within {TIMEOUT:?}")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bodies_of_other_users_never_take_the_budget_of_root() {
        let bodies = Bodies::new(100);
        let read = |is_root, length| bodies.read(Peer { is_root }, Body::from(vec![0; length]));
        let held = read(false, 60).await.expect("it fits");
        let refused = read(false, 60).await.expect_err("together too long").0;
        assert_eq!((refused.code, refused.retry_after_ms), (ErrorCode::Overloaded, Some(1_000)));
        assert_eq!(read(false, 40).await.expect("what is left").0.len(), 40);
        assert_eq!(read(true, 100).await.expect("another budget").0.len(), 100);
        drop(held);
        assert_eq!(read(false, 100).await.expect("given back").0.len(), 100);
        let longest = Bodies::new(2 * LONGEST);
        let refused =
            longest.read(Peer { is_root: true }, Body::from(vec![0; LONGEST + 1])).await.expect_err("too long");
        assert_eq!(refused.0.code, ErrorCode::InvalidRequest);
    }
}
