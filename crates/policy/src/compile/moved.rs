//! Connections that leave a listener.

use std::collections::{BTreeMap, BTreeSet};

use imbl::ordmap::DiffItem;

use super::{Decision, EndpointKey, Known, L4, ListenerId, PeerClass, Rows, SetId, Sets, Tables, networks::covering};

type Classes = BTreeSet<(PeerClass, PeerClass)>;

impl Tables {
    /// Endpoints with accepted connections that leave a listener which is in both tables.
    #[must_use]
    pub fn moved(&self, after: &Self) -> BTreeSet<(ListenerId, EndpointKey)> {
        if self.redirects.is_empty() || after.redirects.is_empty() {
            return BTreeSet::new();
        }
        let changed = self.changed_classes(after);
        let mut endpoints: BTreeMap<(SetId, SetId), Vec<EndpointKey>> = BTreeMap::new();
        let mut add = |key: EndpointKey, before: Sets, sets: Sets| {
            for pair in [(before.ingress, sets.ingress), (before.egress, sets.egress)] {
                endpoints.entry(pair).or_default().push(key);
            }
        };
        if changed.is_empty() {
            for difference in self.sets.diff(&after.sets) {
                if let DiffItem::Update { old: (key, before), new: (_, sets) } = difference {
                    add(*key, *before, *sets);
                }
            }
        } else {
            let both = after.sets.iter().filter_map(|(key, sets)| Some((key, self.sets.get(key)?, sets)));
            both.for_each(|(key, before, sets)| add(*key, *before, *sets));
        }
        let (listeners, listeners_after) = (self.listeners_of_sets(), after.listeners_of_sets());
        let mut moved = BTreeSet::new();
        for ((set, set_after), keys) in endpoints {
            let (Some(there), Some(stay)) = (listeners.get(&set), listeners_after.get(&set_after)) else { continue };
            let (Some(rows), Some(rows_after)) = (self.rules.get(&set), after.rules.get(&set_after)) else { continue };
            let mut classes = changed.clone();
            if set != set_after {
                let has = |class: &PeerClass| after.ipcache.users(*class) > 0;
                classes.extend(self.ipcache.classes().filter(has).map(|class| (class, class)));
            }
            let stay: BTreeSet<_> = there.intersection(stay).copied().collect();
            let of_set = led_elsewhere(rows, rows_after, &classes, &stay);
            moved.extend(of_set.iter().flat_map(|listener| keys.iter().map(|key| (*listener, *key))));
        }
        moved
    }

    fn listeners_of_sets(&self) -> BTreeMap<SetId, BTreeSet<ListenerId>> {
        let mut all: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for (listener, set) in self.redirects.keys() {
            all.entry(*set).or_default().insert(*listener);
        }
        all
    }

    /// Added and removed endpoints have no connections.
    fn changed_classes(&self, after: &Self) -> Classes {
        let differences = self.ipcache.diff(&after.ipcache).filter_map(|difference| match difference {
            DiffItem::Update { old: (_, before), new: (_, known) } => Some((before.class, known.class)),
            DiffItem::Add(_, Known { identity, .. }) | DiffItem::Remove(_, Known { identity, .. })
                if identity.is_of_endpoints() =>
            {
                None
            }
            DiffItem::Add(net, known) => Some((covering(&self.ipcache, *net)?.1.class, known.class)),
            DiffItem::Remove(net, known) => Some((known.class, covering(&after.ipcache, *net)?.1.class)),
        });
        differences.filter(|(before, class)| before != class).collect()
    }
}

/// Listeners whose destinations the new rows accept otherwise.
fn led_elsewhere(before: &Rows, after: &Rows, classes: &Classes, of: &BTreeSet<ListenerId>) -> BTreeSet<ListenerId> {
    let destinations = edges(before, after);
    let mut found = BTreeSet::new();
    for (class, class_after) in classes {
        for (l4, port) in &destinations {
            let listener = before.decide(*class, before.class_of(*l4, *port)).listener;
            let Some(listener) = listener.filter(|listener| of.contains(listener)) else { continue };
            let Decision { accept, listener: then, .. } = after.decide(*class_after, after.class_of(*l4, *port));
            if accept && then != Some(listener) {
                found.insert(listener);
            }
        }
    }
    found
}

/// One destination per uniform range.
fn edges(before: &Rows, after: &Rows) -> BTreeSet<(L4, u16)> {
    let prefixes = before.ports.keys().chain(after.ports.keys());
    let ends = prefixes.flat_map(|prefix| {
        let last = prefix.first | u16::MAX.checked_shr(prefix.length.into()).unwrap_or(0);
        [Some((prefix.l4, prefix.first)), last.checked_add(1).map(|next| (prefix.l4, next))]
    });
    ends.flatten().collect()
}
