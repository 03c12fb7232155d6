//! One call at a time about an attachment.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use tokio::sync::{Mutex as Turn, Notify, OwnedMutexGuard};
use wharf_core::ids::{Attachment, ContainerId, IfName, NetworkName};
use wharf_kit::sync::lock;

/// Interface names are unique in a container.
type Place = (ContainerId, IfName);

/// Turns of attachments, in order of arrival; bounded by the operations.
#[derive(Debug, Default)]
pub struct Turns {
    /// Turns are held across bounded awaits.
    places: Mutex<HashMap<Place, Arc<Turn<()>>>>,
    /// One lock: an Add is on a Gc's list, or sees the Gc.
    under_way: Mutex<UnderWay>,
    collected: Notify,
}

#[derive(Debug, Default)]
struct UnderWay {
    adding: BTreeSet<Attachment>,
    collecting: Vec<NetworkName>,
}

impl Turns {
    /// Waits for the turn.
    pub async fn take(self: &Arc<Self>, attachment: &Attachment) -> Held {
        let place = place(attachment);
        let turn = Arc::clone(lock(&self.places).entry(place.clone()).or_default());
        // First: a cancelled wait releases the place.
        let mut held = Held { turns: Arc::clone(self), place, turn: None };
        held.turn = Some(turn.lock_owned().await);
        held
    }

    /// Takes a free turn without waiters.
    #[must_use]
    pub fn try_take(self: &Arc<Self>, attachment: &Attachment) -> Option<Held> {
        let place = place(attachment);
        let mut places = lock(&self.places);
        // Under the lock: a dropped holder does not count this reference.
        let turn = Arc::clone(places.entry(place.clone()).or_default()).try_lock_owned().ok()?;
        drop(places);
        Some(Held { turns: Arc::clone(self), place, turn: Some(turn) })
    }

    /// Registers an Add; send it after [`Adding::listed`].
    #[must_use]
    pub fn add(self: &Arc<Self>, attachment: &Attachment) -> Adding {
        let mut under_way = lock(&self.under_way);
        under_way.adding.insert(attachment.clone());
        let is_listed = !under_way.collecting.contains(&attachment.network);
        Adding { turns: Arc::clone(self), attachment: attachment.clone(), is_listed }
    }

    /// Registers a Gc, whose list must include the returned Adds. Later Adds wait.
    #[must_use]
    pub fn collect(self: &Arc<Self>, network: &NetworkName) -> (Collecting, Vec<Attachment>) {
        let mut under_way = lock(&self.under_way);
        under_way.collecting.push(network.clone());
        let adding = under_way.adding.iter().filter(|a| a.network == *network).cloned().collect();
        (Collecting { turns: Arc::clone(self), network: network.clone() }, adding)
    }
}

fn place(attachment: &Attachment) -> Place {
    (attachment.container_id.clone(), attachment.ifname.clone())
}

/// An attachment's turn.
#[derive(Debug)]
pub struct Held {
    turns: Arc<Turns>,
    place: Place,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.turn.take();
        let mut places = lock(&self.turns.places);
        // Cloned only under this lock: a single reference is the map's.
        if places.get(&self.place).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            places.remove(&self.place);
        }
    }
}

/// A registered Add.
#[derive(Debug)]
pub struct Adding {
    turns: Arc<Turns>,
    attachment: Attachment,
    is_listed: bool,
}

impl Adding {
    /// Waits until every running Gc of its network lists it.
    pub async fn listed(&self) {
        if self.is_listed {
            return;
        }
        loop {
            let ended = self.turns.collected.notified();
            // After `notified`, which receives later ends.
            if !lock(&self.turns.under_way).collecting.contains(&self.attachment.network) {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for Adding {
    fn drop(&mut self) {
        lock(&self.turns.under_way).adding.remove(&self.attachment);
    }
}

/// A registered Gc.
#[derive(Debug)]
pub struct Collecting {
    turns: Arc<Turns>,
    network: NetworkName,
}

impl Drop for Collecting {
    fn drop(&mut self) {
        let mut under_way = lock(&self.turns.under_way);
        if let Some(at) = under_way.collecting.iter().position(|network| *network == self.network) {
            under_way.collecting.swap_remove(at);
        }
        drop(under_way);
        self.turns.collected.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(network: &str, container: &str) -> Attachment {
        Attachment {
            network: network.parse().expect("a network"),
            container_id: container.parse().expect("an id"),
            ifname: "eth0".parse().expect("a name"),
        }
    }

    #[tokio::test]
    async fn one_at_a_time_in_order_and_nothing_is_left() {
        let turns = Arc::new(Turns::default());
        let held = turns.take(&attachment("net", "a")).await;
        assert!(turns.try_take(&attachment("other", "a")).is_none(), "the interface is the same");
        drop(turns.try_take(&attachment("net", "b")).expect("another container"));
        let waiter = tokio::spawn({
            let turns = Arc::clone(&turns);
            async move { turns.take(&attachment("net", "a")).await }
        });
        tokio::task::yield_now().await;
        drop(held);
        assert!(turns.try_take(&attachment("net", "a")).is_none(), "the waiter is first");
        drop(waiter.await.expect("joined"));
        assert!(lock(&turns.places).is_empty());
        let held = turns.take(&attachment("net", "a")).await;
        let a = attachment("net", "a");
        let gives_up = turns.take(&a);
        tokio::time::timeout(std::time::Duration::from_millis(5), gives_up).await.expect_err("held");
        drop(held);
        assert!(lock(&turns.places).is_empty());
    }

    #[tokio::test]
    async fn an_add_that_no_gc_lists_waits_for_its_end() {
        let turns = Arc::new(Turns::default());
        let waits = async |adding: &Adding| {
            tokio::time::timeout(std::time::Duration::from_millis(5), adding.listed()).await.is_err()
        };
        let a = attachment("net", "a");
        let before = turns.add(&a);
        let (gc, listed) = turns.collect(&a.network);
        assert_eq!(listed, std::slice::from_ref(&a));
        let (later, other) = (turns.add(&attachment("net", "b")), turns.add(&attachment("other", "c")));
        assert!(!waits(&before).await && waits(&later).await && !waits(&other).await);
        let (second, listed) = turns.collect(&a.network);
        assert_eq!(listed.len(), 2);
        drop(gc);
        assert!(waits(&later).await, "another one is under way");
        drop(second);
        assert!(!waits(&later).await);
        drop((before, later, other));
        let under_way = lock(&turns.under_way);
        assert!(under_way.adding.is_empty() && under_way.collecting.is_empty());
    }
}
