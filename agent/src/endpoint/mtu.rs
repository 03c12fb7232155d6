//! MTU of the node's links; endpoints created without an MTU follow it.

use std::sync::Arc;

use tokio::sync::{mpsc::error::TrySendError, oneshot};
use wharf_core::kernel::KernelError;

use crate::node::{
    endpoint::{Command, Handle, View},
    lifecycle::Lifecycle,
    network::NodeNetwork,
};

/// The controller's name.
pub const CONTROLLER: &str = "mtu";

/// Derives new links' MTU from the uplinks; returns whether it changed.
pub async fn observe(network: &NodeNetwork) -> Result<bool, KernelError> {
    let (before, now) = network.observe_mtu().await?;
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
    if observe(&life.network).await.map_err(|e| e.to_string())? {
        life.network.ensure_node().await.map_err(|e| e.to_string())?;
    }
    let mtu = life.network.mtu();
    let differs = |h: &Handle| h.shared.read(|v| v.record.mtu_follows && v.record.mtu != mtu && View::is_settled(v));
    let mut failed = Vec::new();
    for handle in life.endpoints.registry.list().into_iter().filter(differs) {
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
