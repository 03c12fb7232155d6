use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};

use super::{Identity, selection::Selected};
use crate::model::{Holds, LabelOf, Labels, Requirement, Selector, UNKNOWN_LABELS};

#[derive(Debug, Clone, Default)]
pub(super) struct Identities {
    all: OrdMap<Identity, Arc<Selected>>,
    /// Hashes may collide: check results against the selector.
    by_label: OrdSet<(u64, Identity)>,
}

impl Identities {
    pub(super) fn get(&self, identity: Identity) -> Option<&Arc<Selected>> {
        self.all.get(&identity)
    }

    pub(super) fn get_mut(&mut self, identity: Identity) -> Option<&mut Arc<Selected>> {
        self.all.get_mut(&identity)
    }

    pub(super) fn insert(&mut self, identity: Identity, selected: Selected) {
        for label in labels(&selected) {
            self.by_label.insert((label, identity));
        }
        self.all.insert(identity, Arc::new(selected));
    }

    pub(super) fn remove(&mut self, identity: Identity) {
        if let Some(selected) = self.all.remove(&identity) {
            for label in labels(&selected) {
                self.by_label.remove(&(label, identity));
            }
        }
    }

    pub(super) fn selected_by(&self, selector: &Selector) -> BTreeSet<Identity> {
        let selects = |selected: &Selected| selector.selects(&selected.labels, selected.namespace.as_deref());
        self.meeting(self.candidates(selector), selects)
    }

    pub(super) fn perhaps_selected_by(&self, selector: &Selector) -> BTreeSet<Identity> {
        let may_select = |selected: &Selected| selector.may_select(&selected.labels, selected.namespace.as_deref());
        let unknown = self.with_label(hash(LabelOf::Namespace, UNKNOWN_LABELS, ""));
        let candidates = self.candidates(selector).map(|ids| ids.into_iter().chain(unknown).collect());
        self.meeting(candidates, may_select)
    }

    fn meeting(&self, candidates: Option<Vec<Identity>>, meets: impl Fn(&Selected) -> bool) -> BTreeSet<Identity> {
        match candidates {
            Some(ids) => ids.into_iter().filter(|id| self.get(*id).is_some_and(|selected| meets(selected))).collect(),
            None => self.all.iter().filter(|(_, selected)| meets(selected)).map(|(id, _)| *id).collect(),
        }
    }

    fn with_label(&self, hash: u64) -> impl Iterator<Item = Identity> {
        self.by_label.range((hash, Identity(0))..=(hash, Identity(u32::MAX))).map(|(_, id)| *id)
    }

    /// A superset of the selected identities; `None` if no requirement lists values. Follows all requirements in
    /// parallel; the list that ends first counts.
    fn candidates(&self, selector: &Selector) -> Option<Vec<Identity>> {
        let of = |hash| self.with_label(hash);
        let meeting = |requirement: &Requirement| {
            let Holds::In(values) = &requirement.holds else { return None };
            let hashes: Vec<u64> = values.iter().map(|v| hash(requirement.of, &requirement.key, v)).collect();
            Some((hashes.into_iter().flat_map(of), Vec::new()))
        };
        let mut lists: Vec<_> = selector.0.iter().filter_map(meeting).collect();
        while !lists.is_empty() {
            for (rest, found) in &mut lists {
                match rest.next() {
                    Some(id) => found.push(id),
                    None => return Some(std::mem::take(found)),
                }
            }
        }
        None
    }
}

/// Hashes of labels that a requirement can name.
fn labels(selected: &Selected) -> impl Iterator<Item = u64> {
    let of = |of, labels: &Labels| -> Vec<u64> { labels.iter().map(|(key, value)| hash(of, key, value)).collect() };
    let own = of(LabelOf::Endpoint, &selected.labels);
    let any = selected.labels.iter().filter_map(|(key, value)| Some((key.split_once(':')?.1, value)));
    let any: Vec<u64> = any.map(|(key, value)| hash(LabelOf::Endpoint, &format!("any:{key}"), value)).collect();
    let namespace = selected.namespace.as_ref().map(|labels| of(LabelOf::Namespace, labels)).unwrap_or_default();
    own.into_iter().chain(any).chain(namespace)
}

fn hash(of: LabelOf, key: &str, value: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (of, key, value).hash(&mut hasher);
    hasher.finish()
}
