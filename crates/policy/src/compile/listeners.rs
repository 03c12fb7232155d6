//! Proxy listeners, and the cells that refer to them.

use std::{collections::BTreeSet, sync::Arc};

use imbl::OrdMap;

use super::{Cell, Listener, ListenerId, Ruling, SetId};

type Table = OrdMap<ListenerId, Arc<Listener>>;
type Uses = OrdMap<(ListenerId, SetId), usize>;

#[derive(Debug, Clone)]
pub(super) struct Listeners {
    first: u16,
    avoided: Arc<BTreeSet<u16>>,
    table: Table,
    by_content: OrdMap<Arc<Listener>, ListenerId>,
    uses: Uses,
    touched: BTreeSet<ListenerId>,
    /// Not free until [`Listeners::settle`]: their cells exist.
    leaving: BTreeSet<ListenerId>,
}

impl Listeners {
    /// Listeners of `table` keep their numbers until the first [`Listeners::sweep`].
    pub(super) fn of(table: &Table) -> Self {
        let by_content = table.iter().map(|(id, listener)| (Arc::clone(listener), *id)).collect();
        let touched = table.keys().copied().collect();
        let (avoided, uses, leaving) = Default::default();
        Self { first: 1, avoided, table: table.clone(), by_content, uses, touched, leaving }
    }

    pub(super) fn from(self, first: u16) -> Self {
        Self { first: first.max(1), ..self }
    }

    pub(super) fn without(self, avoided: Arc<BTreeSet<u16>>) -> Self {
        Self { avoided, ..self }
    }

    pub(super) fn acquire(&mut self, set: SetId, listener: Listener) -> ListenerId {
        let id = self.by_content.get(&listener).copied().unwrap_or_else(|| {
            let (id, listener) = (self.free(), Arc::new(listener));
            self.by_content.insert(Arc::clone(&listener), id);
            self.table.insert(id, listener);
            id
        });
        *self.uses.entry((id, set)).or_default() += 1;
        id
    }

    /// Without one, the last number, which is above any limit.
    fn free(&self) -> ListenerId {
        let taken =
            |id: &ListenerId| self.table.contains_key(id) || self.leaving.contains(id) || self.avoided.contains(&id.0);
        (self.first..=u16::MAX).map(ListenerId).find(|id| !taken(id)).unwrap_or(ListenerId(u16::MAX))
    }

    pub(super) fn release(&mut self, set: SetId, cell: &Cell) {
        let Some(Ruling::Redirect { listener: id, .. }) = cell.rest.map(|hit| hit.ruling) else { return };
        let Some(cells) = self.uses.get_mut(&(id, set)) else { return };
        *cells -= 1;
        if *cells == 0 {
            self.uses.remove(&(id, set));
            self.touched.insert(id);
        }
    }

    pub(super) fn sweep(&mut self) -> (Table, Uses) {
        for id in std::mem::take(&mut self.touched) {
            if self.uses.range((id, SetId::NONE)..=(id, SetId(u32::MAX))).next().is_some() {
                continue;
            }
            if let Some(listener) = self.table.remove(&id) {
                self.by_content.remove(&listener);
                self.leaving.insert(id);
            }
        }
        (self.table.clone(), self.uses.clone())
    }

    pub(super) fn settle(&mut self) {
        self.leaving.clear();
    }
}
