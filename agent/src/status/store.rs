//! The store's writer and commits.

use std::sync::{Arc, atomic::Ordering};

use wharf_api::{ComponentStatus, Health};
use wharf_store::Store;

use super::Source;
use crate::node::{part::Fill, timeline::Timelines};

pub(super) fn source() -> Source {
    Source {
        name: "store",
        look: |node| Box::pin(async move { look(&node.life.store, &node.life.endpoints.timelines).await }),
        silent: |node| match node.life.store.stats().writing_for() {
            Some(busy) => (Health::Failing, format!("its disk has been at one piece of work for {} s", busy.as_secs())),
            None => (Health::Degraded, "waits for its writer thread".into()),
        },
    }
}

async fn look(store: &Store, timelines: &Timelines) -> Fill {
    let answer = store.ping().await;
    let stats = store.stats();
    let (commits, failures) = (stats.commits.load(Ordering::Relaxed), stats.failures.load(Ordering::Relaxed));
    let mut counted = format!("{commits} commits, {failures} failed");
    let untold = stats.timeline_dropped.load(Ordering::Relaxed).saturating_add(timelines.dropped());
    if untold > 0 {
        counted.push_str(&format!(", {untold} without room for their timeline"));
    }
    let (health, message) = match (answer, stats.failed_recently(), stats.rewritten_recently()) {
        (Err(error), ..) => (Health::Failing, error.to_string()),
        (Ok(()), _, Some((ago, what))) => {
            (Health::Degraded, format!("{counted}; written anew {} s ago: {what}", ago.as_secs()))
        }
        (Ok(()), Some((ago, cause)), None) => {
            (Health::Failing, format!("{counted}, the last {} s ago: {cause}; is the disk full?", ago.as_secs()))
        }
        (Ok(()), None, None) if !stats.healthy.load(Ordering::Relaxed) => (Health::Failing, counted),
        (Ok(()), None, None) => (Health::Ok, counted),
    };
    Arc::new(move |status| status.components.push(ComponentStatus::new("store", health, message.clone())))
}
