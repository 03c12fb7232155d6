//! The fake's policy tables, never full.

use std::collections::BTreeMap;

use wharf_common::{SetsRow, map};
use wharf_core::{
    kernel::{KernelErrorKind, Result},
    policy::{Judged, Mode, PolicyRows, RowChange},
};

use super::Operation;
use crate::{
    bpf::{
        inventory::Row,
        policy::{Cause, generation_after, peer_key, peer_of, port_key, port_of, readable, slots_of, sound, subject},
    },
    error::fail,
};

#[derive(Default)]
pub(super) struct Policy {
    pub(super) rows: PolicyRows,
    pub(super) mode: Mode,
    pub(super) peers_max: Option<u32>,
    addresses: BTreeMap<u32, u32>,
    /// The next call fails at this row change.
    pub(super) fails_at: Option<(usize, KernelErrorKind)>,
}

impl Policy {
    pub(super) fn change(&mut self, changes: &[RowChange], mode: Mode) -> Result<()> {
        if changes.is_empty() && self.mode == mode {
            return Ok(());
        }
        let fails_at = self.fails_at.take();
        let increased = generation_after(self.rows.generation, !changes.is_empty());
        let slots = slots_of(changes).filter(|_| self.rows.generation != 0 && self.mode == mode);
        for (index, change) in changes.iter().enumerate() {
            let failure = match fails_at {
                Some((at, kind)) if at == index => Err((kind, "the test asked for this failure")),
                _ => self.change_row(change).map_err(|cause| (KernelErrorKind::Other, cause)),
            };
            if let Err((kind, cause)) = failure {
                if index > 0 {
                    self.rows.generation = increased;
                }
                return Err(fail(Operation::ChangePolicy.as_str(), subject(change), kind, cause));
            }
        }
        match slots {
            Some(slots) => slots.into_iter().for_each(|slot| *self.addresses.entry(slot).or_default() += 1),
            None => self.rows.generation = increased,
        }
        self.mode = mode;
        Ok(())
    }

    /// A prefix is stored as its kernel key reads back.
    fn change_row(&mut self, change: &RowChange) -> std::result::Result<(), Cause> {
        let rows = &mut self.rows;
        match *change {
            RowChange::Sets(id, row) => put(&mut rows.sets, id, (row != SetsRow::default()).then_some(row)),
            RowChange::Peer(net, row) => put(&mut rows.peers, peer_of(&peer_key(net)?)?, row),
            RowChange::Ports(range, class) => put(&mut rows.ports, port_of(&port_key(&range)?)?, class),
            RowChange::Cell(key, None) => put(&mut rows.cells, key, None),
            RowChange::Cell(key, Some(cell)) => {
                sound(&cell)?;
                rows.cells.entry(key).or_insert((cell, Judged::default())).0 = cell;
            }
        }
        Ok(())
    }

    pub(super) fn dump(&self, name: &str) -> Vec<Row> {
        let PolicyRows { sets, peers, ports, cells, generation } = &self.rows;
        match name {
            map::IPCACHE => peers.iter().map(|(net, row)| readable::peer(net, row)).collect(),
            map::POLICY_PORTS => ports.iter().map(|(range, class)| readable::ports(range, *class)).collect(),
            map::POLICY_CELLS => cells.iter().map(|(key, (cell, by))| readable::cell(key, cell, by)).collect(),
            map::POLICY_SETS => sets.iter().map(|(id, row)| readable::sets(*id, row)).collect(),
            map::ADDRESS_GENERATIONS => {
                self.addresses.iter().map(|(slot, n)| readable::address_generation((*slot, *n))).collect()
            }
            _ => vec![readable::state(*generation, self.mode)],
        }
    }
}

fn put<K: Ord, V>(rows: &mut BTreeMap<K, V>, key: K, row: Option<V>) {
    match row {
        Some(row) => rows.insert(key, row),
        None => rows.remove(&key),
    };
}
