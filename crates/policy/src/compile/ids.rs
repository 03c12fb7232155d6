//! Numbers of rows, reused when the rows that had them are gone.

use std::collections::BTreeSet;

/// Numbers from 1, the lowest free one first.
#[derive(Debug, Clone)]
pub(super) struct Ids {
    next: u32,
    free: BTreeSet<u32>,
    /// Given back since the last [`Ids::settle`]: rows with them are still there.
    leaving: Vec<u32>,
}

impl Ids {
    /// Numbers above `used`.
    pub(super) fn above(used: u32) -> Self {
        Self { next: used + 1, free: BTreeSet::new(), leaving: Vec::new() }
    }

    /// The rows of the numbers that were given back are gone.
    pub(super) fn settle(&mut self) {
        self.free.extend(self.leaving.drain(..));
    }

    pub(super) fn take(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub(super) fn give_back(&mut self, id: u32) {
        self.leaving.push(id);
    }
}
