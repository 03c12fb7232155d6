//! Restores the network of containers whose interface was down.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use wharf_core::kernel::KernelError;
use wharf_datapath::{Carriers, LinkWatch, LinuxKernel};

use crate::{
    endpoint::relink::{self, Relinks},
    node::lifecycle::Lifecycle,
};

const CONTROLLER: &str = "links";
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until the agent stops.
pub async fn watch(life: Arc<Lifecycle>, kernel: Arc<LinuxKernel>) {
    let (mut known, mut relinks) = (Carriers::default(), Relinks::default());
    loop {
        match kernel.watch_links(known.clone()).await {
            Ok(mut watch) => {
                life.tasks.controllers.record(CONTROLLER, Ok::<_, &KernelError>(()));
                let Some(why) = follow(&life, &mut watch, &mut relinks).await else { return };
                // A burst of changes overflows the socket; the next watch compares.
                tracing::debug!("{why}; the links are read again");
                known = watch.carriers();
            }
            Err(why) => {
                tracing::warn!("{why}; a container whose interface was down stays without routes");
                life.tasks.controllers.record(CONTROLLER, Err(&why));
            }
        }
        tokio::select! {
            () = life.tasks.stop.cancelled() => return,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

async fn follow(life: &Arc<Lifecycle>, watch: &mut LinkWatch, relinks: &mut Relinks) -> Option<KernelError> {
    loop {
        let next = relinks.next();
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = life.tasks.stop.cancelled() => return None,
            links = watch.next() => match links {
                Ok(links) => relinks.plan(links, Instant::now()),
                Err(why) => return Some(why),
            },
            () = due => {
                for link in relinks.take(Instant::now()) {
                    // The call cannot be cancelled. A stop does not wait for it, other callers at most `LIMIT`.
                    let restore = relink::restore(&*life.kernel, &life.endpoints.registry, link);
                    let restored = tokio::select! {
                        () = life.tasks.stop.cancelled() => return None,
                        restored = tokio::time::timeout(relink::LIMIT, restore) => restored,
                    };
                    let why = match restored {
                        Ok(Ok(true)) => continue,
                        Ok(Ok(false)) => None,
                        Ok(Err(why)) => Some(why.to_string()),
                        Err(_) => Some(format!("no answer within {:?}", relink::LIMIT)),
                    };
                    if let Some(why) = why {
                        tracing::warn!(ifindex = link.0, "look at a link that came up again: {why}; it is tried again");
                    }
                    relinks.retry(link, Instant::now());
                }
            }
        }
    }
}
