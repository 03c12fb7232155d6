//! Follows the node's addresses, so that rows cover a new one at once.

use tokio_util::sync::CancellationToken;
use wharf_datapath::AddressChanges;
use wharf_kit::controller::Controllers;

use super::{CONTROLLER, Policy};

const NOTIFICATIONS: &str = "node-addresses";

/// Runs until `stop`.
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
