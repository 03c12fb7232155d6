//! Endpoints by id and interface, and free ids.
//!
//! A create reserves id and interface before its first side effect, a delete frees them after its last: creates of one
//! attachment cannot overlap, and a late clean-up cannot hit the id's next endpoint. The lock is held for map
//! operations only.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    ops::Bound,
    sync::Mutex,
};

use tokio::sync::{Notify, watch};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{ContainerId, EndpointId, Epoch, IfIndex, IfName, MAX_ENDPOINT_ID},
    nat::PublishedPort,
};
use wharf_kit::sync::lock;

use crate::node::endpoint::Handle;

/// Why an insertion is refused.
#[derive(Debug)]
pub enum Taken {
    /// Has the interface.
    Interface(Box<Handle>),
    /// Has the address.
    Address(IpAddr, Box<Handle>),
    /// On the plugin's link.
    Link(Box<Handle>),
    Port(PublishedPort, Box<Handle>),
}

/// Endpoints and free ids.
#[derive(Default)]
pub struct Registry {
    inner: Mutex<Inner>,
    left: Notify,
    /// The recorded endpoints are inserted, their addresses claimed.
    restored: watch::Sender<bool>,
}

#[derive(Default)]
struct Inner {
    by_id: BTreeMap<EndpointId, Handle>,
    by_interface: HashMap<(ContainerId, IfName), EndpointId>,
    /// By endpoints, prepared sets and clean-ups.
    taken: BTreeSet<EndpointId>,
    /// Oldest first, for late reuse.
    released: VecDeque<EndpointId>,
    next_unused: u16,
    leaving: BTreeSet<(EndpointId, Epoch)>,
}

/// See [`Registry::leaves`].
pub struct Leaving<'a> {
    registry: &'a Registry,
    who: (EndpointId, Epoch),
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        lock(&self.registry.inner).leaving.remove(&self.who);
        self.registry.left.notify_waiters();
    }
}

impl Registry {
    /// Ends [`Registry::restored`].
    pub fn set_restored(&self) {
        self.restored.send_replace(true);
    }

    /// Waits for the recorded endpoints; before, an endpoint looks deleted and its address free.
    pub async fn restored(&self) {
        let _ = self.restored.subscribe().wait_for(|restored| *restored).await;
    }

    /// An answered delete's endpoint is leaving until the guard drops.
    #[must_use]
    pub fn leaves(&self, handle: &Handle) -> Leaving<'_> {
        let who = (handle.id, handle.epoch);
        lock(&self.inner).leaving.insert(who);
        Leaving { registry: self, who }
    }

    /// Whether its answered delete is unfinished.
    #[must_use]
    pub fn is_leaving(&self, handle: &Handle) -> bool {
        lock(&self.inner).leaving.contains(&(handle.id, handle.epoch))
    }

    /// Whether an endpoint is leaving.
    #[must_use]
    pub fn someone_leaves(&self) -> bool {
        !lock(&self.inner).leaving.is_empty()
    }

    /// Waits for leaving endpoints of `concern`, tens of milliseconds; returns whether there was one.
    pub async fn settled(&self, concern: impl Fn(&EndpointRecord) -> bool) -> bool {
        let wanted: Vec<_> = {
            let inner = lock(&self.inner);
            let concerns = |who: &&(EndpointId, Epoch)| {
                inner.by_id.get(&who.0).is_some_and(|handle| handle.shared.read(|v| concern(&v.record)))
            };
            inner.leaving.iter().filter(concerns).copied().collect()
        };
        loop {
            let left = self.left.notified();
            if wanted.iter().all(|who| !lock(&self.inner).leaving.contains(who)) {
                return !wanted.is_empty();
            }
            left.await;
        }
    }

    /// Takes an unused id, else the earliest freed.
    #[must_use]
    pub fn take_id(&self) -> Option<EndpointId> {
        let mut inner = lock(&self.inner);
        while inner.next_unused < MAX_ENDPOINT_ID {
            inner.next_unused += 1;
            if let Ok(id) = EndpointId::try_from(inner.next_unused)
                && inner.taken.insert(id)
            {
                return Some(id);
            }
        }
        while let Some(id) = inner.released.pop_front() {
            if inner.taken.insert(id) {
                return Some(id);
            }
        }
        None
    }

    /// No id is free.
    #[must_use]
    pub fn is_full(&self) -> bool {
        lock(&self.inner).taken.len() >= usize::from(MAX_ENDPOINT_ID)
    }

    /// Takes an earlier run's id; false if taken.
    pub fn claim_id(&self, id: EndpointId) -> bool {
        lock(&self.inner).taken.insert(id)
    }

    /// Frees an id, as a delete's last step.
    pub fn free_id(&self, id: EndpointId) {
        let mut inner = lock(&self.inner);
        if inner.taken.remove(&id) && id.get() <= inner.next_unused {
            inner.released.push_back(id);
        }
    }

    /// Inserts an endpoint unless interface, link, addresses or ports are in use. Ports stay in use until their
    /// endpoint leaves: the kernel may still have them. IPAM leases most addresses later.
    ///
    /// # Errors
    /// The other endpoint. IPAM leases most addresses later.
    pub fn insert(&self, handle: Handle) -> Result<(), Taken> {
        let key = interface_key(&handle);
        let addresses: Vec<IpAddr> = addresses_of(&handle).collect();
        let ports = handle.shared.read(|v| v.record.ports.clone());
        let mut inner = lock(&self.inner);
        if let Some(there) = inner.by_interface.get(&key).and_then(|id| inner.by_id.get(id)) {
            return Err(Taken::Interface(Box::new(there.clone())));
        }
        if !addresses.is_empty() {
            for there in inner.by_id.values() {
                if let Some(ip) = addresses_of(there).find(|ip| addresses.contains(ip)) {
                    return Err(Taken::Address(ip, Box::new(there.clone())));
                }
            }
        }
        let link = plugin_link(&handle);
        if link.is_some()
            && let Some(there) = inner.by_id.values().find(|there| plugin_link(there) == link)
        {
            return Err(Taken::Link(Box::new(there.clone())));
        }
        if !ports.is_empty() {
            for there in inner.by_id.values() {
                let theirs = there.shared.read(|v| v.record.ports.clone());
                if let Some(port) = ports.iter().find(|port| theirs.iter().any(|their| their.overlaps(port))) {
                    return Err(Taken::Port(*port, Box::new(there.clone())));
                }
            }
        }
        inner.by_interface.insert(key, handle.id);
        inner.by_id.insert(handle.id, handle);
        Ok(())
    }

    /// Keeps the id until [`Self::free_id`].
    pub fn remove(&self, id: EndpointId) -> Option<Handle> {
        let mut inner = lock(&self.inner);
        let handle = inner.by_id.remove(&id)?;
        let key = interface_key(&handle);
        if inner.by_interface.get(&key) == Some(&id) {
            inner.by_interface.remove(&key);
        }
        Some(handle)
    }

    #[must_use]
    pub fn get(&self, id: EndpointId) -> Option<Handle> {
        lock(&self.inner).by_id.get(&id).cloned()
    }

    /// A container's endpoint by interface.
    #[must_use]
    pub fn by_interface(&self, container: &ContainerId, ifname: &IfName) -> Option<Handle> {
        let inner = lock(&self.inner);
        let id = inner.by_interface.get(&(container.clone(), ifname.clone()))?;
        inner.by_id.get(id).cloned()
    }

    /// The endpoint with the next id; wraps around.
    #[must_use]
    pub fn next_after(&self, id: EndpointId) -> Option<Handle> {
        let inner = lock(&self.inner);
        let mut above = inner.by_id.range((Bound::Excluded(id), Bound::Unbounded));
        above.next().or_else(|| inner.by_id.first_key_value()).map(|(_, handle)| handle.clone())
    }

    /// By id.
    #[must_use]
    pub fn list(&self) -> Vec<Handle> {
        lock(&self.inner).by_id.values().cloned().collect()
    }

    /// Number of endpoints.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.inner).by_id.len()
    }

    /// Whether there is no endpoint.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn addresses_of(handle: &Handle) -> impl Iterator<Item = IpAddr> + use<> {
    handle.shared.read(|v| v.record.addresses())
}

fn plugin_link(handle: &Handle) -> Option<IfIndex> {
    handle.shared.read(|v| (!v.record.link_owner.is_wharf()).then_some(v.record.host_ifindex))
}

/// Interface names are unique in a container.
fn interface_key(handle: &Handle) -> (ContainerId, IfName) {
    handle.shared.read(|v| (v.record.attachment.container_id.clone(), v.record.attachment.ifname.clone()))
}
