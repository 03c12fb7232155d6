//! systemd's watchdog (sd_watchdog_enabled(3)), fed only while the parts that matter move.
//!
//! It runs on the admin thread: what it judges is not what it runs on.

use std::{sync::Arc, time::Duration};

use crate::{endpoint::deletions, node::LinuxNode, notify, pulse::Pulse, status};

/// Controllers without which the node goes wrong while the agent looks alive.
pub const CRITICAL: [&str; 2] = ["node-datapath", deletions::CONTROLLER];

/// Feeds it until the agent stops, three times in each interval.
pub async fn feed(node: Arc<LinuxNode>, interval: Duration) {
    let work = || async {
        moves(&node, interval).await?;
        notify(&[sd_notify::NotifyState::Watchdog]);
        Ok::<_, String>(())
    };
    node.controllers.run("watchdog", interval / 3, node.stop.clone(), work).await;
}

/// Do the parts that matter move?
///
/// # Errors
/// Which does not.
async fn moves(node: &Arc<LinuxNode>, interval: Duration) -> Result<(), String> {
    // Half of the interval is what the rest of it can make good before systemd acts.
    let bound = interval / 2;
    beats("the main runtime", &node.pulses.runtime, bound)?;
    beats("the API's listener", &node.pulses.api, bound)?;
    status::answers(node, tokio::time::Instant::now() + bound)
        .await
        .map_err(|why| format!("the store does not answer: {why}"))?;
    match node.controllers.overdue(&CRITICAL) {
        Some((name, ran)) => Err(format!("controller {name}: a run has not ended for {} s", ran.as_secs())),
        None => Ok(()),
    }
}

fn beats(what: &str, pulse: &Pulse, bound: Duration) -> Result<(), String> {
    match pulse.age() {
        Some(age) if age <= bound => Ok(()),
        Some(age) => Err(format!("{what} shows no sign of life for {} ms", age.as_millis())),
        None => Err(format!("{what} has not begun")),
    }
}
