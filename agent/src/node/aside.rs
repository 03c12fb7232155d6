//! A table of leftovers (orphans, records out of service, unfinished undos), indexed by endpoint id and by container,
//! so that a delete finds the rows of its container directly.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use wharf_core::ids::{Attachment, ContainerId, EndpointId, IfName, NetworkName};

/// Selects leftovers by attachment.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Any network when absent.
    pub network: Option<NetworkName>,
    /// Container.
    pub container_id: ContainerId,
    /// Any interface when absent.
    pub ifname: Option<IfName>,
}

impl Wanted {
    /// One attachment.
    #[must_use]
    pub fn of(a: &Attachment) -> Self {
        Self { network: Some(a.network.clone()), container_id: a.container_id.clone(), ifname: Some(a.ifname.clone()) }
    }

    /// Whether this attachment matches.
    #[must_use]
    pub fn fits(&self, a: &Attachment) -> bool {
        self.container_id == a.container_id
            && self.network.as_ref().is_none_or(|n| *n == a.network)
            && self.ifname.as_ref().is_none_or(|i| *i == a.ifname)
    }
}

/// The table. At most as many rows as there are ids.
#[derive(Debug, Clone)]
pub struct Aside<T> {
    rows: BTreeMap<EndpointId, (Option<Attachment>, T)>,
    by_container: HashMap<ContainerId, BTreeSet<EndpointId>>,
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), by_container: HashMap::new() }
    }
}

impl<T> Aside<T> {
    /// Inserts a row, replacing the row of the same id. `attachment`: the owner, if known.
    pub fn put(&mut self, id: EndpointId, attachment: Option<Attachment>, row: T) {
        self.remove(id);
        if let Some(a) = &attachment {
            self.by_container.entry(a.container_id.clone()).or_default().insert(id);
        }
        self.rows.insert(id, (attachment, row));
    }

    /// Takes a row out.
    pub fn remove(&mut self, id: EndpointId) -> Option<T> {
        let (attachment, row) = self.rows.remove(&id)?;
        if let Some(a) = attachment
            && let Some(ids) = self.by_container.get_mut(&a.container_id)
        {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_container.remove(&a.container_id);
            }
        }
        Some(row)
    }

    /// The row of an id.
    #[must_use]
    pub fn get(&self, id: EndpointId) -> Option<&T> {
        self.rows.get(&id).map(|(_, row)| row)
    }

    /// Ids of the rows that match.
    #[must_use]
    pub fn find(&self, wanted: &Wanted) -> Vec<EndpointId> {
        let ids = self.by_container.get(&wanted.container_id).into_iter().flatten().copied();
        ids.filter(|id| matches!(self.rows.get(id), Some((Some(a), _)) if wanted.fits(a))).collect()
    }

    /// Attachments of the rows, where known.
    pub fn attachments(&self) -> impl Iterator<Item = &Attachment> {
        self.rows.values().filter_map(|(attachment, _)| attachment.as_ref())
    }

    /// Every id.
    pub fn ids(&self) -> impl Iterator<Item = EndpointId> {
        self.rows.keys().copied()
    }

    /// Every row, by id.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.rows.values().map(|(_, row)| row)
    }

    /// How many rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// No row at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(container: &str, ifname: &str) -> Attachment {
        Attachment {
            network: NetworkName::parse("net").expect("network"),
            container_id: ContainerId::parse(container).expect("container"),
            ifname: IfName::parse(ifname).expect("interface"),
        }
    }

    fn id(n: u16) -> EndpointId {
        EndpointId::try_from(n).expect("id")
    }

    #[test]
    fn rows_are_found_by_container_until_they_are_removed_or_replaced() {
        let mut aside = Aside::default();
        aside.put(id(1), Some(of("a", "eth0")), "1");
        aside.put(id(2), Some(of("a", "eth1")), "2");
        aside.put(id(3), None, "3");
        let whole = |container: &str| Wanted { network: None, ifname: None, ..Wanted::of(&of(container, "eth0")) };
        assert_eq!(aside.find(&whole("a")), [id(1), id(2)]);
        assert_eq!(aside.find(&Wanted::of(&of("a", "eth1"))), [id(2)]);
        aside.put(id(2), Some(of("b", "eth1")), "2b");
        assert_eq!((aside.find(&whole("a")), aside.find(&whole("b"))), (vec![id(1)], vec![id(2)]));
        assert_eq!((aside.remove(id(1)), aside.remove(id(1))), (Some("1"), None));
        assert_eq!((aside.find(&whole("a")), aside.len(), aside.by_container.len()), (vec![], 2, 1));
    }
}
