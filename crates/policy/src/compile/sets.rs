//! Rule sets in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};

use super::{
    Ruling, SetId,
    atoms::{AtomId, Atoms},
    classes::Signature,
    ids::Ids,
    kinds::KindId,
    plan::Plan,
    selection::{PortName, Prepared, SetKey},
};
use crate::model::Direction;

#[derive(Debug, Clone)]
pub(super) struct RuleSets {
    ids: Ids,
    by_key: OrdMap<Arc<SetKey>, SetId>,
    plans: OrdMap<SetId, Arc<Plan>>,
    users: OrdSet<(SetId, KindId)>,
    by_atom: OrdSet<(AtomId, SetId)>,
    by_name: OrdSet<(PortName, SetId)>,
    new: Vec<SetId>,
}

impl RuleSets {
    pub(super) fn new(ids: Ids) -> Self {
        let (by_key, plans, users, by_atom, by_name, new) = Default::default();
        Self { ids, by_key, plans, users, by_atom, by_name, new }
    }

    pub(super) fn settle(&mut self) {
        self.ids.settle();
    }

    pub(super) fn keep(&mut self, numbers: BTreeMap<u32, u32>) {
        self.ids.keep(numbers);
    }

    pub(super) fn acquire(
        &mut self,
        kind: KindId,
        rules: Option<(SetKey, Vec<&Arc<Prepared>>)>,
        atoms: &mut Atoms,
    ) -> SetId {
        let Some((key, rules)) = rules else { return SetId::NONE };
        let id = self.by_key.get(&key).copied().unwrap_or_else(|| {
            let denies = key.direction == Direction::Egress && rules.iter().any(|rule| rule.ruling == Ruling::Deny);
            let (id, key) = (SetId(self.ids.take() | if denies { SetId::DENIES } else { 0 }), Arc::new(key));
            self.by_key.insert(Arc::clone(&key), id);
            let plan = Arc::new(Plan::new(key, &rules, atoms));
            for atom in plan.peers() {
                self.by_atom.insert((atom, id));
            }
            names(&plan).for_each(|name| drop(self.by_name.insert((name.clone(), id))));
            self.plans.insert(id, plan);
            self.new.push(id);
            id
        });
        self.users.insert((id, kind));
        id
    }

    pub(super) fn release(&mut self, id: SetId, kind: KindId) {
        self.users.remove(&(id, kind));
    }

    pub(super) fn sweep(&mut self, sets: BTreeSet<SetId>, atoms: &mut Atoms) -> Vec<SetId> {
        let unused = sets.into_iter().filter(|id| self.users(*id).next().is_none()).collect::<Vec<_>>();
        unused.into_iter().filter(|id| self.forget(*id, atoms)).collect()
    }

    fn forget(&mut self, id: SetId, atoms: &mut Atoms) -> bool {
        let Some(plan) = self.plans.remove(&id) else { return false };
        self.by_key.remove(&plan.key);
        for atom in plan.peers() {
            self.by_atom.remove(&(atom, id));
        }
        names(&plan).for_each(|name| drop(self.by_name.remove(&(name.clone(), id))));
        plan.atoms().for_each(|atom| atoms.deactivate(atom));
        self.ids.give_back(id.0 & !SetId::DENIES);
        true
    }

    pub(super) fn take_new(&mut self) -> Vec<SetId> {
        std::mem::take(&mut self.new)
    }

    pub(super) fn plan(&self, id: SetId) -> Option<&Arc<Plan>> {
        self.plans.get(&id)
    }

    pub(super) fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.values().map(|plan| &**plan)
    }

    /// Rule sets that can have cells of the class.
    pub(super) fn matched_by(&self, signature: &Signature) -> BTreeSet<SetId> {
        let of = |atom: &AtomId| self.by_atom.range((*atom, SetId::NONE)..=(*atom, SetId(u32::MAX)));
        signature.iter().flat_map(of).map(|(_, id)| *id).collect()
    }

    pub(super) fn senders_to<'a>(&'a self, name: &PortName) -> impl Iterator<Item = KindId> + 'a {
        let sets = self.by_name.range((name.clone(), SetId::NONE)..=(name.clone(), SetId(u32::MAX)));
        sets.flat_map(|(_, id)| self.users(*id))
    }

    fn users(&self, id: SetId) -> impl Iterator<Item = KindId> {
        self.users.range((id, KindId::FIRST)..=(id, KindId::LAST)).map(|(_, kind)| *kind)
    }
}

/// Names whose numbers come from peers.
fn names(plan: &Plan) -> impl Iterator<Item = &PortName> {
    plan.key.numbers.keys().filter(|_| plan.key.direction == Direction::Egress)
}
