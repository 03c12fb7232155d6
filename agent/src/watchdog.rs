//! systemd's watchdog (sd_watchdog_enabled(3)), fed from the admin thread while important parts make progress.

use std::{sync::Arc, time::Duration};

use wharf_kit::{pulse::Pulse, systemd::notify};

use crate::{endpoint::deletions, node::Node, status};

/// Their hang damages the node while the agent looks alive.
pub const CRITICAL: [&str; 2] = ["node-datapath", deletions::CONTROLLER];

/// Notifies three times per interval.
pub async fn feed(node: Arc<Node>, interval: Duration) {
    let work = || async {
        moves(&node, interval).await?;
        notify(&[sd_notify::NotifyState::Watchdog]);
        Ok::<_, Stalled>(())
    };
    node.life.tasks.controllers.run("watchdog", interval / 3, node.life.tasks.stop.clone(), work).await;
}

#[derive(Debug, thiserror::Error)]
enum Stalled {
    #[error("{0} shows no sign of life for {silent} ms", silent = .1.as_millis())]
    Silent(&'static str, Duration),
    #[error("{0} has not begun")]
    NotBegun(&'static str),
    #[error("the store does not answer: {0}")]
    Store(String),
    #[error("controller {0}: a run has not ended for {ran} s", ran = .1.as_secs())]
    Controller(String, Duration),
}

async fn moves(node: &Arc<Node>, interval: Duration) -> Result<(), Stalled> {
    let bound = interval / 2;
    beats("the main runtime", &node.pulses.runtime, bound)?;
    beats("the API's listener", &node.pulses.api, bound)?;
    if let Some(why) = status::store_waits_for(node, tokio::time::Instant::now() + bound).await {
        return Err(Stalled::Store(why));
    }
    match node.life.tasks.controllers.overdue(&CRITICAL) {
        Some((name, ran)) => Err(Stalled::Controller(name, ran)),
        None => Ok(()),
    }
}

fn beats(what: &'static str, pulse: &Pulse, bound: Duration) -> Result<(), Stalled> {
    match pulse.age() {
        Some(age) if age <= bound => Ok(()),
        Some(age) => Err(Stalled::Silent(what, age)),
        None => Err(Stalled::NotBegun(what)),
    }
}
