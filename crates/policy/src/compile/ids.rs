//! Row numbers, reused after the removal of their rows.

use std::collections::{BTreeMap, BTreeSet};

use imbl::OrdSet;

/// Numbers from 1, lowest first; reused after the removal of their rows.
#[derive(Debug, Clone)]
pub(super) struct Ids {
    next: u32,
    free: OrdSet<u32>,
    /// Released since [`Ids::settle`]: their rows exist.
    leaving: BTreeSet<u32>,
    /// Taken in place of other numbers, until [`Ids::settle`].
    kept: BTreeMap<u32, u32>,
    /// Used numbers of `kept`, and the numbers that they replace.
    reused: BTreeSet<u32>,
    replaced: BTreeSet<u32>,
}

impl Ids {
    pub(super) fn beside(leaving: impl Iterator<Item = u32>) -> Self {
        let (free, kept, reused, replaced) = Default::default();
        Self { next: 1, free, leaving: leaving.collect(), kept, reused, replaced }
    }

    /// Until [`Ids::settle`], a key of `kept` is replaced by its value.
    pub(super) fn keep(&mut self, kept: BTreeMap<u32, u32>) {
        self.kept = kept;
    }

    pub(super) fn settle(&mut self) {
        self.kept.clear();
        let mut free = std::mem::take(&mut self.leaving);
        let reused = std::mem::take(&mut self.reused);
        let next = reused.last().map_or(self.next, |last| self.next.max(last + 1));
        free.extend(std::mem::take(&mut self.replaced));
        free.extend(self.next..next);
        self.free.extend(free.range(..next).filter(|id| !reused.contains(id)).copied());
        self.next = next;
    }

    pub(super) fn take(&mut self) -> u32 {
        let id = self.free.remove_min().unwrap_or_else(|| {
            while self.leaving.contains(&self.next) {
                self.next += 1;
            }
            self.next += 1;
            self.next - 1
        });
        // The kept number stays in `leaving`: later numbers are then equal to the first build's.
        self.kept.remove(&id).map_or(id, |kept| {
            self.reused.insert(kept);
            self.replaced.insert(id);
            kept
        })
    }

    pub(super) fn give_back(&mut self, id: u32) {
        self.reused.remove(&id);
        self.leaving.insert(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_free_when_the_rows_that_had_it_are_gone() {
        let mut ids = Ids::beside([2, 7].into_iter());
        assert_eq!([ids.take(), ids.take()], [1, 3]);
        ids.give_back(1);
        assert_eq!(ids.take(), 4);
        ids.settle();
        assert_eq!([ids.take(), ids.take(), ids.take(), ids.take(), ids.take()], [1, 2, 5, 6, 7]);
    }

    #[test]
    fn kept_numbers_are_taken_in_place_of_others_and_all_others_are_free_afterwards() {
        let mut ids = Ids::beside([2, 7, 9].into_iter());
        ids.keep([(1, 9), (4, 2), (3, 3)].into());
        assert_eq!([ids.take(), ids.take(), ids.take(), ids.take()], [9, 3, 2, 5]);
        ids.settle();
        assert_eq!([ids.take(), ids.take(), ids.take(), ids.take(), ids.take()], [1, 4, 6, 7, 8]);
        assert_eq!(ids.take(), 10);
    }
}
