//! Follows the node's addresses, so that policy's rows cover a new one at once.

use tokio_util::sync::CancellationToken;
use wharf_datapath::AddressChanges;

use super::{CONTROLLER, Policy};
use crate::controller::Controllers;

/// Name of the controller that reads the notifications.
const NOTIFICATIONS: &str = "node-addresses";

/// Keeps policy's rows of the node's addresses current until `stop`.
pub async fn follow(policy: &Policy, mut changes: AddressChanges, controllers: &Controllers, stop: &CancellationToken) {
    loop {
        let changed = tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.next() => changed,
        };
        if let Err(error) = changed {
            controllers.record(NOTIFICATIONS, Err(&error));
            tracing::error!(
                "{error}; policy learns of a new address of the node after 2 s until the agent is restarted"
            );
            return;
        }
        if let Err(why) = policy.follow_addresses().await {
            controllers.record(CONTROLLER, Err(&why));
            tracing::warn!("follow addresses of the node: {why}; it is tried again");
        }
    }
}
