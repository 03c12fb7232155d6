//! Who is here: endpoints by id and by attachment, and which ids are free.
//!
//! One lock, held only for map operations. An id and an attachment are reserved before the first side effect of a
//! create and given back after the last of a delete, so that two creates of one attachment cannot both run, and a
//! late clean-up can never meet a new endpoint under its id.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    ops::Bound,
    sync::Mutex,
};

use wharf_core::ids::{ContainerId, EndpointId, IfName, MAX_ENDPOINT_ID};

use crate::{node::endpoint::Handle, sync::lock};

/// Why an endpoint cannot be put in.
#[derive(Debug)]
pub enum Taken {
    /// The container has this interface already, as this endpoint.
    Interface(Box<Handle>),
    /// This endpoint speaks with that address.
    Address(IpAddr, Box<Handle>),
}

/// The registry.
#[derive(Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_id: BTreeMap<EndpointId, Handle>,
    by_interface: HashMap<(ContainerId, IfName), EndpointId>,
    /// Ids in use by something: an endpoint, a prepared program set, a clean-up.
    taken: BTreeSet<EndpointId>,
    /// Ids that were used and are free again, oldest first: an id rests as long as others are free.
    released: VecDeque<EndpointId>,
    next_unused: u16,
}

impl Registry {
    /// Takes a free id. Never-used ids first, then the one that is free longest.
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

    /// Marks an id that a record or a leftover of an earlier run uses; false when it is taken already.
    pub fn claim_id(&self, id: EndpointId) -> bool {
        lock(&self.inner).taken.insert(id)
    }

    /// Gives an id back; the last act of a delete.
    pub fn free_id(&self, id: EndpointId) {
        let mut inner = lock(&self.inner);
        // One that was claimed and never given out is still to come among the never-used ones.
        if inner.taken.remove(&id) && id.get() <= inner.next_unused {
            inner.released.push_back(id);
        }
    }

    /// Puts an endpoint in, unless another has its place.
    ///
    /// # Errors
    /// Who has the container's interface of that name, or one of the addresses the endpoint brings along (those that
    /// its caller leased before; addresses of the endpoint's own are leased later, by IPAM).
    pub fn insert(&self, handle: Handle) -> Result<(), Taken> {
        let key = interface_key(&handle);
        let addresses: Vec<IpAddr> = addresses_of(&handle).collect();
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
        inner.by_interface.insert(key, handle.id);
        inner.by_id.insert(handle.id, handle);
        Ok(())
    }

    /// Takes an endpoint out; its id stays taken until [`Self::free_id`].
    pub fn remove(&self, id: EndpointId) -> Option<Handle> {
        let mut inner = lock(&self.inner);
        let handle = inner.by_id.remove(&id)?;
        let key = interface_key(&handle);
        if inner.by_interface.get(&key) == Some(&id) {
            inner.by_interface.remove(&key);
        }
        Some(handle)
    }

    /// By id.
    #[must_use]
    pub fn get(&self, id: EndpointId) -> Option<Handle> {
        lock(&self.inner).by_id.get(&id).cloned()
    }

    /// By container and interface.
    #[must_use]
    pub fn by_interface(&self, container: &ContainerId, ifname: &IfName) -> Option<Handle> {
        let inner = lock(&self.inner);
        let id = inner.by_interface.get(&(container.clone(), ifname.clone()))?;
        inner.by_id.get(id).cloned()
    }

    /// The endpoint whose id follows this one; after the highest comes the lowest.
    #[must_use]
    pub fn next_after(&self, id: EndpointId) -> Option<Handle> {
        let inner = lock(&self.inner);
        let mut above = inner.by_id.range((Bound::Excluded(id), Bound::Unbounded));
        above.next().or_else(|| inner.by_id.first_key_value()).map(|(_, handle)| handle.clone())
    }

    /// All, by id.
    #[must_use]
    pub fn list(&self) -> Vec<Handle> {
        lock(&self.inner).by_id.values().cloned().collect()
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.inner).by_id.len()
    }

    /// None at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn addresses_of(handle: &Handle) -> impl Iterator<Item = IpAddr> + use<> {
    handle.shared.read(|v| v.record.addresses())
}

/// An interface name is unique in a container whatever the network, so the network is not part of the key.
fn interface_key(handle: &Handle) -> (ContainerId, IfName) {
    handle.shared.read(|v| (v.record.attachment.container_id.clone(), v.record.attachment.ifname.clone()))
}
