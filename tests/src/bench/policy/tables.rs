//! Policy's tables in the kernel: which rows a change wrote, and how much memory they take. Read from the pinned maps,
//! not asked of the agent.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData};
use wharf_common::{
    CellKey, CellRow, EndpointKey, PeerRow, PortKey, SetsRow,
    map::{self, POLICY_SETS_MAX},
    policy::Hit,
};

use crate::{
    Node,
    bench::scale::{KIB, memlock},
};

/// Tables whose rows are counted.
pub(super) const TABLES: [&str; 4] = [map::IPCACHE, map::POLICY_PORTS, map::POLICY_CELLS, map::POLICY_SETS];

/// All rows, without the counters of cells.
#[derive(Debug, Default)]
pub(in crate::bench) struct Rows {
    peers: BTreeMap<(u32, [u8; 16]), PeerRow>,
    ports: BTreeMap<(u32, PortKey), u32>,
    cells: BTreeMap<CellKey, (Hit, Hit)>,
    sets: BTreeMap<u32, SetsRow>,
}

impl Rows {
    /// Reads them.
    pub(in crate::bench) fn of(node: &Node) -> Result<Self> {
        let mut rows = Self::default();
        let peers: LpmTrie<MapData, EndpointKey, PeerRow> = Map::LpmTrie(open(node, map::IPCACHE)?).try_into()?;
        for row in peers.iter() {
            let (key, row) = row.context(map::IPCACHE)?;
            rows.peers.insert((key.prefix_len(), key.data().addr), row);
        }
        let ports: LpmTrie<MapData, PortKey, u32> = Map::LpmTrie(open(node, map::POLICY_PORTS)?).try_into()?;
        for row in ports.iter() {
            let (key, class) = row.context(map::POLICY_PORTS)?;
            rows.ports.insert((key.prefix_len(), key.data()), class);
        }
        let cells: HashMap<MapData, CellKey, CellRow> = Map::HashMap(open(node, map::POLICY_CELLS)?).try_into()?;
        for row in cells.iter() {
            let (key, row) = row.context(map::POLICY_CELLS)?;
            rows.cells.insert(key, (row.admin, row.rest));
        }
        let sets: Array<MapData, SetsRow> = Map::Array(open(node, map::POLICY_SETS)?).try_into()?;
        for id in 0..POLICY_SETS_MAX {
            let row = sets.get(&id, 0).context(map::POLICY_SETS)?;
            if row != SetsRow::default() {
                rows.sets.insert(id, row);
            }
        }
        Ok(rows)
    }

    /// Rows of each of [`TABLES`] that are new, other ones, or gone.
    pub(in crate::bench) fn written_since(&self, before: &Self) -> [f64; 4] {
        [
            written(&before.peers, &self.peers),
            written(&before.ports, &self.ports),
            written(&before.cells, &self.cells),
            written(&before.sets, &self.sets),
        ]
    }
}

fn written<K: Ord, V: PartialEq>(before: &BTreeMap<K, V>, after: &BTreeMap<K, V>) -> f64 {
    let put = after.iter().filter(|(key, row)| before.get(key) != Some(row)).count();
    let gone = before.keys().filter(|key| !after.contains_key(key)).count();
    // A few hundred thousand at most: exact.
    (put + gone) as f64
}

/// Opens a shared map by its pin.
pub(in crate::bench) fn open(node: &Node, name: &str) -> Result<MapData> {
    let shared: PathBuf = node.dirs().endpoint_pins().parent().context("the directory of the pins")?.join("shared");
    MapData::from_pin(shared.join(name)).with_context(|| format!("open {name}"))
}

/// Kernel memory of each of [`TABLES`], KiB: `memlock` of fdinfo.
pub(super) fn memory(node: &Node) -> Result<[f64; 4]> {
    let mut sizes = [0.0; 4];
    for (size, name) in sizes.iter_mut().zip(TABLES) {
        *size = memlock(open(node, name)?.fd())? / KIB;
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_new_or_others_or_gone_are_written() {
        let of = |pairs: &[(u32, u32)]| pairs.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(written(&of(&[(1, 1), (2, 2), (3, 3)]), &of(&[(1, 1), (2, 9), (4, 4)])), 3.0);
        assert_eq!(written(&of(&[(1, 1)]), &of(&[(1, 1)])), 0.0);
    }
}
