//! Kinds: endpoints of one share that differ only in addresses.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;

use super::{
    EndpointKey, Identity, Member, SetId, Sets, Share,
    atoms::{Atom, OwnerOf},
    identities::Identities,
    selection::{Policies, PortName, Selected},
};
use crate::model::{Endpoint, Enforcement, Entity, NamedPorts};

/// Kind number; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KindId(u64);

impl KindId {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u64::MAX);
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct KindKey {
    identity: Identity,
    health: bool,
    elsewhere: bool,
    ports: Arc<NamedPorts>,
    enforcement: Enforcement,
    share: Share,
}

impl KindKey {
    fn of(key: EndpointKey, Member { identity, endpoint }: &Member) -> Self {
        let Endpoint { health, elsewhere, ports, enforcement, .. } = &**endpoint;
        let (health, elsewhere) = (*health, *elsewhere);
        let share = if elsewhere { Share::default() } else { Share::of(key) };
        let (identity, enforcement) = (*identity, enforcement.clone());
        Self { identity, health, elsewhere, ports: Arc::clone(ports), enforcement, share }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Kind {
    key: Arc<KindKey>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) sets: Sets,
}

impl Kind {
    pub(super) fn identity(&self) -> Identity {
        self.key.identity
    }

    pub(super) fn share(&self) -> Share {
        self.key.share
    }

    pub(super) fn is_elsewhere(&self) -> bool {
        self.key.elsewhere
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Endpoint(KindId),
    Node,
    OtherNode,
    Outside,
}

/// An identity has two sets of labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "take in endpoint {}: other endpoints with identity {} have other labels or another namespace; give each set of \
     labels an identity of its own",
    endpoint.0,
    identity.0
)]
pub struct IdentityInUse {
    pub endpoint: EndpointKey,
    pub identity: Identity,
}

#[derive(Debug, Default)]
pub(super) struct Touched {
    pub(super) kinds: BTreeSet<KindId>,
    pub(super) new: BTreeSet<KindId>,
    pub(super) gone: Vec<KindId>,
    /// New, or of another kind, except new ones elsewhere.
    pub(super) members: BTreeSet<EndpointKey>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) names: BTreeSet<PortName>,
    pub(super) released: Vec<(SetId, KindId)>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Kinds {
    members: OrdMap<EndpointKey, (Member, KindId)>,
    kinds: OrdMap<KindId, Kind>,
    ids: OrdMap<Arc<KindKey>, KindId>,
    next: u64,
    pub(super) identities: Identities,
    of_identity: OrdSet<(Identity, KindId)>,
    of_kind: OrdSet<(KindId, EndpointKey)>,
    declared: OrdSet<(PortName, u16, KindId)>,
    addresses: OrdSet<(IpAddr, EndpointKey)>,
    node: OrdSet<IpAddr>,
    other_nodes: OrdSet<IpAddr>,
}

impl Kinds {
    pub(super) fn set_node(&mut self, node: BTreeSet<IpAddr>, touched: &mut Touched) {
        touched.addresses.extend(self.node.iter().filter(|address| !node.contains(*address)));
        touched.addresses.extend(node.iter().filter(|address| !self.node.contains(*address)));
        self.node = node.into_iter().collect();
    }

    pub(super) fn set_other_nodes(&mut self, nodes: BTreeSet<IpAddr>, touched: &mut Touched) {
        touched.addresses.extend(self.other_nodes.iter().filter(|address| !nodes.contains(*address)));
        touched.addresses.extend(nodes.iter().filter(|address| !self.other_nodes.contains(*address)));
        self.other_nodes = nodes.into_iter().collect();
    }

    pub(super) fn insert(
        &mut self,
        key: EndpointKey,
        member: Member,
        policies: &Policies,
        touched: &mut Touched,
    ) -> Result<(), IdentityInUse> {
        let (identity, endpoint) = (member.identity, Arc::clone(&member.endpoint));
        if self.identities.get(identity).is_some_and(|selected| !selected.is_of(&endpoint)) {
            return Err(IdentityInUse { endpoint: key, identity });
        }
        let kind = self.kind_of(key, &member, policies, touched);
        self.of_kind.insert((kind, key));
        let old = self.members.insert(key, (member, kind));
        if old.as_ref().map_or(!endpoint.elsewhere, |(_, old)| *old != kind) {
            touched.members.insert(key);
        }
        if let Some((old, old_kind)) = old {
            self.leave(key, &old, (old_kind != kind).then_some(old_kind), touched);
        }
        for address in &*endpoint.addresses {
            self.addresses.insert((*address, key));
        }
        touched.addresses.extend(&*endpoint.addresses);
        Ok(())
    }

    pub(super) fn knows(&self, key: EndpointKey, member: &Member) -> bool {
        self.ids.contains_key(&KindKey::of(key, member))
    }

    pub(super) fn remove(&mut self, key: EndpointKey, touched: &mut Touched) {
        if let Some((member, kind)) = self.members.remove(&key) {
            self.leave(key, &member, Some(kind), touched);
            touched.members.insert(key);
        }
    }

    fn leave(&mut self, key: EndpointKey, member: &Member, kind: Option<KindId>, touched: &mut Touched) {
        for address in &*member.endpoint.addresses {
            self.addresses.remove(&(*address, key));
        }
        touched.addresses.extend(&*member.endpoint.addresses);
        let Some(id) = kind else { return };
        self.of_kind.remove(&(id, key));
        if self.members_of(id).next().is_some() {
            return;
        }
        let Some(kind) = self.kinds.remove(&id) else { return };
        self.ids.remove(&kind.key);
        self.of_identity.remove(&(kind.identity(), id));
        if self.of_identity(kind.identity()).next().is_none() {
            self.identities.remove(kind.identity());
        }
        for (name, number) in &*kind.key.ports {
            self.declared.remove(&(name.clone(), *number, id));
            if self.declaring(name, *number).next().is_none() {
                touched.names.insert(name.clone());
            }
        }
        touched.released.extend([kind.sets.ingress, kind.sets.egress].map(|set| (set, id)));
        touched.kinds.remove(&id);
        if !touched.new.remove(&id) {
            touched.gone.push(id);
        }
    }

    fn kind_of(&mut self, key: EndpointKey, member: &Member, policies: &Policies, touched: &mut Touched) -> KindId {
        let Member { identity, endpoint } = member;
        let key = KindKey::of(key, member);
        if let Some(known) = self.ids.get(&key) {
            return *known;
        }
        if self.identities.get(*identity).is_none() {
            self.identities.insert(*identity, policies.select(endpoint));
        }
        let (id, key) = (KindId(self.next), Arc::new(key));
        self.next += 1;
        for (name, number) in &*key.ports {
            if self.declaring(name, *number).next().is_none() {
                touched.names.insert(name.clone());
            }
            self.declared.insert((name.clone(), *number, id));
        }
        self.of_identity.insert((*identity, id));
        self.ids.insert(Arc::clone(&key), id);
        let sets = Sets { ingress: SetId::NONE, egress: SetId::NONE };
        self.kinds.insert(id, Kind { key, endpoint: Arc::clone(endpoint), sets });
        touched.kinds.insert(id);
        touched.new.insert(id);
        id
    }

    pub(super) fn selected(&self, kind: &Kind) -> Option<&Selected> {
        self.identities.get(kind.identity()).map(|selected| &**selected)
    }

    pub(super) fn of_identity(&self, identity: Identity) -> impl Iterator<Item = KindId> {
        self.of_identity.range((identity, KindId::FIRST)..=(identity, KindId::LAST)).map(|(_, kind)| *kind)
    }

    fn of_identities(&self, identities: BTreeSet<Identity>) -> Vec<KindId> {
        identities.into_iter().flat_map(|identity| self.of_identity(identity)).collect()
    }

    pub(super) fn members_of(&self, kind: KindId) -> impl Iterator<Item = EndpointKey> {
        self.of_kind.range((kind, EndpointKey(0))..=(kind, EndpointKey(u32::MAX))).map(|(_, key)| *key)
    }

    fn declaring(&self, name: &PortName, number: u16) -> impl Iterator<Item = KindId> {
        let all = (name.clone(), number, KindId::FIRST)..=(name.clone(), number, KindId::LAST);
        self.declared.range(all).map(|(_, _, kind)| *kind)
    }

    /// Empty for networks and names.
    pub(super) fn matched_by(&self, atom: &Atom) -> Vec<Owner> {
        let kinds: Vec<KindId> = match atom {
            Atom::Network { .. } | Atom::Names(_) => return Vec::new(),
            Atom::Entity(Entity::Host) => return vec![Owner::Node],
            Atom::Entity(Entity::World) => return vec![Owner::Outside],
            Atom::Entity(_) => {
                let matches = |kind: &Kind| atom.matches(OwnerOf::Endpoint(&kind.endpoint));
                let kinds = self.kinds.iter().filter(|(_, kind)| matches(kind)).map(|(id, _)| Owner::Endpoint(*id));
                return kinds.chain(atom.matches(OwnerOf::OtherNode).then_some(Owner::OtherNode)).collect();
            }
            Atom::Selector(selector) => self.of_identities(self.identities.selected_by(selector)),
            Atom::MaySelect(selector) => self.of_identities(self.identities.perhaps_selected_by(selector)),
            Atom::Declares { protocol, name, number } => self.declaring(&(*protocol, name.clone()), *number).collect(),
        };
        kinds.into_iter().map(Owner::Endpoint).collect()
    }

    pub(super) fn get(&self, id: KindId) -> Option<&Kind> {
        self.kinds.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: KindId) -> Option<&mut Kind> {
        self.kinds.get_mut(&id)
    }

    /// `None` also for an endpoint elsewhere.
    pub(super) fn sets(&self, key: EndpointKey) -> Option<Sets> {
        let kind = self.members.get(&key).and_then(|(_, kind)| self.kinds.get(kind))?;
        (!kind.is_elsewhere()).then_some(kind.sets)
    }

    pub(super) fn numbers(&self, name: &PortName) -> Vec<u16> {
        let all = (name.clone(), 0, KindId::FIRST)..=(name.clone(), u16::MAX, KindId::LAST);
        let mut numbers: Vec<u16> = self.declared.range(all).map(|(_, number, _)| *number).collect();
        numbers.dedup();
        numbers
    }

    /// The node takes precedence, then the lowest key, then other nodes.
    pub(super) fn owner(&self, address: IpAddr) -> Owner {
        if self.node.contains(&address) {
            return Owner::Node;
        }
        let first = self.addresses.get_next(&(address, EndpointKey(0))).filter(|(own, _)| *own == address);
        let kind = first.and_then(|(_, key)| self.members.get(key)).map(|(_, kind)| *kind);
        let other = if self.other_nodes.contains(&address) { Owner::OtherNode } else { Owner::Outside };
        kind.map_or(other, Owner::Endpoint)
    }

    pub(super) fn addresses_in(&self, net: IpNet) -> impl Iterator<Item = IpAddr> {
        let (first, last) = (net.network(), net.broadcast());
        let of_endpoints = self.addresses.range((first, EndpointKey(0))..=(last, EndpointKey(u32::MAX)));
        let of_nodes = self.node.range(first..=last).chain(self.other_nodes.range(first..=last));
        of_endpoints.map(|(address, _)| *address).chain(of_nodes.copied())
    }

    pub(super) fn addresses_of(&self, owner: Owner) -> Vec<IpAddr> {
        match owner {
            Owner::Endpoint(kind) => {
                let members = self.members_of(kind).filter_map(|key| self.members.get(&key));
                members.flat_map(|(member, _)| member.endpoint.addresses.iter().copied()).collect()
            }
            Owner::Node => self.node.iter().copied().collect(),
            Owner::OtherNode => self.other_nodes.iter().copied().collect(),
            Owner::Outside => Vec::new(),
        }
    }

    pub(super) fn known(&self, owner: Owner) -> Option<(Identity, OwnerOf<'_>)> {
        Some(match owner {
            Owner::Endpoint(kind) => {
                let kind = self.kinds.get(&kind)?;
                (kind.identity(), OwnerOf::Endpoint(&kind.endpoint))
            }
            Owner::Node => (Identity::NODE, OwnerOf::Node),
            Owner::OtherNode => (Identity::OTHER_NODE, OwnerOf::OtherNode),
            Owner::Outside => (Identity::NONE, OwnerOf::Outside),
        })
    }
}
