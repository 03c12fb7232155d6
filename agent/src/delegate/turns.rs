//! Order: one call at a time about an attachment.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use wharf_core::ids::{Attachment, ContainerId, IfName};

use crate::sync::lock;

/// An interface's name is unique in its container, so two networks share the turn of one.
type Place = (ContainerId, IfName);

/// The turns of all attachments that something is done about, in order of arrival. As many as there are operations.
#[derive(Debug, Default)]
pub struct Turns {
    /// Held across awaits by design: each call of an operation is bounded.
    places: Mutex<HashMap<Place, Arc<Turn<()>>>>,
    /// Attachments whose Add is under way.
    adding: Mutex<BTreeSet<Attachment>>,
}

impl Turns {
    /// Waits for the turn.
    pub async fn take(self: &Arc<Self>, attachment: &Attachment) -> Held {
        let place = place(attachment);
        let turn = Arc::clone(lock(&self.places).entry(place.clone()).or_default());
        // First, so that the place goes with a waiter that gives up, too.
        let mut held = Held { turns: Arc::clone(self), place, turn: None };
        held.turn = Some(turn.lock_owned().await);
        held
    }

    /// Takes the turn if nobody has it or waits for it.
    #[must_use]
    pub fn try_take(self: &Arc<Self>, attachment: &Attachment) -> Option<Held> {
        let place = place(attachment);
        let mut places = lock(&self.places);
        // Under the lock, so that a holder who leaves does not count this reference.
        let turn = Arc::clone(places.entry(place.clone()).or_default()).try_lock_owned().ok()?;
        drop(places);
        Some(Held { turns: Arc::clone(self), place, turn: Some(turn) })
    }

    /// An Add begins.
    #[must_use]
    pub fn add(self: &Arc<Self>, attachment: &Attachment) -> Adding {
        lock(&self.adding).insert(attachment.clone());
        Adding { turns: Arc::clone(self), attachment: attachment.clone() }
    }

    /// Attachments whose Add is under way.
    #[must_use]
    pub fn adding(&self) -> Vec<Attachment> {
        lock(&self.adding).iter().cloned().collect()
    }
}

fn place(attachment: &Attachment) -> Place {
    (attachment.container_id.clone(), attachment.ifname.clone())
}

/// The turn of an attachment.
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
        // Clones are made under this lock alone: one reference is the map's, and nobody waits.
        if places.get(&self.place).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            places.remove(&self.place);
        }
    }
}

/// An Add under way.
#[derive(Debug)]
pub struct Adding {
    turns: Arc<Turns>,
    attachment: Attachment,
}

impl Drop for Adding {
    fn drop(&mut self) {
        lock(&self.turns.adding).remove(&self.attachment);
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
        // One that gives up waiting leaves nothing either.
        let held = turns.take(&attachment("net", "a")).await;
        let a = attachment("net", "a");
        let gives_up = turns.take(&a);
        tokio::time::timeout(std::time::Duration::from_millis(5), gives_up).await.expect_err("held");
        drop(held);
        assert!(lock(&turns.places).is_empty());
    }
}
