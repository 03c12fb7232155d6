//! Rules that redirect: no document says them here, so the rows that an accepting rule made are changed.

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use wharf_common::{ABI_VERSION, CellKey, CellRow, PolicyState, SetsRow, map, policy::Hit};
use wharf_tests::{Attached, Node};

/// A side of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ingress,
    Egress,
}

fn data(node: &Node, name: &str) -> Result<MapData> {
    let path = node.dirs().bpffs.join(format!("wharf/v{ABI_VERSION}/shared/{name}"));
    MapData::from_pin(&path).with_context(|| format!("open {}", path.display()))
}

/// Gives all rules that let packets pass on this side of an endpoint another ruling, and lets flows be judged anew.
pub(crate) fn rule(node: &Node, end: &Attached, side: Side, ruling: u32) -> Result<()> {
    let sets: Array<MapData, SetsRow> = Map::Array(data(node, map::POLICY_SETS)?).try_into()?;
    let sets = sets.get(&u32::from(node.endpoint(end)?.id), 0)?;
    let set = if side == Side::Ingress { sets.ingress } else { sets.egress };
    let mut cells: HashMap<MapData, CellKey, CellRow> = Map::HashMap(data(node, map::POLICY_CELLS)?).try_into()?;
    let ours: Vec<_> = cells.iter().collect::<Result<Vec<_>, _>>()?;
    let mut changed = 0;
    for (key, mut row) in ours.into_iter().filter(|(key, _)| key.set == set) {
        let accepts = |hit: &Hit| hit.rule != 0;
        if accepts(&row.rest) {
            row.rest.ruling = ruling;
            cells.insert(key, row, 0)?;
            changed += 1;
        }
    }
    ensure!(changed > 0, "no rule of set {set} lets packets pass");
    let mut state: Array<MapData, PolicyState> = Map::Array(data(node, map::POLICY_STATE)?).try_into()?;
    let now = state.get(&0, 0)?;
    Ok(state.set(0, PolicyState { generation: now.generation + 1, ..now }, 0)?)
}
