//! Endpoints, and their kinds: endpoints that policy cannot tell apart but by their addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{
    EndpointKey, Identity, Member, SetId, Sets,
    atoms::OwnerOf,
    selection::{Policies, PortName, Selected},
};
use crate::model::{Endpoint, Enforcement};

/// A kind. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KindId(u64);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct KindKey {
    identity: Identity,
    health: bool,
    ports: BTreeMap<PortName, u16>,
    enforcement: Enforcement,
}

/// A kind of endpoint.
#[derive(Debug, Clone)]
pub(super) struct Kind {
    key: Arc<KindKey>,
    /// One of the kind.
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) members: BTreeSet<EndpointKey>,
    pub(super) sets: Sets,
}

impl Kind {
    pub(super) fn identity(&self) -> Identity {
        self.key.identity
    }
}

/// Whose an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Endpoint(KindId),
    Node,
    Outside,
}

/// Two endpoints with one identity and different labels or namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "take in endpoint {}: other endpoints with identity {} have other labels or another namespace; give each set of \
     labels an identity of its own",
    endpoint.0,
    identity.0
)]
pub struct IdentityInUse {
    /// The endpoint.
    pub endpoint: EndpointKey,
    /// Its identity.
    pub identity: Identity,
}

/// What changed since the last time that the tables were made.
#[derive(Debug, Default)]
pub(super) struct Touched {
    /// Kinds whose rules may be others.
    pub(super) kinds: BTreeSet<KindId>,
    /// Endpoints that are new or of another kind.
    pub(super) members: BTreeSet<EndpointKey>,
    /// Addresses whose owner may be another.
    pub(super) addresses: BTreeSet<IpAddr>,
    /// Named ports that kinds declare with other numbers than before.
    pub(super) names: BTreeSet<PortName>,
    /// Rule sets that a kind that is gone had.
    pub(super) released: Vec<SetId>,
}

/// The endpoints and the node.
#[derive(Debug, Clone, Default)]
pub(super) struct Kinds {
    members: BTreeMap<EndpointKey, (Member, KindId)>,
    kinds: BTreeMap<KindId, Kind>,
    ids: BTreeMap<Arc<KindKey>, KindId>,
    next: u64,
    identities: BTreeMap<Identity, Arc<Selected>>,
    /// For each declared number of a named port, how many kinds declare it.
    numbers: BTreeMap<PortName, BTreeMap<u16, usize>>,
    addresses: BTreeSet<(IpAddr, EndpointKey)>,
    node: BTreeSet<IpAddr>,
}

impl Kinds {
    pub(super) fn set_node(&mut self, node: BTreeSet<IpAddr>, touched: &mut Touched) {
        touched.addresses.extend(self.node.symmetric_difference(&node));
        self.node = node;
    }

    /// Takes in an endpoint in place of the one with its key.
    pub(super) fn insert(
        &mut self,
        key: EndpointKey,
        member: Member,
        policies: &Policies,
        touched: &mut Touched,
    ) -> Result<(), IdentityInUse> {
        let (identity, endpoint) = (member.identity, Arc::clone(&member.endpoint));
        if self.identities.get(&identity).is_some_and(|selected| !selected.is_of(&endpoint)) {
            return Err(IdentityInUse { endpoint: key, identity });
        }
        let kind = self.kind_of(&member, policies, touched);
        if let Some(kind) = self.kinds.get_mut(&kind) {
            kind.members.insert(key);
        }
        let old = self.members.insert(key, (member, kind));
        if old.as_ref().is_none_or(|(_, old)| *old != kind) {
            touched.members.insert(key);
        }
        if let Some((old, old_kind)) = old {
            self.leave(key, &old, (old_kind != kind).then_some(old_kind), touched);
        }
        touched.addresses.extend(&endpoint.addresses);
        self.addresses.extend(endpoint.addresses.iter().map(|address| (*address, key)));
        Ok(())
    }

    pub(super) fn remove(&mut self, key: EndpointKey, touched: &mut Touched) {
        if let Some((member, kind)) = self.members.remove(&key) {
            self.leave(key, &member, Some(kind), touched);
            touched.members.insert(key);
        }
    }

    fn leave(&mut self, key: EndpointKey, member: &Member, kind: Option<KindId>, touched: &mut Touched) {
        for address in &member.endpoint.addresses {
            self.addresses.remove(&(*address, key));
            touched.addresses.insert(*address);
        }
        let Some(id) = kind else { return };
        let Some(kind) = self.kinds.get_mut(&id) else { return };
        kind.members.remove(&key);
        if !kind.members.is_empty() {
            return;
        }
        let Some(kind) = self.kinds.remove(&id) else { return };
        self.ids.remove(&kind.key);
        if !self.kinds.values().any(|other| other.identity() == kind.identity()) {
            self.identities.remove(&kind.identity());
        }
        for (name, number) in &kind.key.ports {
            let Some(counts) = self.numbers.get_mut(name) else { continue };
            let Some(count) = counts.get_mut(number) else { continue };
            *count -= 1;
            if *count == 0 {
                counts.remove(number);
                touched.names.insert(name.clone());
            }
        }
        touched.released.extend([kind.sets.ingress, kind.sets.egress]);
        touched.kinds.remove(&id);
    }

    fn kind_of(&mut self, member: &Member, policies: &Policies, touched: &mut Touched) -> KindId {
        let Member { identity, endpoint } = member;
        let key = KindKey {
            identity: *identity,
            health: endpoint.health,
            ports: endpoint.ports.clone(),
            enforcement: endpoint.enforcement.clone(),
        };
        if let Some(known) = self.ids.get(&key) {
            return *known;
        }
        for (name, number) in &key.ports {
            let counts = self.numbers.entry(name.clone()).or_default();
            if !counts.contains_key(number) {
                touched.names.insert(name.clone());
            }
            *counts.entry(*number).or_default() += 1;
        }
        self.identities.entry(*identity).or_insert_with(|| Arc::new(policies.select(endpoint)));
        let (id, key) = (KindId(self.next), Arc::new(key));
        self.next += 1;
        self.ids.insert(Arc::clone(&key), id);
        let sets = Sets { ingress: SetId::NONE, egress: SetId::NONE };
        self.kinds.insert(id, Kind { key, endpoint: Arc::clone(endpoint), members: BTreeSet::new(), sets });
        touched.kinds.insert(id);
        id
    }

    pub(super) fn identities_mut(&mut self) -> &mut BTreeMap<Identity, Arc<Selected>> {
        &mut self.identities
    }

    pub(super) fn selected(&self, kind: &Kind) -> Option<&Selected> {
        self.identities.get(&kind.identity()).map(|selected| &**selected)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (KindId, &Kind)> {
        self.kinds.iter().map(|(id, kind)| (*id, kind))
    }

    pub(super) fn get(&self, id: KindId) -> Option<&Kind> {
        self.kinds.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: KindId) -> Option<&mut Kind> {
        self.kinds.get_mut(&id)
    }

    /// The rule sets of an endpoint.
    pub(super) fn sets(&self, key: EndpointKey) -> Option<Sets> {
        self.members.get(&key).and_then(|(_, kind)| self.kinds.get(kind)).map(|kind| kind.sets)
    }

    /// The numbers that endpoints declare for a named port.
    pub(super) fn numbers(&self, name: &PortName) -> Vec<u16> {
        self.numbers.get(name).into_iter().flat_map(BTreeMap::keys).copied().collect()
    }

    /// Whose an address is: the node's before an endpoint's; of two endpoints, that of the lower key.
    pub(super) fn owner(&self, address: IpAddr) -> Owner {
        if self.node.contains(&address) {
            return Owner::Node;
        }
        let first = self.addresses.range((address, EndpointKey(0))..).next().filter(|(own, _)| *own == address);
        let kind = first.and_then(|(_, key)| self.members.get(key)).map(|(_, kind)| *kind);
        kind.map_or(Owner::Outside, Owner::Endpoint)
    }

    /// The addresses that are not outside.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().map(|(address, _)| *address).chain(self.node.iter().copied())
    }

    /// What policy knows of an owner; `None` for a kind that is gone.
    pub(super) fn known(&self, owner: Owner) -> Option<(Identity, OwnerOf<'_>)> {
        Some(match owner {
            Owner::Endpoint(kind) => {
                let kind = self.kinds.get(&kind)?;
                (kind.identity(), OwnerOf::Endpoint(&kind.endpoint))
            }
            Owner::Node => (Identity::NONE, OwnerOf::Node),
            Owner::Outside => (Identity::NONE, OwnerOf::Outside),
        })
    }
}
