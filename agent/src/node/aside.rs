//! Leftovers by endpoint id and by container.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Mutex,
};

use wharf_core::ids::{Attachment, ContainerId, EndpointId, IfName, NetworkName};
use wharf_kit::sync::lock;

/// Selects leftovers.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Any when absent.
    pub network: Option<NetworkName>,
    pub container_id: ContainerId,
    /// Any when absent.
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

/// At most one row per id.
#[derive(Debug)]
pub struct Aside<T>(Mutex<Rows<T>>);

#[derive(Debug)]
struct Rows<T> {
    by_id: BTreeMap<EndpointId, (Option<Attachment>, T)>,
    by_container: HashMap<ContainerId, BTreeSet<EndpointId>>,
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self(Mutex::new(Rows { by_id: BTreeMap::new(), by_container: HashMap::new() }))
    }
}

impl<T: Clone> Aside<T> {
    /// Inserts or replaces a row. `attachment`: if known.
    pub fn put(&self, id: EndpointId, attachment: Option<Attachment>, row: T) {
        let mut rows = lock(&self.0);
        rows.remove(id);
        if let Some(a) = &attachment {
            rows.by_container.entry(a.container_id.clone()).or_default().insert(id);
        }
        rows.by_id.insert(id, (attachment, row));
    }

    /// Removes a row.
    pub fn remove(&self, id: EndpointId) -> Option<T> {
        lock(&self.0).remove(id)
    }

    /// An id's row.
    #[must_use]
    pub fn get(&self, id: EndpointId) -> Option<T> {
        lock(&self.0).by_id.get(&id).map(|(_, row)| row.clone())
    }

    /// Matching ids.
    #[must_use]
    pub fn find(&self, wanted: &Wanted) -> Vec<EndpointId> {
        let rows = lock(&self.0);
        let ids = rows.by_container.get(&wanted.container_id).into_iter().flatten().copied();
        ids.filter(|id| matches!(rows.by_id.get(id), Some((Some(a), _)) if wanted.fits(a))).collect()
    }

    /// Known attachments.
    #[must_use]
    pub fn attachments(&self) -> Vec<Attachment> {
        lock(&self.0).by_id.values().filter_map(|(attachment, _)| attachment.clone()).collect()
    }

    /// Every id.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<EndpointId> {
        lock(&self.0).by_id.keys().copied().collect()
    }

    /// Every row, by id.
    #[must_use]
    pub fn list(&self) -> Vec<T> {
        lock(&self.0).by_id.values().map(|(_, row)| row.clone()).collect()
    }
}

impl<T> Rows<T> {
    fn remove(&mut self, id: EndpointId) -> Option<T> {
        let (attachment, row) = self.by_id.remove(&id)?;
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
        let aside = Aside::default();
        aside.put(id(1), Some(of("a", "eth0")), "1");
        aside.put(id(2), Some(of("a", "eth1")), "2");
        aside.put(id(3), None, "3");
        let whole = |container: &str| Wanted { network: None, ifname: None, ..Wanted::of(&of(container, "eth0")) };
        assert_eq!(aside.find(&whole("a")), [id(1), id(2)]);
        assert_eq!(aside.find(&Wanted::of(&of("a", "eth1"))), [id(2)]);
        aside.put(id(2), Some(of("b", "eth1")), "2b");
        assert_eq!((aside.find(&whole("a")), aside.find(&whole("b"))), (vec![id(1)], vec![id(2)]));
        assert_eq!((aside.remove(id(1)), aside.remove(id(1))), (Some("1"), None));
        assert_eq!((aside.find(&whole("a")), aside.list().len(), lock(&aside.0).by_container.len()), (vec![], 2, 1));
    }
}
