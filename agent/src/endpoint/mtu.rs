//! The MTU of the node's links: observed, and followed by the endpoints whose creators asked for none.

use std::sync::Arc;

use tokio::sync::{mpsc::error::TrySendError, oneshot};
use wharf_core::{kernel::KernelError, mtu::NodeMtu};

use crate::{
    node::{
        endpoint::{Command, Handle, View},
        lifecycle::Lifecycle,
    },
    sync::lock,
};

/// Name of the controller.
pub const CONTROLLER: &str = "mtu";

/// Observes the uplinks; new links get what follows from them. True when that has changed.
///
/// # Errors
/// When the kernel cannot be asked: the MTU stays as it is.
pub async fn observe(life: &Lifecycle) -> Result<bool, KernelError> {
    let uplinks = match life.config.mtu {
        Some(_) => Vec::new(),
        None => life.kernel.observe_uplinks().await?,
    };
    let now = NodeMtu::of(life.config.mtu, &uplinks);
    let before = std::mem::replace(&mut *lock(&life.mtu), now.clone());
    if before != now {
        tracing::info!(before = %before, "MTU of new links: {now}");
    }
    Ok(before.bytes != now.bytes)
}

/// [`observe`], and gives the router's pair and the endpoints that follow the MTU the one that is in force.
///
/// # Errors
/// When the uplinks cannot be observed, or how many endpoints kept their MTU, with the first one's reason.
pub async fn follow(life: Arc<Lifecycle>) -> Result<(), String> {
    if observe(&life).await.map_err(|e| e.to_string())? {
        // The router's pair has the same MTU.
        life.kernel.ensure_node(&life.spec()).await.map_err(|e| e.to_string())?;
    }
    let mtu = life.mtu();
    let differs = |h: &Handle| h.shared.read(|v| v.record.mtu_follows && v.record.mtu != mtu && View::is_settled(v));
    let mut failed = Vec::new();
    for handle in life.registry.list().into_iter().filter(differs) {
        let (done, answer) = oneshot::channel();
        match handle.mailbox.try_send(Command::Mtu(mtu, done)) {
            // The next run finds it again.
            Err(TrySendError::Full(_) | TrySendError::Closed(_)) => continue,
            Ok(()) => {}
        }
        if let Ok(Err(why)) = answer.await {
            failed.push(format!("endpoint {}: {why}", handle.id));
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        [first, ..] => Err(format!("{} endpoints keep another MTU than {mtu}; {first}", failed.len())),
    }
}
