//! Row numbers, reused after the removal of their rows.

use std::collections::BTreeSet;

use imbl::OrdSet;

/// Row numbers from 1, lowest first.
#[derive(Debug, Clone)]
pub(super) struct Ids {
    /// Smaller numbers have been used.
    next: u32,
    /// Below `next`.
    free: OrdSet<u32>,
    /// Released since [`Ids::settle`]: their rows exist.
    leaving: BTreeSet<u32>,
}

impl Ids {
    /// Rows of the numbers in `leaving` exist.
    pub(super) fn beside(leaving: impl Iterator<Item = u32>) -> Self {
        Self { next: 1, free: OrdSet::new(), leaving: leaving.collect() }
    }

    pub(super) fn settle(&mut self) {
        let leaving = std::mem::take(&mut self.leaving);
        for id in leaving.range(..self.next) {
            self.free.insert(*id);
        }
    }

    pub(super) fn take(&mut self) -> u32 {
        self.free.remove_min().unwrap_or_else(|| {
            while self.leaving.contains(&self.next) {
                self.next += 1;
            }
            self.next += 1;
            self.next - 1
        })
    }

    pub(super) fn give_back(&mut self, id: u32) {
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
}
