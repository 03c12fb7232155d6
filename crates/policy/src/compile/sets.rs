//! Rule sets in use: each list of rules once, and the kinds of endpoints that have it.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    SetId,
    atoms::Atoms,
    ids::Ids,
    plan::Plan,
    selection::{Prepared, SetKey},
};

/// The rule sets.
#[derive(Debug, Clone)]
pub(super) struct RuleSets {
    ids: Ids,
    by_key: BTreeMap<Arc<SetKey>, SetId>,
    sets: BTreeMap<SetId, RuleSet>,
}

#[derive(Debug, Clone)]
struct RuleSet {
    plan: Arc<Plan>,
    /// Kinds that have it.
    users: usize,
}

impl RuleSets {
    pub(super) fn new(ids: Ids) -> Self {
        Self { ids, by_key: BTreeMap::new(), sets: BTreeMap::new() }
    }

    /// The rows of identifiers that were given back are gone.
    pub(super) fn settle(&mut self) {
        self.ids.settle();
    }

    /// One more kind has the rules.
    pub(super) fn acquire(&mut self, rules: Option<(SetKey, Vec<&Arc<Prepared>>)>, atoms: &mut Atoms) -> SetId {
        let Some((key, rules)) = rules else { return SetId::NONE };
        let id = self.by_key.get(&key).copied().unwrap_or_else(|| {
            let (id, key) = (SetId(self.ids.take()), Arc::new(key));
            self.by_key.insert(Arc::clone(&key), id);
            let plan = Arc::new(Plan::new(key, &rules, atoms));
            self.sets.insert(id, RuleSet { plan, users: 0 });
            id
        });
        self.sets.entry(id).and_modify(|set| set.users += 1);
        id
    }

    /// One kind less has it.
    pub(super) fn release(&mut self, id: SetId) {
        self.sets.entry(id).and_modify(|set| set.users -= 1);
    }

    /// Forgets the rule sets that no kind has.
    pub(super) fn sweep(&mut self, atoms: &mut Atoms) {
        let Self { ids, by_key, sets } = self;
        sets.retain(|id, set| {
            if set.users == 0 {
                by_key.remove(&set.plan.key);
                set.plan.atoms().for_each(|atom| atoms.deactivate(atom));
                ids.give_back(id.0);
            }
            set.users > 0
        });
    }

    pub(super) fn plan(&self, id: SetId) -> Option<&Plan> {
        self.sets.get(&id).map(|set| &*set.plan)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SetId, &Plan)> {
        self.sets.iter().map(|(id, set)| (*id, &*set.plan))
    }
}
