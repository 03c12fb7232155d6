//! Reads of a starting agent wait until it knows its endpoints.

use std::{sync::Arc, time::Duration};

use axum::{extract::FromRequestParts, http::request::Parts};
use tokio::time::sleep;

use crate::{
    node::Node,
    rest::{endpoint::is_not_serving, error::Failure},
};

/// A start takes tens of milliseconds, with a large cluster half a second.
const PATIENCE: Duration = Duration::from_secs(5);

/// The node, after its restore of endpoints and addresses.
pub struct Restored(pub Arc<Node>);

impl FromRequestParts<Arc<Node>> for Restored {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, node: &Arc<Node>) -> Result<Self, Failure> {
        tokio::select! {
            () = node.life.endpoints.registry.restored() => return Ok(Self(Arc::clone(node))),
            () = node.life.tasks.stop.cancelled() => {}
            () = sleep(PATIENCE) => {}
        }
        Err(is_not_serving(node, &format!("{} {}", parts.method, parts.uri.path())))
    }
}
