//! The feed for API and status.

use std::{collections::BTreeMap, time::Duration};

use wharf_api::{ClusterPod, ClusterPods, ClusterPodsQuery, FeedRows, FeedWatch, RefusedRow};
use wharf_cluster::feed::{FeedPod, Kind, Refusal};
use wharf_kit::{clock, sync::lock};

use super::{ClusterFeed, Inner, Mark};

const MAX_SHOWN: usize = 64;
/// A restart of an API server takes less.
const FAILING: Duration = Duration::from_secs(60);

impl ClusterFeed {
    /// State of the feed.
    #[must_use]
    pub fn view(&self) -> wharf_api::ClusterFeed {
        let in_force = *self.in_force.borrow();
        let inner = lock(&self.inner);
        let restoring = self.restoring();
        let counts = inner.feed.counts();
        let known = counts.iter().filter(|(kind, _)| restoring.is_none() || **kind == Kind::Node);
        let rows = known.map(|(kind, count)| {
            let unfit = |is: fn(&Refusal) -> bool| {
                inner.unfit.iter().filter(|refusal| refusal.key.kind == *kind && is(refusal)).count()
            };
            let away = unfit(|refusal| !refusal.stale && !refusal.conflict);
            FeedRows {
                kind: kind.to_string(),
                in_force: number(count.in_force.saturating_sub(away)),
                complete: count.complete,
                refused: number(count.refused + unfit(|refusal| !refusal.conflict)),
                stale: number(count.stale + unfit(|refusal| refusal.stale)),
                conflicts: number(count.conflicts + unfit(|refusal| refusal.conflict)),
            }
        });
        let sequence_of =
            |mark: Mark| Some(mark.sequence).filter(|sequence| *sequence > 0 && mark.stream == inner.stream);
        wharf_api::ClusterFeed {
            socket: self.socket.display().to_string(),
            producer: inner.producer.clone(),
            cluster: inner.cluster.clone(),
            connected_since_unix_ms: inner.holder.as_ref().map(|holder| holder.since_unix_ms),
            rows: rows.collect(),
            processed: sequence_of(inner.processed),
            in_force: sequence_of(in_force),
            watches: inner.watches.clone(),
            refused_total: number(inner.refused_total()),
            refused: inner.refused().take(MAX_SHOWN).map(shown).collect(),
            problem: self.reach.lost().or(restoring).or_else(|| problem(&inner)),
        }
    }
}

impl ClusterFeed {
    /// At most `most` pods in force, and the number of all.
    #[must_use]
    pub fn pods(&self, query: &ClusterPodsQuery, most: usize) -> ClusterPods {
        let is_of = |wanted: &Option<String>, is: &str| wanted.as_ref().is_none_or(|wanted| wanted == is);
        let inner = lock(&self.inner);
        let all = inner.feed.pods_in_force();
        let found = all.filter(|pod| is_of(&query.namespace, &pod.namespace) && is_of(&query.node, &pod.node));
        let (mut pods, mut total) = (Vec::new(), 0);
        for FeedPod { uid, namespace, name, addresses, node, labels, .. } in found {
            total += 1;
            if pods.len() < most {
                pods.push(ClusterPod {
                    uid: uid.to_string(),
                    namespace: namespace.to_string(),
                    name: name.to_string(),
                    node: node.to_string(),
                    addresses: addresses.to_vec(),
                    labels: BTreeMap::clone(labels),
                });
            }
        }
        ClusterPods { total, pods }
    }
}

fn problem(inner: &Inner) -> Option<String> {
    let file = &inner.file;
    if let Some(why) = file.set_aside.as_ref().or(file.not_kept.as_ref()) {
        return Some(why.clone());
    }
    if let Some(why) = &inner.not_taken {
        return Some(format!("changes of the cluster feed are not in force: {why}"));
    }
    if inner.holder.is_none() {
        let what = if inner.has_rows() { "; the rows of the last one stay in force" } else { "" };
        return Some(format!("no producer is connected to the cluster feed{what}"));
    }
    if let Some(why) = failing(&inner.watches, clock::unix_ms()) {
        return Some(why);
    }
    if !inner.is_synced() {
        return Some("the producer of the cluster feed has not sent every row yet".to_owned());
    }
    let first = inner.refused().next()?;
    Some(format!("refused {first}{}", and_more(inner.refused_total())))
}

/// Without a time: the producer makes an event of each text.
fn failing(watches: &[FeedWatch], now_unix_ms: u64) -> Option<String> {
    let is_long = |watch: &&FeedWatch| {
        let age = Duration::from_millis(now_unix_ms.saturating_sub(watch.since_unix_ms));
        watch.state == "failing" && age >= FAILING
    };
    let mut failing = watches.iter().filter(is_long);
    let FeedWatch { name, error, .. } = failing.next()?;
    let why = error.as_deref().unwrap_or("the producer reports no cause");
    Some(format!("the producer's watch of {name} fails: {why}{}", and_more(1 + failing.count())))
}

/// `all` includes the named row.
fn and_more(all: usize) -> String {
    match all.saturating_sub(1) {
        0 => String::new(),
        more => format!("; and {more} more (`wharf cluster feed`)"),
    }
}

fn shown(refusal: Refusal) -> RefusedRow {
    let Refusal { key, name, why, stale, conflict } = refusal;
    RefusedRow { kind: key.kind.to_string(), key: key.key, name, reason: why, stale, conflict }
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
