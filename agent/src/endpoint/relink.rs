//! Restores routes and IPv6 addresses, which the kernel removes from a container's interface that goes down.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use tokio::{
    sync::{mpsc::error::TrySendError, oneshot},
    time::Instant,
};
use wharf_api::LogStatus;
use wharf_core::{
    finding::{Mender, Problem},
    ids::IfIndex,
    kernel::{Kernel, KernelError},
    state::Level,
};

use crate::{
    endpoint::look,
    findings,
    node::{
        endpoint::{Command, Handle},
        registry::Registry,
    },
};

/// Joins several toggles into one look.
const SETTLE: Duration = Duration::from_millis(200);
/// Minimum between looks at a link, which may regenerate and log. Doubles up to [`MAX_PACE`] while the container
/// toggles its interface.
const PACE: Duration = Duration::from_secs(10);
const MAX_PACE: Duration = Duration::from_secs(80);
/// Bound of a look.
pub const LIMIT: Duration = Duration::from_secs(5);

/// Planned looks.
#[derive(Debug, Default)]
pub struct Relinks {
    due: BTreeMap<IfIndex, Instant>,
    /// With the minimum time until the next.
    looked: BTreeMap<IfIndex, (Instant, Duration)>,
}

impl Relinks {
    /// Plans looks at links that are up again.
    pub fn plan(&mut self, links: Vec<IfIndex>, now: Instant) {
        self.looked.retain(|_, (looked, pace)| now.duration_since(*looked) < *pace * 2);
        for link in links {
            let Entry::Vacant(due) = self.due.entry(link) else { continue };
            let next = self.looked.get_mut(&link).map_or(now, |(looked, pace)| {
                let next = *looked + *pace;
                *pace = MAX_PACE.min(*pace * 2);
                next
            });
            due.insert(next.max(now + SETTLE));
        }
    }

    /// Plans another look.
    pub fn retry(&mut self, link: IfIndex, now: Instant) {
        self.due.entry(link).or_insert(now + PACE);
    }

    /// The earliest look.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.due.values().min().copied()
    }

    /// Removes and returns due links.
    pub fn take(&mut self, now: Instant) -> Vec<IfIndex> {
        let due: Vec<IfIndex> = self.due.iter().filter(|(_, due)| **due <= now).map(|(link, _)| *link).collect();
        for link in &due {
            self.due.remove(link);
            self.looked.entry(*link).or_insert((now, PACE)).0 = now;
        }
        due
    }
}

/// Regenerates the link's endpoint if something is missing. False: busy, look again.
pub async fn restore(kernel: &dyn Kernel, registry: &Registry, link: IfIndex) -> Result<bool, KernelError> {
    let of_link = |handle: &Handle| handle.shared.read(|v| v.record.host_ifindex == link);
    let Some(handle) = registry.list().into_iter().find(of_link) else { return Ok(true) };
    let look = look::once(kernel, &handle).await?;
    if !look.settled {
        return Ok(false);
    }
    let is_repaired = |problem: &&Problem| {
        matches!(problem.mender(), Mender::Regeneration(_) | Mender::Container { regenerable: true })
    };
    let Some(first) = look.problems.iter().find(is_repaired) else { return Ok(true) };
    let what = format!("the interface was down; restores what the kernel removed: {}", findings::in_words(first));
    let (done, _answer) = oneshot::channel();
    match handle.mailbox.try_send(Command::Regenerate(Level::Datapath, done)) {
        Ok(()) => {
            tracing::info!(endpoint = handle.id.get(), "{what}");
            handle.shared.log(LogStatus::Warning, "link", what);
            Ok(true)
        }
        Err(TrySendError::Full(_)) => Ok(false),
        Err(TrySendError::Closed(_)) => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_toggles_is_looked_at_once_in_a_while_and_after_the_last_time() {
        let (start, link) = (Instant::now(), IfIndex(7));
        let at = |ms| start + Duration::from_millis(ms);
        let mut relinks = Relinks::default();
        relinks.plan(vec![link], at(0));
        relinks.plan(vec![link, IfIndex(8)], at(100));
        assert_eq!(relinks.next(), Some(at(200)), "soon after the first time");
        assert_eq!(relinks.take(at(199)), []);
        assert_eq!(relinks.take(at(200)), [link]);
        assert_eq!(relinks.take(at(300)), [IfIndex(8)]);
        relinks.plan(vec![link], at(400));
        relinks.plan(vec![link], at(9_000));
        assert_eq!(relinks.next(), Some(at(10_200)), "the last time is not forgotten");
        assert_eq!(relinks.take(at(10_200)), [link]);
        relinks.plan(vec![link], at(60_000));
        assert_eq!(relinks.next(), Some(at(60_200)));
    }

    #[test]
    fn a_link_that_keeps_toggling_is_looked_at_less_often() {
        let (start, link) = (Instant::now(), IfIndex(7));
        let (mut relinks, mut at, mut waits) = (Relinks::default(), start, Vec::new());
        for _ in 0..6 {
            relinks.plan(vec![link], at);
            let next = relinks.next().expect("planned");
            waits.push(next.duration_since(at).as_secs());
            assert_eq!(relinks.take(next), [link]);
            at = next;
        }
        assert_eq!(waits, [0, 10, 20, 40, 80, 80]);
        relinks.plan(vec![link], at + 2 * MAX_PACE);
        assert_eq!(relinks.next(), Some(at + 2 * MAX_PACE + SETTLE), "it was quiet");
    }

    #[test]
    fn a_look_that_did_not_succeed_is_no_toggling() {
        let (mut at, link, mut relinks) = (Instant::now(), IfIndex(7), Relinks::default());
        relinks.plan(vec![link], at);
        at += SETTLE;
        for _ in 0..4 {
            assert_eq!(relinks.take(at), [link]);
            relinks.retry(link, at);
            assert_eq!(relinks.next(), Some(at + PACE));
            at += PACE;
        }
    }
}
