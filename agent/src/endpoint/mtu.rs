//! MTU of the node's links; endpoints follow it unless created with another.

use std::sync::Arc;

use tokio::sync::{mpsc::error::TrySendError, oneshot};
use wharf_core::{kernel::KernelError, mtu::NodeMtu};
use wharf_kit::sync::lock;

use crate::node::{
    endpoint::{Command, Handle, View},
    lifecycle::Lifecycle,
};

/// The controller's name.
pub const CONTROLLER: &str = "mtu";

/// Derives new links' MTU from the uplinks; returns whether it changed.
///
/// # Errors
/// The kernel; the MTU stays.
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

/// [`observe`], then applies the MTU to the router's pair and the endpoints that follow it.
///
/// # Errors
/// The uplinks are unreadable, or endpoints kept their MTU.
pub async fn follow(life: Arc<Lifecycle>) -> Result<(), String> {
    if observe(&life).await.map_err(|e| e.to_string())? {
        life.ensure_node().await.map_err(|e| e.to_string())?;
    }
    let mtu = life.mtu();
    let differs = |h: &Handle| h.shared.read(|v| v.record.mtu_follows && v.record.mtu != mtu && View::is_settled(v));
    let mut failed = Vec::new();
    for handle in life.registry.list().into_iter().filter(differs) {
        let (done, answer) = oneshot::channel();
        match handle.mailbox.try_send(Command::Mtu(mtu, done)) {
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
