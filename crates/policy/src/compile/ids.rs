//! Numbers of rows, reused when the rows that had them are gone.

use std::collections::BTreeSet;

use imbl::OrdSet;

/// Numbers from 1, the lowest first.
#[derive(Debug, Clone)]
pub(super) struct Ids {
    /// Numbers below it were taken before.
    next: u32,
    /// Numbers below `next` that are free.
    free: OrdSet<u32>,
    /// Given back since the last [`Ids::settle`]: rows with them are still there.
    leaving: BTreeSet<u32>,
}

impl Ids {
    /// Rows with numbers of `leaving` are still there.
    pub(super) fn beside(leaving: impl Iterator<Item = u32>) -> Self {
        Self { next: 1, free: OrdSet::new(), leaving: leaving.collect() }
    }

    /// The rows of the numbers that were given back are gone.
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
