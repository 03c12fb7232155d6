//! Address rows, and the row count of each class.

use std::ops::Deref;

use imbl::OrdMap;
use ipnet::IpNet;

use super::{Known, PeerClass};

/// Address rows, and their number per class.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ipcache {
    rows: OrdMap<IpNet, Known>,
    users: OrdMap<PeerClass, usize>,
}

impl Ipcache {
    /// Returns the previous row.
    pub fn insert(&mut self, net: IpNet, known: Known) -> Option<Known> {
        let old = self.rows.insert(net, known);
        if old.map(|old| old.class) != Some(known.class) {
            *self.users.entry(known.class).or_default() += 1;
            self.leave(old);
        }
        old
    }

    /// Removes and returns a row.
    pub fn remove(&mut self, net: &IpNet) -> Option<Known> {
        let old = self.rows.remove(net);
        self.leave(old);
        old
    }

    fn leave(&mut self, old: Option<Known>) {
        let Some(Known { class, .. }) = old else { return };
        match self.users(class) {
            0 | 1 => drop(self.users.remove(&class)),
            users => drop(self.users.insert(class, users - 1)),
        }
    }

    pub(super) fn users(&self, class: PeerClass) -> usize {
        self.users.get(&class).copied().unwrap_or(0)
    }

    pub(super) fn classes(&self) -> impl DoubleEndedIterator<Item = PeerClass> {
        self.users.keys().copied()
    }
}

impl Deref for Ipcache {
    type Target = OrdMap<IpNet, Known>;

    fn deref(&self) -> &Self::Target {
        &self.rows
    }
}

impl FromIterator<(IpNet, Known)> for Ipcache {
    fn from_iter<I: IntoIterator<Item = (IpNet, Known)>>(rows: I) -> Self {
        let mut all = Self::default();
        for (net, known) in rows {
            all.insert(net, known);
        }
        all
    }
}
